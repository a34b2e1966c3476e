//! Messages of the other daemon of a migration, decoded and checked as far as that needs no state
//! of the node. The messages are untrusted: the certificate proves the role of a peer, not
//! correctness.

use std::{collections::BTreeSet, net::Ipv4Addr};

use uuid::Uuid;
use vm_lifecycle::handover::Message;
use vmmd_api::v1::{self, HandoverStep, receive_vm_request::Part};
use vmmd_host::{
    capacity::{Cpus, refuse_missing},
    failure::Failure,
    text,
};
use vmmd_spec::{
    cpu::Model,
    nic::Mac,
    pci::{self, PciSlot},
    vm::{Attachment, Nic, VmSpec},
};
use vmmd_store::AccessKeysRecord;

use crate::{
    disk::moved,
    vm::{access_keys, refuse_what_stays},
};

/// Version of what daemons say to each other.
pub const PROTOCOL: u32 = 1;
/// Longest text of the other daemon that a message repeats, in bytes.
const REPEATED: usize = 1000;

/// A VM that the source offers.
#[derive(Debug)]
pub struct Offer {
    /// Its UUID.
    pub uid: Uuid,
    /// Number of the migration, from 1.
    pub migration: u64,
    /// The VM, not checked as a manifest yet.
    pub vm: v1::Vm,
    /// Its spec.
    pub spec: VmSpec,
    /// A slot for each of its devices.
    pub hardware: v1::PeerHardware,
    /// Features of the guest's processor by its model; empty with the model "host".
    pub features: Vec<String>,
    /// Disks of the source's node that come along.
    pub disks: Vec<moved::Coming>,
    /// SSH keys that the guest may have because of its spec.
    pub access_keys: Vec<AccessKeysRecord>,
}

/// Configuration of a NIC in a network of the node, from the source.
#[derive(Debug)]
pub struct Address<'a> {
    /// The NIC.
    pub nic: &'a Nic,
    /// The network's name.
    pub network: &'a str,
    /// PCI slot.
    pub slot: u32,
    /// MAC address.
    pub mac: Mac,
    /// IPv4 address, in a network that has some.
    pub address: Option<Ipv4Addr>,
}

impl Offer {
    /// Checks an offer to a node with these processors.
    pub fn new(request: v1::OfferVmRequest, cpus: &Cpus) -> Result<Self, Failure> {
        if request.protocol != PROTOCOL {
            let message = format!(
                "this vmmd speaks version {PROTOCOL} of the protocol of migrations, the source {}",
                request.protocol
            );
            return Err(Failure::precondition("PEER_PROTOCOL", message));
        }
        let uid = uuid("uid", &request.uid)?;
        if request.migration == 0 {
            return Err(Failure::field("migration", "must be above 0"));
        }
        let vm = request.vm.ok_or_else(|| Failure::field("vm", "must be given"))?;
        let wire = vm.spec.clone().unwrap_or_default();
        let spec = VmSpec::try_from(&wire)?;
        let features = request.cpu_features.iter().map(String::as_str);
        match spec.processor.model {
            // Only a source before processor models names any: those of its own processors.
            Model::Host => refuse_missing(features, |name| cpus.features.iter().any(|it| it == name))?,
            _ => cpus.check(features)?,
        }
        refuse_what_stays(&spec)?;
        let hardware = request.hardware.unwrap_or_default();
        check_slots(&spec, &hardware)?;
        let disks = moved::check(&spec.disks, &request.disks)?;
        let access_keys = access_keys::check(request.access_keys)?;
        Ok(Self {
            uid,
            migration: request.migration,
            vm,
            spec,
            hardware,
            features: request.cpu_features,
            disks,
            access_keys,
        })
    }

    /// Addresses of the NICs in networks, which the guest keeps. `range` describes a network on
    /// this node, in the same words for equal networks, and says whether it has IPv4.
    pub fn addresses(&self, range: impl Fn(&str) -> (String, bool)) -> Result<Vec<Address<'_>>, Failure> {
        let mut addresses = Vec::new();
        for nic in &self.spec.nics {
            let Attachment::Network { name: network, .. } = &nic.attachment else {
                continue;
            };
            let network = network.as_str();
            let refuse = |why: &str| {
                let message = format!("NIC \"{}\": {why}", nic.name);
                Failure::precondition("MIGRATION_NETWORK", message)
            };
            let (own, has_ipv4) = range(network);
            let peer = self.hardware.nics.get(nic.name.as_str());
            let peer = peer.filter(|peer| peer.address != 0 || !has_ipv4);
            let peer = peer.ok_or_else(|| refuse("the source does not say which address it has"))?;
            if own != peer.range {
                let why = format!(
                    "the network \"{network}\" is {own} on this node and {} on the source's: a VM keeps its address when it moves, so both must be the same",
                    text::brief(&peer.range)
                );
                return Err(refuse(&why));
            }
            addresses.push(Address {
                nic,
                network,
                slot: peer.slot,
                mac: mac(&peer.mac)
                    .ok_or_else(|| refuse("the source says a MAC address that no NIC can have"))?,
                address: has_ipv4.then(|| Ipv4Addr::from(peer.address)),
            });
        }
        Ok(addresses)
    }
}

