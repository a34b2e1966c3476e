//! Messages of a daemon with the role `peer`, in any order and with any error: this daemon
//! continues, its own VMs are unaffected, and the received objects can be removed.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::timeout;
use tonic::{Code, Status, transport::Channel};
use vmmd_api::v1::{self, VmPhase, peer_service_client::PeerServiceClient, receive_vm_request::Part};

use crate::{
    disks::named,
    harness::{Daemon, status, uid},
    migration::node,
    pki::Pki,
    verbs::within,
};

/// VMs that are spoken of: the daemon's own, and two that it does not have.
const NAMES: [&str; 3] = ["own", "one", "two"];

/// Defect of an offer.
#[derive(Clone, Debug)]
enum Twist {
    Nothing,
    Protocol(u32),
    NoVm,
    NoSpec,
    NoHardware,
    Uid(String),
    Name(String),
    Features(usize),
    Slots(u32),
    Nic {
        mac: Vec<u8>,
        address: u32,
        range: usize,
    },
    Memory(u64),
    Disk(String),
    /// A disk of the node that comes along.
    Copied {
        uid: String,
        size: u64,
        allocated: u64,
        format: i32,
        is_sent: bool,
    },
}

#[derive(Clone, Debug)]
enum Step {
    Offer(usize, u64, Twist),
    /// Which VM, of which migration; what follows the first message, and whether that opens the stream.
    Receive(usize, u64, Vec<Option<String>>, bool),
    Settle(usize, u64, i32),
}

fn migrations() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(2), Just(u64::MAX)]
}

