//! Entry point of the fuzz target for peers (`vmmd/fuzz`). It accepts any bytes and processes them
//! like messages of another daemon, as far as that needs no state of the node. It panics when the
//! code accepts an invalid message. The tests here run it over the seeds and over generated input.

use std::{collections::BTreeMap, sync::LazyLock};

use prost::Message as _;
use uuid::Uuid;
use vm_lifecycle::handover::{Effect, Message, Target, TargetEvent};
use vmmd_api::v1;
use vmmd_host::{
    capacity::Cpus,
    failure::{Failure, Kind},
};
use vmmd_spec::{
    pci::{self, PciSlot},
    vm::Manifest,
};

use super::peer_message::{self, Offer};
use crate::disk::moved;

/// Features of this node's processors.
static CPUS: LazyLock<Cpus> = LazyLock::new(|| Cpus {
    features: ["avx", "sse2"].map(str::to_owned).to_vec(),
    of_guests: Some(["avx", "sse2"].map(str::to_owned).to_vec()),
    ..Cpus::default()
});
/// The one network of this node, and its description.
const NETWORK: [&str; 2] = ["lan", "10.80.0.0/24 with gateway 10.80.0.1"];
/// Longest refusal in bytes, except one that lists invalid fields.
const REFUSAL: usize = 2000;

/// A VM of this node that came from another one, or is to come.
#[derive(Debug)]
struct Arriving {
    record: Target,
    /// Migration whose machine has arrived; 0 when none has.
    loaded: u64,
    /// Migration for which it has reported readiness.
    ready: Option<u64>,
    runs: bool,
}

/// All that came from other nodes.
#[derive(Debug, Default)]
struct Node {
    vms: BTreeMap<Uuid, Arriving>,
    /// The stream that is being received.
    receives: Option<(Uuid, u64)>,
}

/// Messages of other daemons, in any order. Each is a byte that says which, its length in two bytes (little-endian) and itself.
pub fn peer_messages(data: &[u8]) {
    let mut node = Node::default();
    let mut rest = data;
    while let Some(([kind, length @ ..], behind)) = rest.split_first_chunk::<3>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        let (message, behind) = behind.split_at(length);
        rest = behind;
        let refused = match kind % 4 {
            0 => v1::OfferVmRequest::decode(message).map(|offer| node.offer(offer)),
            1 => v1::ReceiveVmRequest::decode(message).map(|part| node.receive(part)),
            2 => v1::SettleVmRequest::decode(message).map(|step| node.settle(&step)),
            // The stream ends: it was whole.
            _ => Ok(node.received()),
        };
        if let Ok(Err(failure)) = refused {
            check_refusal(&failure);
        }
    }
}

fn check_refusal(failure: &Failure) {
    assert!(!failure.reason.is_empty() && !failure.message.is_empty());
    assert!(
        failure.kind == Kind::Invalid || failure.message.len() <= REFUSAL,
        "{failure}"
    );
}

impl Node {
    fn offer(&mut self, request: v1::OfferVmRequest) -> Result<(), Failure> {
        let wanted = request.cpu_features.clone();
        let offer = Offer::new(request, &CPUS)?;
        assert!(wanted.iter().all(|feature| CPUS.features.contains(feature)));
        check_devices(&offer);
        assert_eq!(moved::along(&offer.spec.disks).count(), offer.disks.len());
        let manifest = Manifest::try_from(&offer.vm)?;
        assert_eq!(manifest.spec, offer.spec);
        let range = |network: &str| match network == NETWORK[0] {
            true => (NETWORK[1].to_owned(), true),
            false => (String::new(), false),
        };
        for address in offer.addresses(range)? {
            assert!(address.address.is_none_or(|address| !address.is_unspecified()));
            assert!(PciSlot::try_from(address.slot).is_ok());
        }
        self.vms.entry(offer.uid).or_insert(Arriving {
            record: Target::Idle(offer.migration - 1),
            loaded: 0,
            ready: None,
            runs: false,
        });
        Ok(())
    }

    fn receive(&mut self, part: v1::ReceiveVmRequest) -> Result<(), Failure> {
        if self.receives.is_some() {
            return peer_message::data(part)
                .map(drop)
                .inspect_err(|_| self.receives = None);
        }
        let (vm, uid) = peer_message::opened(Some(part))?;
        self.receives = Some((uid, vm.migration));
        Ok(())
    }