fn uuid(field: &str, text: &str) -> Result<Uuid, Failure> {
    Uuid::parse_str(text).map_err(|_| Failure::field(field, "must be a UUID"))
}

/// The MAC address of 6 bytes; `None` when they are no address of a NIC.
pub fn mac(bytes: &[u8]) -> Option<Mac> {
    Mac::try_from(<[u8; 6]>::try_from(bytes).ok()?).ok()
}

/// Each device of the spec has a slot, and none has that of another one: else the machine could not be built, which would be found only when
/// everything has been sent.
fn check_slots(spec: &VmSpec, hardware: &v1::PeerHardware) -> Result<(), Failure> {
    let disks = hardware
        .disk_slots
        .iter()
        .map(|(name, slot)| (name.as_str(), *slot, pci::is_disk_address(*slot)));
    let slot = |name, slot| (name, slot, PciSlot::try_from(slot).is_ok());
    let nics = hardware
        .nics
        .iter()
        .map(|(name, nic)| slot(name.as_str(), nic.slot));
    let mut taken = BTreeSet::new();
    for (name, number, is_address) in disks
        .chain(nics)
        .chain([slot("the entropy device", hardware.rng_slot)])
    {
        let refuse = |why: &str| {
            let message = format!("{}: {why}", text::one_line(name, 100));
            Err(Failure::field("hardware", message))
        };
        if !is_address {
            return refuse("there is no such PCI slot");
        }
        if !taken.insert(number) {
            return refuse("another device has its PCI slot");
        }
    }
    let slots = &hardware.disk_slots;
    if let Some(disk) = spec.disks.iter().find(|disk| {
        let slot = slots.get(disk.name.as_str());
        slot.is_none_or(|slot| !disk.bus.has(*slot))
    }) {
        let message = format!("no slot of disk \"{}\"", disk.name);
        return Err(Failure::field("hardware", message));
    }
    for nic in &spec.nics {
        let peer = hardware.nics.get(nic.name.as_str());
        if peer.is_none_or(|peer| mac(&peer.mac).is_none()) {
            let message = format!("no MAC address of NIC \"{}\"", nic.name);
            return Err(Failure::field("hardware", message));
        }
    }
    Ok(())
}

/// Which VM is sent: the first message of the stream.
pub fn opened(first: Option<v1::ReceiveVmRequest>) -> Result<(v1::PeerVm, Uuid), Failure> {
    let Some(Part::Open(vm)) = first.and_then(|first| first.part) else {
        return Err(Failure::field("open", "must come first"));
    };
    let uid = uuid("open.uid", &vm.uid)?;
    Ok((vm, uid))
}

/// Data from the source's `vmm`: each message after the first.
pub fn data(message: v1::ReceiveVmRequest) -> Result<Vec<u8>, Failure> {
    match message.part {
        Some(Part::Data(data)) => Ok(data),
        _ => Err(Failure::field("data", "must follow")),
    }
}

/// Handover message of the source.
pub fn settled(request: &v1::SettleVmRequest) -> Result<Message, Failure> {
    match message_of(request.step(), request.migration) {
        Some(message @ (Message::Prepare(_) | Message::Commit(_) | Message::Abort(_))) => Ok(message),
        _ => Err(Failure::field("step", "must be PREPARE, COMMIT or ABORT")),
    }
}

/// As a message of the hand-over is said to the other daemon.
pub fn step(message: Message) -> HandoverStep {
    match message {
        Message::Prepare(_) => HandoverStep::Prepare,
        Message::Ready(_) => HandoverStep::Ready,
        Message::Refuse(_) => HandoverStep::Refuse,
        Message::Commit(_) => HandoverStep::Commit,
        Message::Abort(_) => HandoverStep::Abort,
        Message::Running(_) => HandoverStep::Running,
    }
}

/// Converts the other daemon's step to a message.
pub fn message_of(step: HandoverStep, migration: u64) -> Option<Message> {
    Some(match step {
        HandoverStep::Prepare => Message::Prepare(migration),
        HandoverStep::Ready => Message::Ready(migration),
        HandoverStep::Refuse => Message::Refuse(migration),
        HandoverStep::Commit => Message::Commit(migration),
        HandoverStep::Abort => Message::Abort(migration),
        HandoverStep::Running => Message::Running(migration),
        HandoverStep::Unspecified => return None,
    })
}

/// The other daemon's reason, for a message of this one.
pub fn reason(text: &str) -> String {
    text::one_line(text, REPEATED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_heard_as_it_was_said() {
        for message in [
            Message::Prepare(7),
            Message::Ready(7),
            Message::Refuse(7),
            Message::Commit(7),
            Message::Abort(7),
            Message::Running(7),
        ] {
            assert_eq!(message_of(step(message), 7), Some(message));
        }
    }
}
