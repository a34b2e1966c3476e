//! Networks that change: updates, watches, pages of lists.

use proto::{
    v1::{WatchEventType, WatchNetworksRequest, WatchNetworksResponse},
    well_known::FieldMask,
};

use super::*;

impl Daemon {
    async fn update_network(
        &self,
        network: v1::Network,
        paths: &[&str],
        preconditions: Option<v1::Preconditions>,
    ) -> Result<v1::Network, Status> {
        let request = v1::UpdateNetworkRequest {
            network: Some(network),
            update_mask: Some(FieldMask {
                paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            }),
            preconditions,
            request_id: String::new(),
        };
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

/// A network of which only what is to be changed is said.
fn change(name: &str, spec: v1::NetworkSpec, labels: &[(&str, &str)]) -> v1::Network {
    let labels = labels.iter().map(|(key, value)| ((*key).into(), (*value).into()));
    v1::Network {
        metadata: Some(v1::ObjectMetadata {
            name: name.into(),
            labels: labels.collect(),
            ..Default::default()
        }),
        spec: Some(spec),
        status: None,
    }
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
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
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

    // Only what the mask names, and all of it on the node at once.
    let spec = v1::NetworkSpec {
        dns_servers: vec!["192.0.2.53".into()],
        ipv4_cidr: "10.99.0.0/24".into(),
        ..Default::default()
    };
    let wanted = change("lan", spec, &[("tier", "front")]);
    let changed = daemon
        .update_network(wanted, &["spec.dns_servers", "metadata.labels"], None)
        .await
        .unwrap();
    let spec = changed.spec.unwrap();
    assert_eq!(
        (spec.dns_servers, spec.ipv4_cidr.as_str()),
        (vec!["192.0.2.53".to_owned()], "10.80.0.0/24")
    );
    let (before, now) = (made.metadata.unwrap(), changed.metadata.unwrap());
    assert_eq!((before.generation, now.generation), (1, 2));
    assert_eq!(now.labels["tier"], "front");
    let table = daemon.path(&format!("run/networks/{}/table.json", now.uid));
    let table = std::fs::read_to_string(table).unwrap();
    assert!(table.contains("192.0.2.53"), "{table}");

    // Ports are published by NAT alone.
    let isolated = v1::NetworkSpec {
        mode: NetworkMode::Isolated.into(),
        ..Default::default()
    };
    let isolate = change("lan", isolated, &[]);
    let refused = daemon
        .update_network(isolate.clone(), &["spec.mode"], None)
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&refused),
        (Code::FailedPrecondition, "PORTS_PUBLISHED".into())
    );
    assert!(refused.message().contains("VM \"web\""), "{refused}");
    let masquerades = || namespace.run("nft list ruleset").contains("masquerade");
    assert!(masquerades());
    daemon.delete("web", true).await.unwrap();
    let isolated = daemon
        .update_network(isolate, &["spec.mode"], None)
        .await
        .unwrap();
    assert!(isolated.status.unwrap().ready && !masquerades());

    // What is there stays as it is after a refusal, and after a kill.
    let wrong = v1::NetworkSpec {
        dns_servers: vec!["nowhere".into()],
        ..Default::default()
    };
    let refused = daemon
        .update_network(change("lan", wrong, &[]), &["spec.dns_servers"], None)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let stale = v1::Preconditions {
        generation: Some(2),
        ..Default::default()
    };
    let refused = daemon
        .update_network(
            change("lan", v1::NetworkSpec::default(), &[]),
            &["metadata.labels"],
            Some(stale.clone()),
        )
        .await
        .unwrap_err();
    assert_eq!(refusal(&refused), (Code::Aborted, "GENERATION_MISMATCH".into()));
    let request = v1::DeleteNetworkRequest {
        name: "lan".into(),
        preconditions: Some(stale),
        ..Default::default()
    };
    let refused = daemon.networks().await.delete_network(request).await.unwrap_err();
    assert_eq!(refusal(&refused), (Code::Aborted, "GENERATION_MISMATCH".into()));
    daemon.kill();
    daemon.relaunch().await;
    let there = daemon.network("lan").await.unwrap();
    let (metadata, spec) = (there.metadata.unwrap(), there.spec.unwrap());
    assert_eq!(
        (metadata.generation, metadata.labels["tier"].as_str()),
        (3, "front")
    );
    assert_eq!((spec.mode(), spec.dns_servers.len()), (NetworkMode::Isolated, 1));

    // A network that has its name later is told from it.
    daemon.remove_network("lan").await.unwrap();
    let again = v1::NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        ..Default::default()
    };
    let request = v1::CreateNetworkRequest {
        network: Some(change("lan", again, &[])),
        request_id: String::new(),
    };
    let again = daemon.networks().await.create_network(request).await.unwrap();
    let metadata = again.into_inner().network.unwrap().metadata.unwrap();
    assert_eq!(metadata.generation, 4);
}

#[tokio::test]
async fn networks_are_watched_over_a_kill_and_listed_in_pages() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    for (name, number) in [("a", 1), ("b", 2), ("c", 3)] {
        let cidr = format!("10.80.{number}.0/24");
        daemon.make_network(name, &cidr, NetworkMode::Nat).await.unwrap();
    }
    let first = daemon
        .list_networks(v1::ListNetworksRequest {
            page_size: 2,
            ..Default::default()
        })
        .await;
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
            page_size: 2,
            page_token: first.next_page_token.clone(),
            ..Default::default()
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

    // What changes while nobody looks is told to who comes back, also by another daemon.
    drop(watch);
    daemon.remove_network("c").await.unwrap();
    daemon.kill();
    daemon.relaunch().await;
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