    fn received(&mut self) -> Result<(), Failure> {
        let Some((uid, migration)) = self.receives.take() else {
            return peer_message::opened(None).map(drop);
        };
        if let Some(vm) = self.vms.get_mut(&uid)
            && vm.record == Target::Idle(migration.saturating_sub(1))
        {
            vm.loaded = migration;
        }
        Ok(())
    }

    fn settle(&mut self, request: &v1::SettleVmRequest) -> Result<(), Failure> {
        let message = peer_message::settled(request)?;
        let vm = Uuid::parse_str(&request.uid)
            .ok()
            .and_then(|uid| self.vms.get_mut(&uid));
        let Some(vm) = vm else { return Ok(()) };
        let loaded = vm.loaded != 0;
        let (record, effects) = vm.record.on(TargetEvent::Received { message, loaded });
        vm.record = record;
        for effect in effects {
            match effect {
                Effect::Run => {
                    let committed = matches!(message, Message::Commit(it) if vm.ready == Some(it));
                    assert!(loaded && committed && record.may_run(), "{message:?} of {vm:?}");
                    vm.runs = true;
                }
                Effect::Kill => {
                    assert!(!vm.runs, "{message:?} takes away what runs here");
                    vm.loaded = 0;
                }
                Effect::Send(Message::Ready(it)) => {
                    assert!(loaded, "{message:?} of {vm:?}");
                    vm.ready = Some(it);
                }
                Effect::Send(Message::Running(_)) => assert!(record.may_run()),
                Effect::Send(said) => assert_eq!(said, Message::Refuse(request.migration)),
            }
        }
        assert!(!vm.runs || vm.record.may_run(), "{message:?} of {vm:?}");
        Ok(())
    }
}

