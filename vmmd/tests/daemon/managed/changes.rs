//! Networks that change: updates, watches, pages of lists.

use std::fs;

use vmmd_api::{
    v1::{NetworkSpec, WatchEventType, WatchNetworksRequest, WatchNetworksResponse},
    well_known::FieldMask,
};

use super::*;
use crate::harness::{assert_refused, assert_says, generation, metadata_of};

impl Daemon {
    pub(super) async fn update_network(
        &self,
        request: v1::UpdateNetworkRequest,
    ) -> Result<v1::Network, Status> {
        let answer = self.networks().await.update_network(request).await?;
        Ok(answer.into_inner().network.unwrap())
    }

    async fn list_networks(&self, request: v1::ListNetworksRequest) -> v1::ListNetworksResponse {
        let answer = self.networks().await.list_networks(request).await;
        answer.unwrap().into_inner()
    }

    async fn watch_networks(&self, cursor: &str) -> Streaming<WatchNetworksResponse> {
        let request = WatchNetworksRequest {
            cursor: cursor.into(),
            ..Default::default()
        };
        let answer = self.networks().await.watch_networks(request).await;
        answer.unwrap().into_inner()
    }
}

/// The request to change these fields of the network "lan".
pub(super) fn change(paths: &[&str], spec: NetworkSpec) -> v1::UpdateNetworkRequest {
    v1::UpdateNetworkRequest {
        network: Some(v1::Network {
            metadata: metadata_of("lan"),
            spec: Some(spec),
            status: None,
        }),
        update_mask: Some(FieldMask {
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        }),
        ..Default::default()
    }
}

fn isolate() -> v1::UpdateNetworkRequest {
    let isolated = NetworkSpec {
        mode: NetworkMode::Isolated.into(),
        ..Default::default()
    };
    change(&["spec.mode"], isolated)
}

fn ask_of(server: &str) -> v1::UpdateNetworkRequest {
    let spec = NetworkSpec {
        dns_servers: vec![server.into()],
        ..Default::default()
    };
    change(&["spec.dns_servers"], spec)
}

fn generation_of(network: &v1::Network) -> u64 {
    network.metadata.as_ref().unwrap().generation
}

