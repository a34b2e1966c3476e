//! The daemon is killed before each step that creates and removes networks and NICs. The next
//! daemon leaves no orphaned objects, and the repeated request completes. The steps are the
//! daemon's own (`step` of `vmmd/host/src/fault.rs`), however many there are.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use rstest::rstest;
use tonic::{Code, Status, transport::Channel};
use vmmd_api::v1::{self, NetworkMode, NicSpec, PublishedPort};

use super::{NetworkServiceClient, creation, nic};
use crate::{
    harness::{Daemon, PATIENCE, metadata_of, status},
    namespace::Namespace,
    shares::is_alive,
    walk::{Round, STORE, Walk},
};

type Networks = NetworkServiceClient<Channel>;

/// Action with the network `lan` and the VM `web`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    MakeNetwork,
    DeleteNetwork,
    AttachNic,
    DetachNic,
    StartVm,
    DeleteVm,
}

impl Act {
    /// Creates the initial state.
    async fn prepare(self, daemon: &Daemon) {
        match self {
            Self::MakeNetwork => {}
            Self::DeleteNetwork => make_network(&mut daemon.networks().await, &fresh())
                .await
                .unwrap(),
            Self::AttachNic => {
                if daemon.network("lan").await.is_err() {
                    make_network(&mut daemon.networks().await, &fresh())
                        .await
                        .unwrap();
                    daemon.run("web", "").await;
                }
            }
            Self::DetachNic => {
                Box::pin(Self::AttachNic.prepare(daemon)).await;
                set_nic(daemon, true).await.unwrap();
            }
            Self::StartVm => {
                if daemon.network("lan").await.is_err() {
                    make_network(&mut daemon.networks().await, &fresh())
                        .await
                        .unwrap();
                }
                create_vm(daemon).await;
            }
            Self::DeleteVm => {
                Box::pin(Self::StartVm.prepare(daemon)).await;
                daemon.start_vm("web").await.unwrap();
            }
        }
    }

    /// Does it. Again, when the daemon was killed under it: `id` is the same then. Every call may meet a daemon that is dead.
    async fn perform(self, daemon: &Daemon, networks: &mut Networks, id: &str) -> Result<(), Status> {
        match self {
            Self::MakeNetwork => make_network(networks, id).await,
            Self::DeleteNetwork => delete_network(networks, id).await,
            Self::AttachNic => set_nic(daemon, true).await,
            Self::DetachNic => set_nic(daemon, false).await,
            Self::StartVm => match daemon.start_vm("web").await {
                Err(refused) if refused.message().contains("running") => Ok(()),
                other => other.map(drop),
            },
            Self::DeleteVm => match daemon.delete("web", true).await {
                Err(gone) if gone.code() == Code::NotFound => Ok(()),
                other => other,
            },
        }
    }

    /// Makes all be as before [`Self::prepare`], or so that it does nothing.
    async fn undo(self, daemon: &Daemon, id: &str) {
        match self {
            Self::MakeNetwork => delete_network(&mut daemon.networks().await, id).await.unwrap(),
            Self::AttachNic => set_nic(daemon, false).await.unwrap(),
            Self::StartVm => daemon.delete("web", true).await.unwrap(),
            Self::DeleteNetwork | Self::DetachNic | Self::DeleteVm => {}
        }
    }
}

/// An id of a request that no other has.
fn fresh() -> String {
    uuid::Uuid::new_v4().to_string()
}

async fn make_network(networks: &mut Networks, id: &str) -> Result<(), Status> {
    let spec = v1::NetworkSpec {
        mode: NetworkMode::Nat.into(),
        ipv4_cidr: "10.80.0.0/24".into(),
        ipv6_cidr: "fd00:80::/64".into(),
        ..v1::NetworkSpec::default()
    };
    let request = creation("lan", spec, &format!("make-{id}"));
    networks.create_network(request).await.map(drop)
}

async fn delete_network(networks: &mut Networks, id: &str) -> Result<(), Status> {
    let request = v1::DeleteNetworkRequest {
        name: "lan".into(),
        request_id: format!("delete-{id}"),
        ..Default::default()
    };
    networks.delete_network(request).await.map(drop)
}

fn published() -> NicSpec {
    NicSpec {
        // The mock always reports eth0.
        name: "lan".into(),
        published_ports: vec![PublishedPort {
            node_port: 8080,
            guest_port: 80,
            ..PublishedPort::default()
        }],
        ..nic("lan")
    }
}

async fn create_vm(daemon: &Daemon) {
    let wanted = daemon.manifest_with("web", "", |spec| spec.nics = vec![published()]);
    daemon.create(wanted).await.unwrap();
}