/// Every device of an offer that is taken has a slot of its own.
fn check_devices(offer: &Offer) {
    let hardware = &offer.hardware;
    let disks = offer.spec.disks.iter().map(|disk| disk.name.as_str());
    let disks = disks.map(|name| hardware.disk_slots.get(name).copied());
    let nics = offer.spec.nics.iter().map(|nic| nic.name.as_str());
    let nics = nics.map(|name| hardware.nics.get(name).map(|nic| nic.slot));
    let slots: Option<Vec<_>> = disks.chain(nics).chain([Some(hardware.rng_slot)]).collect();
    let mut slots = slots.expect("each device has a slot");
    assert!(slots.iter().all(|slot| pci::is_disk_address(*slot)), "{slots:?}");
    let count = slots.len();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), count, "two devices have one slot");
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;
    use vmmd_api::v1::{HandoverStep, receive_vm_request::Part};

    use super::*;

    const UID: &str = "6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0001";

    fn said(kind: u8, message: &impl prost::Message) -> Vec<u8> {
        let message = message.encode_to_vec();
        let length = u16::try_from(message.len()).unwrap().to_le_bytes();
        [&[kind][..], &length, &message].concat()
    }

    /// A VM with a disk on shared storage and one that comes along, and two NICs, one of them in a network.
    fn offer() -> v1::OfferVmRequest {
        let nic = |name: &str, attachment| v1::NicSpec {
            name: name.into(),
            attachment: Some(attachment),
            ..Default::default()
        };
        let place = |slot, address: u32| v1::PeerNic {
            slot,
            mac: vec![0x52, 0x54, 0, 0, 0, u8::try_from(slot).unwrap()],
            address,
            range: if address == 0 {
                String::new()
            } else {
                NETWORK[1].into()
            },
        };
        let spec = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 1,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(v1::LinuxBoot {
                    kernel: "/boot/vmlinuz".into(),
                    ..Default::default()
                })),
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: 128 << 20,
                ..Default::default()
            }),
            disks: vec![
                v1::DiskSpec {
                    name: "root".into(),
                    source: Some(v1::disk_spec::Source::Path("/srv/root.raw".into())),
                    format: v1::DiskFormat::Raw.into(),
                    ..Default::default()
                },
                v1::DiskSpec {
                    name: "data".into(),
                    source: Some(v1::disk_spec::Source::Disk("of-node".into())),
                    ..Default::default()
                },
            ],
            nics: vec![
                nic("eth0", v1::nic_spec::Attachment::Network("lan".into())),
                nic("eth1", v1::nic_spec::Attachment::Bridge("br0".into())),
            ],
            ..Default::default()
        };
        v1::OfferVmRequest {
            access_keys: Vec::new(),
            protocol: peer_message::PROTOCOL,
            vm: Some(v1::Vm {
                metadata: Some(v1::ObjectMetadata {
                    name: "web".into(),
                    ..Default::default()
                }),
                spec: Some(spec),
                status: None,
            }),
            uid: UID.into(),
            migration: 3,
            hardware: Some(v1::PeerHardware {
                rng_slot: 1,
                disk_slots: [("root".to_owned(), 10), ("data".to_owned(), 11)].into(),
                nics: [
                    ("eth0".to_owned(), place(2, 0x0a50_0002)),
                    ("eth1".to_owned(), place(3, 0)),
                ]
                .into(),
                firmware: 2,
            }),
            cpu_features: vec!["avx".into()],
            disks: vec![v1::PeerDisk {
                name: "of-node".into(),
                uid: "6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0002".into(),
                labels: [("tier".to_owned(), "gold".to_owned())].into(),
                format: v1::DiskFormat::Qcow2.into(),
                size_bytes: 1 << 30,
                allocated_bytes: 1 << 20,
                ..Default::default()
            }],
        }
    }

    fn part(part: Part) -> Vec<u8> {
        said(1, &v1::ReceiveVmRequest { part: Some(part) })
    }

    fn machine(migration: u64) -> Vec<u8> {
        let open = Part::Open(v1::PeerVm {
            name: "web".into(),
            uid: UID.into(),
            migration,
        });
        [part(open), part(Part::Data(b"machine".to_vec())), vec![3, 0, 0]].concat()
    }

    fn settle(migration: u64, step: HandoverStep) -> Vec<u8> {
        let request = v1::SettleVmRequest {
            name: "web".into(),
            uid: UID.into(),
            migration,
            step: step.into(),
        };
        said(2, &request)
    }

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        use HandoverStep::{Abort, Commit, Prepare, Running};
        let whole = [
            said(0, &offer()),
            machine(3),
            settle(3, Prepare),
            settle(3, Commit),
        ];
        let other = |change: fn(&mut v1::OfferVmRequest)| {
            let mut offer = offer();
            change(&mut offer);
            said(0, &offer)
        };
        let twice = |offer: &mut v1::OfferVmRequest| {
            offer.hardware.as_mut().unwrap().rng_slot = 10;
        };
        let nowhere = |offer: &mut v1::OfferVmRequest| {
            offer.hardware.as_mut().unwrap().rng_slot = u32::MAX;
        };
        let elsewhere = |offer: &mut v1::OfferVmRequest| {
            let nics = &mut offer.hardware.as_mut().unwrap().nics;
            nics.get_mut("eth0").unwrap().range = "10.81.0.0/24 with gateway 10.81.0.1".into();
        };
        vec![
            ("moves", whole.concat()),
            (
                "aborted",
                [
                    said(0, &offer()),
                    machine(3),
                    settle(3, Prepare),
                    settle(3, Abort),
                ]
                .concat(),
            ),
            ("not_loaded", [said(0, &offer()), settle(3, Prepare)].concat()),
            (
                "later",
                [
                    whole.concat(),
                    settle(2, Commit),
                    settle(4, Abort),
                    settle(4, Running),
                ]
                .concat(),
            ),
            (
                "stream_without_end",
                [said(0, &offer()), machine(3), machine(9)].concat(),
            ),
            ("slot_twice", other(twice)),
            ("no_such_slot", other(nowhere)),
            ("other_network", other(elsewhere)),
            ("other_protocol", other(|offer| offer.protocol = 2)),
            (
                "features",
                other(|offer| offer.cpu_features = (0..200).map(|it| format!("f{it}")).collect()),
            ),
            ("no_number", other(|offer| offer.migration = 0)),
            ("disk_not_sent", other(|offer| offer.disks.clear())),
            (
                "disk_of_nothing",
                other(|offer| offer.disks[0].name = "other".into()),
            ),
            (
                "disk_without_end",
                other(|offer| offer.disks[0].size_bytes = u64::MAX),
            ),
        ]
    }

    fn folder() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/peer_messages")
    }

    #[test]
    fn the_seeds_of_peer_messages_do_no_harm() {
        let folder = folder();
        if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
            for (name, seed) in seeds() {
                fs::write(folder.join(name), seed).unwrap();
            }
        }
        let mut count = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            peer_messages(&fs::read(entry.unwrap().path()).unwrap());
            count += 1;
        }
        assert!(count >= seeds().len(), "{count} seeds in {}", folder.display());
    }

    #[test]
    fn committed_vm_runs_whatever_is_said_later() {
        let mut node = Node::default();
        node.offer(offer()).unwrap();
        let said = |node: &mut Node, step: HandoverStep| {
            node.settle(&v1::SettleVmRequest {
                name: "web".into(),
                uid: UID.into(),
                migration: 3,
                step: step.into(),
            })
            .unwrap();
            node.vms.values().all(|vm| vm.runs)
        };
        assert!(!said(&mut node, HandoverStep::Commit), "nothing has come");
        node.receives = Some((Uuid::parse_str(UID).unwrap(), 3));
        node.received().unwrap();
        assert!(!said(&mut node, HandoverStep::Commit), "it is not prepared");
        assert!(!said(&mut node, HandoverStep::Prepare));
        assert!(said(&mut node, HandoverStep::Commit));
        assert!(said(&mut node, HandoverStep::Abort));
    }

    #[test]
    fn offer_with_impossible_places_of_devices_is_refused() {
        let refused = |change: &dyn Fn(&mut v1::PeerHardware)| {
            let mut offer = offer();
            change(offer.hardware.as_mut().unwrap());
            Offer::new(offer, &CPUS).unwrap_err().message
        };
        for (change, why) in [
            (
                &(|it: &mut v1::PeerHardware| it.rng_slot = 10) as &dyn Fn(&mut v1::PeerHardware),
                "the entropy device: another device has its PCI slot",
            ),
            (&|it| it.rng_slot = 32, "there is no such PCI slot"),
            (
                &|it| it.disk_slots = [("root\n".repeat(50), 102)].into(),
                "root root root",
            ),
            (&|it| it.disk_slots.clear(), "no slot of disk \"root\""),
            // A port of the SATA controller is no place of a virtio disk.
            (
                &|it| it.disk_slots = [("root".into(), 96), ("data".into(), 11)].into(),
                "no slot of disk \"root\"",
            ),
            (&|it| it.nics.clear(), "no MAC address of NIC \"eth0\""),
            (
                &|it| it.nics.get_mut("eth1").unwrap().mac = vec![1, 0, 0, 0, 0, 1],
                "no MAC address of NIC \"eth1\"",
            ),
        ] {
            let message = refused(change);
            assert!(message.contains(why) && message.len() < 300, "{message}");
        }
    }

    #[test]
    fn an_offer_whose_disks_are_not_those_that_go_along_is_refused() {
        let refused = |change: fn(&mut v1::OfferVmRequest)| {
            let mut offer = offer();
            change(&mut offer);
            let failure = Offer::new(offer, &CPUS).unwrap_err();
            format!("{} {failure:?}", failure.reason)
        };
        assert!(Offer::new(offer(), &CPUS).is_ok());
        for (change, why) in [
            (
                (|it| it.disks.clear()) as fn(&mut v1::OfferVmRequest),
                "MIGRATION_DISKS",
            ),
            (|it| it.disks[0].name = "other".into(), "MIGRATION_DISKS"),
            (
                |it| {
                    let more = v1::PeerDisk {
                        name: "other".into(),
                        ..it.disks[0].clone()
                    };
                    it.disks.push(more);
                },
                "goes along",
            ),
            (
                |it| it.disks.push(it.disks[0].clone()),
                "one has the name of another",
            ),
            (|it| it.disks[0].uid = "../../etc".into(), "must be a UUID"),
            (|it| it.disks[0].size_bytes = 513, "sizeBytes"),
            (|it| it.disks[0].size_bytes = u64::MAX, "sizeBytes"),
            (|it| it.disks[0].format = v1::DiskFormat::Iso.into(), "format"),
            (|it| it.disks[0].logical_block_bytes = 1024, "logicalBlockBytes"),
            (
                |it| it.disks[0].labels = [("\n".to_owned(), String::new())].into(),
                "labels",
            ),
        ] {
            let message = refused(change);
            assert!(message.contains(why), "{why}: {message}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_messages_do_harm(
            order in prop::collection::vec(0..seeds().len(), 1..4),
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
        ) {
            let seeds = seeds();
            let mut data: Vec<u8> = order.iter().flat_map(|which| seeds[*which].1.clone()).collect();
            for (place, value) in changes {
                let place = place % data.len();
                data[place] = value;
            }
            peer_messages(&data);
        }

        #[test]
        fn no_bytes_do_harm(data in prop::collection::vec(any::<u8>(), 0..600)) {
            peer_messages(&data);
        }
    }
}
