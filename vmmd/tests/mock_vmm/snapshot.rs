//! Snapshots and migrations: a line of text each.

use std::{
    fs::File,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    thread,
    time::Duration,
};

use proto::vmm::{
    DisksQuiet, Error, ErrorKind, MigrationRound, Save, SaveReply, Send, SendReply, event,
    response::Result as Outcome,
};

use crate::guest::Guest;

/// What each begins with.
const BEGIN: &str = "snapshot of ";

/// What each machine that is sent begins with.
const SENT: &str = "machine of ";

/// `mock.save=refuse`, `mock.save=hang` and `mock.save=keep` (the descriptor) are options of the guest.
pub fn save(guest: &Guest, request: &Save, fds: Vec<OwnedFd>) -> Option<Outcome> {
    match guest.option("mock.save").as_deref() {
        Some("refuse") => {
            return Some(Outcome::Error(Error {
                message: "writing the snapshot: No space left on device".into(),
                kind: ErrorKind::Resources.into(),
            }));
        }
        Some("hang") => return None,
        _ => {}
    }
    let text = format!("{BEGIN}{}", guest.status().name);
    let file = fds.into_iter().nth(request.file_fd as usize).unwrap();
    let file = File::from(file);
    file.write_all_at(text.as_bytes(), 0).unwrap();
    if guest.option("mock.save").as_deref() == Some("keep") {
        // Open until the process ends.
        std::mem::forget(file);
    }
    Some(Outcome::Saved(SaveReply {
        file_bytes: text.len() as u64,
        memory_bytes: 4096,
        rounds: 1,
        pause_ns: if request.paused { 2_000_000_000 } else { 3_000_000 },
        total_ns: 2_500_000_000,
    }))
}

/// `mock.send=hang`, `mock.send=much` and `mock.send=PATH` are options of the guest: it never has sent everything, it sends more than anybody
/// keeps, and it sends nothing before there is a file of that name.
pub fn send(guest: &Guest, request: &Send, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let socket = fds.into_iter().nth(request.socket_fd as usize).unwrap();
    let mut socket = File::from(socket);
    let text = format!("{SENT}{}", guest.status().name);
    guest.tell(event::Kind::MigrationRound(MigrationRound {
        sent_bytes: 5 << 20,
        dirty_bytes: 1 << 20,
        bytes_per_second: 9 << 20,
        throttle_percent: if request.throttle { 20 } else { 0 },
        ..MigrationRound::default()
    }));
    if guest.option("mock.send").as_deref() == Some("hang") {
        std::mem::forget(socket);
        return None;
    }
    if let Some(path) = guest.option("mock.send").filter(|path| path.starts_with('/')) {
        while !Path::new(&path).exists() {
            thread::sleep(Duration::from_millis(10));
        }
    }
    let much = guest.option("mock.send").as_deref() == Some("much");
    if much && !write_much(&mut socket) || socket.write_all(text.as_bytes()).is_err() {
        return Some(Outcome::Error(Error {
            message: "writing the snapshot: Broken pipe".into(),
            kind: ErrorKind::Internal.into(),
        }));
    }
    guest.was_sent();
    Some(Outcome::Sent(SendReply {
        sent_bytes: text.len() as u64,
        memory_bytes: 4096,
        disk_bytes: 0,
        rounds: 1,
        pause_ns: 3_000_000,
        total_ns: 2_500_000_000,
    }))
}

/// Writes 64 MiB; false when the other end is closed.
fn write_much(socket: &mut File) -> bool {
    let mut left = 64 << 20;
    while left > 0 {
        match socket.write(&[b'x'; 1 << 16]) {
            Ok(written) => left -= written.min(left),
            // The socket has a limit of time.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    true
}

/// Keeps a socket that nobody reads from, for ever.
pub fn never_read(socket: &OwnedFd) -> ! {
    loop {
        std::thread::park();
        assert!(rustix::io::fcntl_getfd(socket).is_ok());
    }
}

/// What comes over a socket; nothing when it is no machine.
pub fn receive(socket: OwnedFd) -> Option<String> {
    let mut text = String::new();
    File::from(socket).read_to_string(&mut text).unwrap();
    text.starts_with(SENT).then_some(text)
}

/// The first disk has what was written until now, and is quiet.
pub fn quiet(guest: &Guest) {
    write(guest, b"until the snapshot");
    guest.tell(event::Kind::DisksQuiet(DisksQuiet {}));
}

/// The guest writes again.
pub fn released(guest: &Guest) {
    write(guest, b"behind the snapshot");
}

fn write(guest: &Guest, text: &[u8]) {
    if let Some(disk) = guest.disks().first() {
        disk.image.write_all_at(text, 0).unwrap();
    }
}

/// What is in a snapshot; nothing when it is none.
pub fn read(file: OwnedFd) -> Option<String> {
    let mut file = File::from(file);
    assert!(file.write_at(b"x", 0).is_err(), "it is open for reading only");
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text.starts_with(BEGIN).then_some(text)
}