async fn set_nic(daemon: &Daemon, attached: bool) -> Result<(), Status> {
    let nics = attached.then(published);
    let changed = daemon.change("web", |spec| spec.nics = nics.into_iter().collect());
    changed.await.map(drop)
}

#[rstest]
#[case::makes_a_network(
    Act::MakeNetwork,
    &["add a bridge", "name a bridge", "add an address", "set a switch of the kernel", "change the packet filter", "guard a bridge", "make a helper's folder",
      "start a helper", "write a helper's file", "exchange a helper's file", STORE]
)]
#[case::deletes_a_network(
    Act::DeleteNetwork,
    &["delete a bridge", "change the packet filter", "end a helper", "remove a helper's folder", STORE]
)]
#[case::attaches_a_nic(
    Act::AttachNic,
    &["change the packet filter", "exchange a helper's file", "make a tap", "make a tap a port of its bridge", "plug in",
      "hear that it is plugged in", STORE]
)]
#[case::detaches_a_nic(Act::DetachNic, &["ask for an eject", "hear that it is gone", STORE])]
#[case::starts_a_vm(
    Act::StartVm,
    &["change the packet filter", "exchange a helper's file", "make a tap", "make a tap a port of its bridge", STORE]
)]
#[case::deletes_a_vm(Act::DeleteVm, &[STORE])]
#[tokio::test]
async fn daemon_that_is_killed_before_any_step_leaves_no_network(
    #[case] act: Act,
    #[case] expected: &[&str],
) {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let mut walk = Walk::begin(&mut daemon).await;
    loop {
        let id = fresh();
        act.prepare(&daemon).await;
        let mut client = daemon.networks().await;
        walk.start();
        let performed = act.perform(&daemon, &mut client, &id).await;
        rests_or_is_dead(&namespace, &daemon, &mut client).await;
        match walk.end(expected) {
            Round::Killed(place) => {
                let place = format!("{act:?}: {place}");
                walk.launch(&mut daemon).await;
                walk.settle_anew(&mut daemon, &place).await;
                agrees(&namespace, &daemon, &place).await;
                let mut client = daemon.networks().await;
                act.perform(&daemon, &mut client, &id).await.expect(&place);
                walk.settle_anew(&mut daemon, &place).await;
                agrees(&namespace, &daemon, &place).await;
            }
            Round::Missed => performed.unwrap(),
            Round::End => {
                walk.settle_anew(&mut daemon, "nothing was killed").await;
                agrees(&namespace, &daemon, "nothing was killed").await;
                return;
            }
        }
        act.undo(&daemon, &id).await;
        agrees(&namespace, &daemon, "undone").await;
        rest(&mut daemon.networks().await).await.unwrap();
    }
}

/// Waits until no change to networks is under way. Each waits for the one before, also one that is refused.
async fn rest(client: &mut Networks) -> Result<(), Status> {
    let nowhere = v1::Network {
        metadata: metadata_of("nowhere"),
        ..Default::default()
    };
    let request = v1::UpdateNetworkRequest {
        network: Some(nowhere),
        update_mask: Some(vmmd_api::well_known::FieldMask {
            paths: vec!["metadata.labels".into()],
        }),
        ..Default::default()
    };
    match client.update_network(request).await {
        Err(refused) if refused.code() == Code::NotFound => Ok(()),
        other => Err(other.err().unwrap_or_else(|| Status::internal("it is there"))),
    }
}

