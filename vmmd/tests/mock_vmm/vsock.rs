//! The socket device. A program echoes at port 7, of the guest and of the host. No program answers at
//! port 9, and the log of the process says when the client gives up. Other ports refuse connections.

use std::{
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
};

use vmm_protocol::vmm::{ErrorKind, OpenVsock, response::Result as Outcome};
use vmmd_spec::probe::NOTIFY_PORT;

use crate::{control::refuse, guest::Guest};

pub fn open(guest: &Guest, request: OpenVsock, fds: Vec<OwnedFd>) -> Option<Outcome> {
    if !guest.has_vsock() {
        return refuse(ErrorKind::NotFound, "the machine has no socket device");
    }
    let mut socket = UnixStream::from(fds.into_iter().next().unwrap());
    if request.accept && request.port == NOTIFY_PORT {
        guest.wait_for_notice(socket);
        return Some(Outcome::Status(guest.status()));
    }
    let direction = if request.accept { "accept" } else { "connect" };
    thread::spawn(move || {
        socket.set_nonblocking(false).unwrap();
        match request.port {
            7 => socket.write_all(&[0]).unwrap(),
            9 => eprintln!("{direction} waits at 9"),
            _ => return,
        }
        let mut data = [0; 4096];
        // An error is an end, too.
        while let Ok(count @ 1..) = socket.read(&mut data) {
            socket.write_all(data.get(..count).unwrap()).unwrap();
        }
        eprintln!("{direction} {} has ended", request.port);
    });
    Some(Outcome::Status(guest.status()))
}
