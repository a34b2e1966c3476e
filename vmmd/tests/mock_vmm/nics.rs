//! NICs of the mock's machine.

use std::os::fd::OwnedFd;

use vmm_protocol::vmm::{
    AttachNic, DetachNic, Error, ErrorKind, MachineSpec, NicDetached, NicStats, event,
    response::Result as Outcome,
};

use crate::guest::Guest;

/// A NIC that the machine has.
pub struct Plugged {
    pub name: String,
    slot: u32,
    /// Its tap lives as long as somebody holds it.
    _fds: Vec<OwnedFd>,
}

/// `mock.attach`: `image`: refused; `hang`: not plugged in, nothing comes back; `lost`: plugged in, nothing comes back.
pub fn attach(guest: &Guest, request: AttachNic, fds: Vec<OwnedFd>) -> Option<Outcome> {
    let how = guest.option("mock.attach");
    match how.as_deref() {
        Some("image") => return refuse(ErrorKind::Resources, "the tap is no good"),
        Some("hang") => return None,
        _ => {}
    }
    let wire = request.nic.unwrap();
    let clash = |nic: &Plugged| nic.name == wire.name || nic.slot == wire.pci_slot;
    if guest.nics().iter().any(clash) {
        return refuse(ErrorKind::State, "the name or the slot is taken");
    }
    guest.nics().push(Plugged {
        name: wire.name,
        slot: wire.pci_slot,
        _fds: fds,
    });
    (how.as_deref() != Some("lost")).then(|| Outcome::Status(guest.status()))
}

/// Stores the NICs of the boot; takes their descriptors.
pub fn boot(guest: &Guest, machine: &MachineSpec, fds: &mut [Option<OwnedFd>]) {
    let nics = machine.nics.iter().map(|nic| {
        let own = std::iter::once(&nic.fd)
            .chain(&nic.further_fds)
            .chain(&nic.vhost_fds);
        Plugged {
            name: nic.name.clone(),
            slot: nic.pci_slot,
            _fds: own.filter_map(|index| fds[*index as usize].take()).collect(),
        }
    });
    *guest.nics() = nics.collect();
}

/// `mock.eject=ignore`: the guest does nothing, until `eject NAME` is typed. `hang`: nothing comes back.
pub fn detach(guest: &Guest, request: &DetachNic) -> Option<Outcome> {
    let how = guest.option("mock.eject");
    if how.as_deref() == Some("hang") {
        return None;
    }
    if !guest.nics().iter().any(|nic| nic.name == request.name) {
        return refuse(ErrorKind::NotFound, "there is no such NIC");
    }
    if request.force || how.is_none() {
        eject(guest, &request.name, request.force);
    }
    Some(Outcome::Status(guest.status()))
}

/// The guest gives a NIC back, or loses it.
pub fn eject(guest: &Guest, name: &str, forced: bool) {
    let mut nics = guest.nics();
    let before = nics.len();
    nics.retain(|nic| nic.name != name);
    let found = nics.len() < before;
    drop(nics);
    if found && guest.option("mock.event").is_none() {
        guest.tell(event::Kind::NicDetached(NicDetached {
            name: name.into(),
            forced,
        }));
    }
}

/// With numbers that tests know: of `eth0`, which is always told of, and of the others that the machine has.
pub fn stats(guest: &Guest) -> Vec<NicStats> {
    let of = |name: &str| NicStats {
        name: name.into(),
        received_packets: 1,
        received_bytes: 2,
        received_dropped: 3,
        sent_packets: 4,
        sent_bytes: 5,
        sent_dropped: 6,
        received_filtered: 7,
        sent_invalid: 8,
    };
    let nics = guest.nics();
    let others = nics.iter().filter(|nic| nic.name != "eth0");
    [of("eth0")]
        .into_iter()
        .chain(others.map(|nic| of(&nic.name)))
        .collect()
}

fn refuse(kind: ErrorKind, message: &str) -> Option<Outcome> {
    Some(Outcome::Error(Error {
        message: message.into(),
        kind: kind.into(),
    }))
}