/// Waits until answered calls have no further effects, or the daemon has been killed.
async fn rests_or_is_dead(namespace: &Namespace, daemon: &Daemon, client: &mut Networks) {
    let deadline = Instant::now() + PATIENCE;
    while is_alive(daemon.pid()) {
        let difference = difference(namespace, daemon, client).await;
        if difference.is_ok() && rest(client).await.is_ok() {
            return;
        }
        assert!(Instant::now() < deadline, "{difference:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until nothing is on the node that belongs to no network or VM, and nothing of theirs is missing.
async fn agrees(namespace: &Namespace, daemon: &Daemon, place: &str) {
    let deadline = Instant::now() + PATIENCE;
    let mut client = daemon.networks().await;
    while let Err(difference) = difference(namespace, daemon, &mut client).await {
        assert!(Instant::now() < deadline, "{place}: {difference}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn difference(namespace: &Namespace, daemon: &Daemon, client: &mut Networks) -> Result<(), String> {
    let networks = client.list_networks(v1::ListNetworksRequest::default()).await;
    let networks = networks.map_err(|gone| gone.to_string())?.into_inner().networks;
    let states = networks.iter().map(|network| network.status.as_ref().unwrap());
    let uids: BTreeSet<_> = networks
        .iter()
        .map(|network| network.metadata.as_ref().unwrap().uid.clone())
        .collect();
    let bridges: BTreeSet<_> = states.clone().map(|state| state.bridge.clone()).collect();
    let vms = daemon.client().list_vms(v1::ListVmsRequest::default()).await;
    let vms = vms.map_err(|gone| gone.to_string())?.into_inner().vms;
    let running = vms.iter().flat_map(|vm| &status(vm).nics);
    let taps: BTreeSet<_> = running
        .filter(|nic| !nic.tap.is_empty())
        .map(|nic| nic.tap.clone())
        .collect();
    let same = |what: &str, found: BTreeSet<String>, wanted: &BTreeSet<String>| {
        if found == *wanted {
            Ok(())
        } else {
            Err(format!("{what} are {found:?}, and wanted are {wanted:?}"))
        }
    };
    let all = bridges.union(&taps).cloned().collect();
    same("interfaces", namespace.interfaces().into_iter().collect(), &all)?;
    let ports = bridges.iter().flat_map(|bridge| namespace.ports(bridge));
    same("ports", ports.collect(), &taps)?;

    // Addresses belong to NICs of VMs, and each NIC that there is has one.
    let leases = states.flat_map(|state| &state.leases);
    let leases: BTreeSet<_> = leases
        .filter(|lease| lease.release_time.is_none())
        .map(|lease| format!("{} {}", lease.vm, lease.nic))
        .collect();
    let nics = |vm: &v1::Vm, named: Vec<&String>| {
        let vm = vm.metadata.as_ref().unwrap().name.clone();
        let named = named.into_iter().map(|nic| format!("{vm} {nic}"));
        named.collect::<Vec<_>>()
    };
    let owners = vms.iter().flat_map(|vm| {
        let nics_of_spec = vm.spec.as_ref().unwrap().nics.iter().map(|nic| &nic.name);
        nics(vm, nics_of_spec.collect())
    });
    let owners: BTreeSet<_> = owners.collect();
    let plugged = vms.iter().flat_map(|vm| {
        let there = status(vm).nics.iter().filter(|nic| !nic.tap.is_empty());
        nics(vm, there.map(|nic| &nic.name).collect())
    });
    let plugged: BTreeSet<_> = plugged.collect();
    if !leases.is_subset(&owners) || !plugged.is_subset(&leases) {
        return Err(format!(
            "leases are of {leases:?}, NICs are {owners:?}, of running VMs {plugged:?}"
        ));
    }

    // The packet filter has rules of these networks and NICs alone.
    let rules = namespace.run("nft list ruleset");
    let words = || rules.split(|c: char| !c.is_ascii_alphanumeric());
    let named = |is: fn(&str) -> bool| words().filter(|word| is(word)).map(str::to_owned).collect();
    let ruled: BTreeSet<String> = named(|word| word.len() == 13 && word.starts_with("vmb"));
    same("bridges of the packet filter", ruled, &bridges)?;
    let ruled: BTreeSet<String> = named(|word| {
        let slot = word.strip_prefix("vm").and_then(|rest| rest.get(10..));
        slot.is_some_and(|slot| slot.starts_with('n'))
    });
    if ruled.len() != leases.len() || !taps.is_subset(&ruled) {
        return Err(format!(
            "rules of {ruled:?}, leases of {leases:?}, taps {taps:?}: {rules}"
        ));
    }
    if rules.contains("8080 : ") == leases.is_empty() || rules.contains("vmmd") == networks.is_empty() {
        return Err(format!("leases of {leases:?}, and these rules: {rules}"));
    }

    // One process serves each of them, with a folder of its own. Its namespaces end with it.
    let folder = daemon.path("run/networks");
    let served = fs::read_dir(&folder).into_iter().flatten();
    let served = served.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    same("folders of helpers", served.collect(), &uids)?;
    let helpers = helpers(folder.to_str().unwrap());
    if helpers.len() != uids.len() {
        return Err(format!("{helpers:?} serve, and networks are {uids:?}"));
    }
    same("networks that are served", helpers.into_iter().collect(), &uids)
}

/// Returns the folder name of each process that serves a network with a folder below `folder`.
fn helpers(folder: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read_to_string(entry.path().join("cmdline")).ok());
    let serving = lines.filter_map(|line| {
        let mut words = line.split('\0').skip_while(|word| *word != "vmmd-netd").skip(1);
        let served = words.next()?.strip_prefix(folder)?.trim_matches('/').to_owned();
        Some(served)
    });
    serving.collect()
}