fn twists() -> impl Strategy<Value = Twist> {
    use Twist::*;
    prop_oneof![
        6 => Just(Nothing),
        1 => any::<u32>().prop_map(Protocol),
        1 => Just(NoVm),
        1 => Just(NoSpec),
        1 => Just(NoHardware),
        1 => "[0-9a-f-]{0,40}".prop_map(Uid),
        1 => ".{0,80}".prop_map(Name),
        1 => (0_usize..5000).prop_map(Features),
        1 => any::<u32>().prop_map(Slots),
        1 => (prop::collection::vec(any::<u8>(), 0..9), any::<u32>(), 0_usize..10_000)
            .prop_map(|(mac, address, range)| Nic { mac, address, range }),
        1 => any::<u64>().prop_map(Memory),
        1 => "/?[a-z/.]{0,20}".prop_map(Disk),
        3 => (
            prop_oneof![3 => Just("6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0003".to_owned()), 1 => "[0-9a-f/.-]{0,40}"],
            prop_oneof![3 => Just(4096), 1 => any::<u64>()],
            prop_oneof![3 => Just(4096), 1 => any::<u64>()],
            prop_oneof![3 => Just(1), 1 => any::<i32>()],
            prop::bool::weighted(0.9),
        )
            .prop_map(|(uid, size, allocated, format, is_sent)| Copied { uid, size, allocated, format, is_sent }),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    let parts = prop::collection::vec(
        prop_oneof![
            Just(None),
            "[a-z ]{0,40}".prop_map(Some),
            Just(Some("machine of it".to_owned())),
        ],
        0..4,
    );
    prop_oneof![
        3 => (0..NAMES.len(), migrations(), twists()).prop_map(|(vm, number, twist)| Step::Offer(vm, number, twist)),
        3 => (0..NAMES.len(), migrations(), parts, prop::bool::weighted(0.9))
            .prop_map(|(vm, number, parts, opens)| Step::Receive(vm, number, parts, opens)),
        4 => (0..NAMES.len(), migrations(), prop_oneof![0..8_i32, any::<i32>()])
            .prop_map(|(vm, number, step)| Step::Settle(vm, number, step)),
    ]
}

struct Stage {
    daemon: Daemon,
    peer: PeerServiceClient<Channel>,
    uids: [String; 3],
}

impl Stage {
    async fn new() -> Self {
        let pki = Pki::new("ca");
        let daemon = node(&pki).await;
        // Unsettled migrations are removed soon.
        daemon.fault("hasty");
        let own = daemon.run("own", "").await;
        let leaf = pki.role("other", "peer");
        let peer = PeerServiceClient::new(pki.channel(&daemon, Some(&leaf)));
        let uids = [
            uid(&own).to_owned(),
            "6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0001".to_owned(),
            "6f2d6d0e-6c3d-4f5b-9b1f-2f4f1f0c0002".to_owned(),
        ];
        Self { daemon, peer, uids }
    }

    fn offer(&self, vm: usize, migration: u64, twist: Twist) -> v1::OfferVmRequest {
        let mut offer = v1::OfferVmRequest {
            access_keys: Vec::new(),
            protocol: 1,
            vm: Some(self.daemon.manifest(NAMES[vm], "")),
            uid: self.uids[vm].clone(),
            migration,
            hardware: Some(v1::PeerHardware {
                rng_slot: 1,
                ..Default::default()
            }),
            cpu_features: Vec::new(),
            disks: Vec::new(),
        };
        let spec = offer.vm.as_mut().unwrap().spec.as_mut().unwrap();
        let hardware = offer.hardware.as_mut().unwrap();
        match twist {
            Twist::Nothing => {}
            Twist::Protocol(protocol) => offer.protocol = protocol,
            Twist::NoVm => offer.vm = None,
            Twist::NoSpec => offer.vm.as_mut().unwrap().spec = None,
            Twist::NoHardware => offer.hardware = None,
            Twist::Uid(uid) => offer.uid = uid,
            Twist::Name(name) => offer.vm.as_mut().unwrap().metadata.as_mut().unwrap().name = name,
            Twist::Features(count) => {
                offer.cpu_features = (0..count).map(|number| format!("feature{number}")).collect();
            }
            Twist::Slots(slot) => {
                hardware.rng_slot = slot;
                hardware.disk_slots = (0..100).map(|number| (format!("d{number}"), slot)).collect();
            }
            Twist::Nic { mac, address, range } => {
                spec.nics.push(v1::NicSpec {
                    name: "eth0".into(),
                    attachment: Some(v1::nic_spec::Attachment::Network("lan".into())),
                    ..Default::default()
                });
                let nic = v1::PeerNic {
                    slot: 2,
                    mac,
                    address,
                    range: "x".repeat(range),
                };
                hardware.nics = [("eth0".to_owned(), nic)].into();
            }
            Twist::Memory(bytes) => spec.memory.as_mut().unwrap().size_bytes = bytes,
            Twist::Disk(path) => spec.disks.push(v1::DiskSpec {
                name: "root".into(),
                source: Some(v1::disk_spec::Source::Path(path)),
                format: v1::DiskFormat::Raw.into(),
                ..Default::default()
            }),
            Twist::Copied {
                uid,
                size,
                allocated,
                format,
                is_sent,
            } => {
                spec.disks.push(named("copied"));
                hardware.disk_slots = [("data".to_owned(), 10)].into();
                let disk = v1::PeerDisk {
                    name: "copied".into(),
                    uid,
                    size_bytes: size,
                    allocated_bytes: allocated,
                    format,
                    ..Default::default()
                };
                offer.disks.extend(is_sent.then_some(disk));
            }
        }
        offer
    }

    async fn says(&mut self, step: Step) -> Result<(), Status> {
        match step {
            Step::Offer(vm, migration, twist) => {
                let offer = self.offer(vm, migration, twist);
                self.peer.offer_vm(offer).await.map(drop)
            }
            Step::Receive(vm, migration, parts, opens) => {
                let open = Part::Open(v1::PeerVm {
                    name: NAMES[vm].into(),
                    uid: self.uids[vm].clone(),
                    migration,
                });
                let parts = parts
                    .into_iter()
                    .map(|part| part.map(|text| Part::Data(text.into_bytes())));
                let first = opens.then_some(Some(open));
                let all: Vec<_> = first
                    .into_iter()
                    .chain(parts)
                    .map(|part| v1::ReceiveVmRequest { part })
                    .collect();
                self.peer.receive_vm(tokio_stream::iter(all)).await.map(drop)
            }
            Step::Settle(vm, migration, step) => {
                let request = v1::SettleVmRequest {
                    name: NAMES[vm].into(),
                    uid: self.uids[vm].clone(),
                    migration,
                    step,
                };
                self.peer.settle_vm(request).await.map(drop)
            }
        }
    }

    /// Removes all VMs except `own`, by resolution or by deletion.
    async fn cleans_up(&mut self) {
        within(async || {
            let left = self.daemon.list().await;
            let others = left
                .iter()
                .map(|vm| vm.metadata.as_ref().unwrap().name.clone())
                .filter(|name| name != "own");
            let mut none = true;
            for name in others {
                none = false;
                let drop = v1::MigrationResolution::Drop;
                let _ = self.daemon.resolve(&name, drop).await;
                let _ = self.daemon.delete(&name, true).await;
            }
            none.then_some(())
        })
        .await;
    }
}

async fn anything_may_be_said(steps: Vec<Step>) {
    let mut stage = Stage::new().await;
    for step in steps {
        let said = timeout(Duration::from_secs(20), stage.says(step.clone())).await;
        let said = said.unwrap_or_else(|_| panic!("no answer to {step:?}"));
        if let Err(refused) = said {
            let code = refused.code();
            assert!(
                !matches!(code, Code::Unknown | Code::DataLoss),
                "{step:?}: {refused:?}"
            );
        }
    }
    let own = stage.daemon.get("own").await.unwrap();
    assert_eq!(status(&own).phase(), VmPhase::Running, "nobody can take it");
    stage.cleans_up().await;
    within(async || (stage.daemon.vmm_processes().len() == 1).then_some(())).await;
    stage.daemon.kill_and_restart().await;
    // Disks of VMs that belonged to the node, or were resolved by an operator.
    for disk in stage.daemon.all_disks().await {
        stage.daemon.remove(&disk).await.unwrap();
    }
    assert_eq!(stage.daemon.files(), Vec::<std::path::PathBuf>::new());
    stage.daemon.wait_phase("own", VmPhase::Running).await;
    stage.daemon.delete("own", true).await.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, max_shrink_iters: 20, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_peer_says_it_harms_nothing(steps in prop::collection::vec(steps(), 1..24)) {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
            .block_on(anything_may_be_said(steps));
    }
}
