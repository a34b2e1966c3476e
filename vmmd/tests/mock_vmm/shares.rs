//! Shares of the mock's machine.

use std::{
    io::Read,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use vmm_protocol::vmm::{
    AttachShare, DetachShare, Error, ErrorKind, MachineSpec, ShareDetached, ShareStats, event,
    response::Result as Outcome,
};

use crate::guest::Guest;

/// A share that the machine has.
pub struct Plugged {
    name: String,
    slot: u32,
    /// Its process lives as long as somebody holds this.
    socket: Vec<OwnedFd>,
}

/// Waits until the process of a share has begun, or has ended.
fn wait_for(socket: &OwnedFd) {
    let mut stream = UnixStream::from(socket.try_clone().unwrap());
    stream.set_nonblocking(false).unwrap();
    let _ = stream.read(&mut [0]);
}

/// `mock.attach`: `image`: refused; `hang`: not plugged in, nothing comes back; `lost`: plugged in, nothing comes back.
pub fn attach(guest: &Guest, request: AttachShare, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let how = guest.option("mock.attach");
    fds.iter().for_each(wait_for);
    match how.as_deref() {
        Some("image") => return refuse(ErrorKind::Resources, "the process is no good"),
        Some("hang") => {
            guest.print("a share is not plugged in\r\n");
            return None;
        }
        _ => {}
    }
    let wire = request.share.unwrap();
    let clash = |share: &Plugged| share.name == wire.name || share.slot == wire.pci_slot;
    if guest.shares().iter().any(clash) {
        return refuse(ErrorKind::State, "the name or the slot is taken");
    }
    assert_eq!(fds.len(), 1);
    guest.shares().push(Plugged {
        name: wire.name,
        slot: wire.pci_slot,
        socket: fds,
    });
    if how.as_deref() == Some("lost") {
        guest.print("a share is plugged in\r\n");
        return None;
    }
    Some(Outcome::Status(guest.status()))
}

/// Stores the shares of the boot; takes their descriptors.
pub fn boot(guest: &Guest, machine: &MachineSpec, fds: &mut [Option<OwnedFd>]) {
    let shares = machine.shares.iter().map(|share| Plugged {
        name: share.name.clone(),
        slot: share.pci_slot,
        socket: fds[share.fd as usize].take().into_iter().collect(),
    });
    let shares: Vec<_> = shares.collect();
    shares.iter().flat_map(|share| &share.socket).for_each(wait_for);
    *guest.shares() = shares;
}

/// Replaces the process of a share that has ended.
pub fn renew(guest: &Guest, name: &str, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let mut shares = guest.shares();
    let Some(share) = shares.iter_mut().find(|share| share.name == name) else {
        return refuse(ErrorKind::NotFound, "there is no such share");
    };
    share.socket = fds;
    drop(shares);
    Some(Outcome::Status(guest.status()))
}

/// `mock.eject=ignore`: the guest does nothing, until `eject NAME` is typed. `hang`: nothing comes back.
pub fn detach(guest: &Guest, request: &DetachShare) -> Option<Outcome> {
    let how = guest.option("mock.eject");
    if how.as_deref() == Some("hang") {
        return None;
    }
    if !guest.shares().iter().any(|share| share.name == request.name) {
        return refuse(ErrorKind::NotFound, "there is no such share");
    }
    if request.force || how.is_none() {
        eject(guest, &request.name, request.force);
    }
    Some(Outcome::Status(guest.status()))
}

/// The guest gives a share back, or loses it.
pub fn eject(guest: &Guest, name: &str, forced: bool) {
    let mut shares = guest.shares();
    let before = shares.len();
    shares.retain(|share| share.name != name);
    let found = shares.len() < before;
    drop(shares);
    if found && guest.option("mock.event").is_none() {
        guest.tell(event::Kind::ShareDetached(ShareDetached {
            name: name.into(),
            forced,
        }));
    }
}

/// Which ones the machine has.
pub fn stats(guest: &Guest) -> Vec<ShareStats> {
    let shares = guest.shares();
    let of = |share: &Plugged| ShareStats {
        name: share.name.clone(),
    };
    shares.iter().map(of).collect()
}

fn refuse(kind: ErrorKind, message: &str) -> Option<Outcome> {
    Some(Outcome::Error(Error {
        message: message.into(),
        kind: kind.into(),
    }))
}