/// The next event: what happened, the name and the generation, and where that is.
async fn next(stream: &mut Streaming<WatchNetworksResponse>) -> (WatchEventType, String, u64, String) {
    let event = tokio::time::timeout(PATIENCE, stream.message()).await;
    let event = event.unwrap().unwrap().unwrap();
    let metadata = event
        .network
        .clone()
        .unwrap_or_default()
        .metadata
        .unwrap_or_default();
    (event.r#type(), metadata.name, metadata.generation, event.cursor)
}

#[tokio::test]
async fn a_network_changes_while_vms_are_in_it() {
    let (namespace, mut daemon, [made]) = Daemon::with_networks(["lan"]).await;
    let port = PublishedPort {
        node_port: 8080,
        guest_port: 80,
        ..PublishedPort::default()
    };
    let nic = NicSpec {
        published_ports: vec![port],
        ..nic("lan")
    };
    daemon.start_in("web", nic).await.unwrap();

    // Only the fields in the mask change, and all of them on the node at once.
    let spec = NetworkSpec {
        dns_servers: vec!["192.0.2.53".into()],
        ipv4_cidr: "10.99.0.0/24".into(),
        ..Default::default()
    };
    let mut wanted = change(&["spec.dns_servers", "metadata.labels"], spec);
    let labels = &mut wanted.network.as_mut().unwrap().metadata.as_mut().unwrap().labels;
    labels.insert("tier".into(), "front".into());
    let changed = daemon.update_network(wanted).await.unwrap();
    assert_eq!((generation_of(&made), generation_of(&changed)), (1, 2));
    let (now, spec) = (changed.metadata.unwrap(), changed.spec.unwrap());
    assert_eq!(
        (spec.dns_servers, spec.ipv4_cidr.as_str()),
        (vec!["192.0.2.53".to_owned()], "10.80.0.0/24")
    );
    assert_eq!(now.labels["tier"], "front");
    let table = daemon.path(&format!("run/networks/{}/table.json", now.uid));
    let table = fs::read_to_string(table).unwrap();
    assert!(table.contains("192.0.2.53"), "{table}");

    // Ports are published by NAT alone.
    let refused = daemon.update_network(isolate()).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PORTS_PUBLISHED");
    assert_says(&refused, "VM \"web\"");
    assert!(translates(&namespace));
    daemon.delete("web", true).await.unwrap();
    let isolated = daemon.update_network(isolate()).await.unwrap();
    assert!(isolated.status.unwrap().ready && !translates(&namespace));

    // The network is unchanged after a refusal, and after a kill.
    let refused = daemon.update_network(ask_of("nowhere")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let late = v1::UpdateNetworkRequest {
        preconditions: generation(2),
        ..change(&["metadata.labels"], NetworkSpec::default())
    };
    let refused = daemon.update_network(late).await.unwrap_err();
    assert_refused(&refused, Code::Aborted, "GENERATION_MISMATCH");
    let request = v1::DeleteNetworkRequest {
        name: "lan".into(),
        preconditions: generation(2),
        ..Default::default()
    };
    let refused = daemon.networks().await.delete_network(request).await.unwrap_err();
    assert_refused(&refused, Code::Aborted, "GENERATION_MISMATCH");
    daemon.kill_and_restart().await;
    let there = daemon.network("lan").await.unwrap();
    assert_eq!(generation_of(&there), 3);
    let (metadata, spec) = (there.metadata.unwrap(), there.spec.unwrap());
    assert_eq!(metadata.labels["tier"], "front");
    assert_eq!((spec.mode(), spec.dns_servers.len()), (NetworkMode::Isolated, 1));

    // A later network with the same name has a newer generation.
    daemon.remove_network("lan").await.unwrap();
    let again = NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        ..Default::default()
    };
    let again = daemon.create_network("lan", again, "again").await.unwrap();
    assert_eq!(generation_of(&again), 4);
}

#[tokio::test]
async fn network_update_retry_gets_the_old_answer_and_reverts_nothing() {
    let (_namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let request = v1::UpdateNetworkRequest {
        preconditions: generation(1),
        request_id: "first".into(),
        ..ask_of("192.0.2.53")
    };
    let answer = daemon.update_network(request.clone()).await.unwrap();
    assert_eq!(generation_of(&answer), 2);
    let since = daemon.update_network(ask_of("192.0.2.54")).await.unwrap();
    daemon.told_exactly("NetworkChanged", 2).await;
    for _ in 0..2 {
        daemon.kill_and_restart().await;
        assert_eq!(daemon.update_network(request.clone()).await.unwrap(), answer);
        assert_eq!(daemon.network("lan").await.unwrap(), since);
    }
    daemon.told_exactly("NetworkChanged", 2).await;
    // The same id with other content.
    let other = v1::UpdateNetworkRequest {
        request_id: "first".into(),
        ..isolate()
    };
    let refused = daemon.update_network(other).await.unwrap_err();
    assert_refused(&refused, Code::AlreadyExists, "REQUEST_ID_REUSED");
}

/// The daemon is killed while it changes the packet filter: the change is in the store but not on
/// the node, and the caller has no answer.
#[tokio::test]
async fn interrupted_network_update_is_completed_once_by_its_retry() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    // How many steps an update has before it changes the packet filter.
    let steps = tempfile::tempdir().unwrap();
    let path = |name: &str| steps.path().join(name);
    daemon.kill();
    let folder = steps.path().to_str().unwrap();
    daemon.relaunch_with(&[("VMMD_STEPS", folder)]).await;
    let kill_at = |left: usize| {
        fs::write(path("walked"), "").unwrap();
        fs::write(path("left"), left.to_string()).unwrap();
    };
    // After the daemon's first comparison of the node with its records.
    daemon.update_network(ask_of("192.0.2.53")).await.unwrap();
    kill_at(100);
    let routed = NetworkSpec {
        mode: NetworkMode::Routed.into(),
        ..Default::default()
    };
    daemon
        .update_network(change(&["spec.mode"], routed))
        .await
        .unwrap();
    let walked = fs::read_to_string(path("walked")).unwrap();
    let place = walked.lines().position(|step| step == "change the packet filter");
    let is_routed = || {
        namespace
            .run("nft list map inet vmmd to")
            .contains("goto to-routed")
    };

    let request = v1::UpdateNetworkRequest {
        preconditions: generation(3),
        request_id: "isolate".into(),
        ..isolate()
    };
    kill_at(place.unwrap());
    let call = daemon.update_network(request.clone()).await;
    call.expect_err("nobody was answered");
    let walked = fs::read_to_string(path("walked")).unwrap();
    assert_eq!(walked.lines().last(), Some("change the packet filter"));
    assert!(is_routed(), "the node was not changed yet");

    fs::remove_file(path("left")).unwrap();
    daemon.kill();
    daemon.relaunch().await;
    let written = daemon.network("lan").await.unwrap();
    assert_eq!(generation_of(&written), 4, "the change was in the store");
    let answer = daemon.update_network(request.clone()).await.unwrap();
    assert_eq!((generation_of(&answer), is_routed()), (4, false));
    assert_eq!(answer.spec.as_ref().unwrap().mode(), NetworkMode::Isolated);
    assert_eq!(daemon.network("lan").await.unwrap(), answer);
    assert_eq!(daemon.update_network(request.clone()).await.unwrap(), answer);
    daemon.kill_and_restart().await;
    assert_eq!(daemon.update_network(request).await.unwrap(), answer);
    assert_eq!(generation_of(&daemon.network("lan").await.unwrap()), 4);
}

#[tokio::test]
async fn networks_are_watched_over_a_kill_and_listed_in_pages() {
    let (_namespace, mut daemon, _) = Daemon::with_networks(["a", "b", "c"]).await;
    let two = v1::ListNetworksRequest {
        page_size: 2,
        ..Default::default()
    };
    let first = daemon.list_networks(two.clone()).await;
    let names = |page: &v1::ListNetworksResponse| -> Vec<String> {
        let named = page
            .networks
            .iter()
            .map(|network| network.metadata.clone().unwrap().name);
        named.collect()
    };
    assert_eq!(names(&first), ["a", "b"]);
    let rest = daemon
        .list_networks(v1::ListNetworksRequest {
            page_token: first.next_page_token.clone(),
            ..two
        })
        .await;
    assert_eq!(
        (names(&rest), rest.next_page_token.as_str()),
        (vec!["c".to_owned()], "")
    );
    assert_eq!(rest.cursor, first.cursor);

    let mut watch = daemon.watch_networks(&first.cursor).await;
    assert_eq!(next(&mut watch).await.0, WatchEventType::Synced);
    // A lease is a change.
    daemon.start_in("web", nic("b")).await.unwrap();
    let (kind, name, ..) = next(&mut watch).await;
    assert_eq!((kind, name.as_str()), (WatchEventType::Modified, "b"));
    daemon.remove_network("a").await.unwrap();
    let (kind, name, _, cursor) = next(&mut watch).await;
    assert_eq!((kind, name.as_str()), (WatchEventType::Deleted, "a"));

    // A resumed watch reports changes of the meantime, even from another daemon.
    drop(watch);
    daemon.remove_network("c").await.unwrap();
    daemon.kill_and_restart().await;
    let mut watch = daemon.watch_networks(&cursor).await;
    let mut seen = Vec::new();
    loop {
        let (kind, name, ..) = next(&mut watch).await;
        if kind == WatchEventType::Synced {
            break;
        }
        seen.push((kind, name));
    }
    assert!(
        seen.contains(&(WatchEventType::Deleted, "c".to_owned())),
        "{seen:?}"
    );
    assert_eq!(
        seen.last(),
        Some(&(WatchEventType::Modified, "b".to_owned())),
        "{seen:?}"
    );
}

#[tokio::test]
async fn nic_that_a_network_refuses_is_not_stored() {
    let (_namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let published = |port| v1::PublishedPort {
        node_port: port,
        ..v1::PublishedPort::default()
    };
    let web = NicSpec {
        address: "10.80.0.2".into(),
        mac: "52:54:00:00:00:02".into(),
        published_ports: vec![published(8080)],
        ..nic("lan")
    };
    daemon.start_in("web", web.clone()).await.unwrap();
    daemon.run("up", "").await;
    daemon.create(daemon.manifest("down", "")).await.unwrap();
    for name in ["up", "down"] {
        for (wrong, reason) in [
            (
                NicSpec {
                    mac: String::new(),
                    published_ports: Vec::new(),
                    ..web.clone()
                },
                "ADDRESS_IN_USE",
            ),
            (
                NicSpec {
                    address: "10.99.0.2".into(),
                    ..nic("lan")
                },
                "ADDRESS_NOT_IN_NETWORK",
            ),
            (
                NicSpec {
                    mac: web.mac.clone(),
                    ..nic("lan")
                },
                "MAC_IN_USE",
            ),
            (
                NicSpec {
                    published_ports: vec![published(8080)],
                    ..nic("lan")
                },
                "PORT_IN_USE",
            ),
        ] {
            let refused = daemon
                .change(name, |spec| spec.nics = vec![wrong])
                .await
                .unwrap_err();
            assert_eq!(
                refusal(&refused),
                (Code::FailedPrecondition, reason.into()),
                "{name}"
            );
        }
        assert_eq!(daemon.get(name).await.unwrap().spec.unwrap().nics, []);
    }
    // Duplicates within one VM are invalid on their own.
    let two = vec![
        NicSpec {
            address: "10.80.0.9".into(),
            published_ports: vec![published(9090)],
            ..nic("lan")
        },
        NicSpec {
            name: "eth1".into(),
            address: "10.80.0.9".into(),
            published_ports: vec![published(9090)],
            ..nic("lan")
        },
    ];
    let refused = daemon.change("up", |spec| spec.nics = two).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "ADDRESS_IN_USE");
    for words in ["10.80.0.9", "9090/tcp"] {
        assert_says(&refused, words);
    }
}

/// A NIC with all that a network can give it.
fn with_all(name: &str, port: u32) -> NicSpec {
    NicSpec {
        name: name.into(),
        address: "10.80.0.9".into(),
        mac: "52:54:00:00:00:09".into(),
        published_ports: vec![v1::PublishedPort {
            node_port: port,
            guest_port: 80,
            ..v1::PublishedPort::default()
        }],
        ..nic("lan")
    }
}

/// Names and addresses of the NICs that the machine has.
fn plugged(vm: &v1::Vm) -> Vec<(String, Vec<String>)> {
    let nics = status(vm).nics.iter().filter(|nic| !nic.tap.is_empty());
    nics.map(|nic| (nic.name.clone(), nic.addresses.clone()))
        .collect()
}

#[tokio::test]
async fn nic_with_another_name_takes_over_its_lease() {
    let (_namespace, mut daemon, _made) = Daemon::with_networks(["lan"]).await;
    let addresses = daemon.start_in("web", with_all("eth0", 8080)).await.unwrap();
    assert_eq!(addresses, ["10.80.0.9"]);
    // The running machine has the old NIC until the restart or the guest's answer.
    let renamed = daemon.change("web", |spec| spec.nics = vec![with_all("eth1", 8080)]);
    assert_eq!(renamed.await.unwrap().spec.unwrap().nics[0].name, "eth1");
    daemon.kill_vm("web").await.unwrap();
    let running = daemon.start_vm("web").await.unwrap();
    assert_eq!(plugged(&running), [("eth1".into(), vec!["10.80.0.9".into()])]);
    daemon.kill_vm("web").await.unwrap();
    let renamed = daemon.change("web", |spec| spec.nics = vec![with_all("eth2", 8080)]);
    renamed.await.unwrap();
    let running = daemon.start_vm("web").await.unwrap();
    assert_eq!(plugged(&running), [("eth2".into(), vec!["10.80.0.9".into()])]);
}

#[tokio::test]
async fn port_moves_between_the_nics_of_one_vm() {
    let (namespace, daemon, _made) = Daemon::with_networks(["lan", "dmz"]).await;
    let other = NicSpec {
        name: "eth0".into(),
        address: "10.80.1.9".into(),
        ..nic("dmz")
    };
    daemon
        .run_with("web", "", |spec| spec.nics = vec![other, with_all("eth1", 8080)])
        .await;
    let leads_to = || {
        let rules = namespace.run("nft list ruleset");
        ["10.80.0.9", "10.80.1.9"].map(|address| {
            let to = |line: &&str| line.contains("8080") && line.contains(address);
            rules.lines().filter(to).count() > 0
        })
    };
    assert_eq!(leads_to(), [true, false]);
    let swap = |spec: &mut v1::VmSpec| {
        let (first, second) = spec.nics.split_at_mut(1);
        std::mem::swap(&mut first[0].published_ports, &mut second[0].published_ports);
    };
    // The machine runs, and the VM is stopped: the NIC that gets the port comes first, or last.
    daemon.change("web", swap).await.unwrap();
    assert_eq!(leads_to(), [false, true]);
    daemon.change("web", swap).await.unwrap();
    assert_eq!(leads_to(), [true, false]);
    for leading in [[false, true], [true, false]] {
        daemon.kill_vm("web").await.unwrap();
        daemon.change("web", swap).await.unwrap();
        daemon.start_vm("web").await.unwrap();
        assert_eq!(leads_to(), leading);
    }
}
