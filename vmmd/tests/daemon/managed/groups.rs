//! Security groups of a network.

use vmmd_api::v1::{NetworkSpec, NicRule, NicRules, RuleProtocol, SecurityGroup};

use super::{packets::listen, *};

/// A group that lets datagrams to a port in.
fn group(name: &str, port: u32) -> SecurityGroup {
    SecurityGroup {
        name: name.into(),
        ingress: Some(NicRules {
            allow: vec![NicRule {
                protocol: RuleProtocol::Udp.into(),
                ports: vec![v1::PortRange { first: port, last: 0 }],
                ..NicRule::default()
            }],
        }),
        egress: None,
    }
}

fn with_groups(groups: &[SecurityGroup]) -> NetworkSpec {
    NetworkSpec {
        ipv4_cidr: "10.80.0.0/24".into(),
        security_groups: groups.to_vec(),
        ..NetworkSpec::default()
    }
}

fn in_groups(groups: &[&str]) -> NicSpec {
    NicSpec {
        security_groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        ..nic("lan")
    }
}

fn change(groups: &[SecurityGroup]) -> v1::UpdateNetworkRequest {
    changes::change(&["spec.security_groups"], with_groups(groups))
}

#[tokio::test]
async fn group_that_a_vm_names_exists_and_stays() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network_as("lan", with_groups(&[group("web", 7000), group("db", 7001)]))
        .await;
    made.unwrap();
    let refused = daemon
        .start_in("x", in_groups(&["web", "none"]))
        .await
        .unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "SECURITY_GROUP_NOT_FOUND");
    assert_says(&refused, "no security group \"none\"");
    for vm in ["a", "b"] {
        let wanted = daemon.manifest_with(vm, "", |spec| spec.nics = vec![in_groups(&["web"])]);
        let created = daemon.create(wanted).await;
        if !tracks_bridges(&namespace) {
            assert_refused(
                &created.unwrap_err(),
                Code::FailedPrecondition,
                "FIREWALL_UNAVAILABLE",
            );
            return;
        }
        created.unwrap();
    }
    let refused = daemon
        .update_network(change(&[group("db", 7001)]))
        .await
        .unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "SECURITY_GROUP_IN_USE");
    assert_says(
        &refused,
        "\"web\" of the network \"lan\" is in use by VM \"a\", VM \"b\"",
    );
    // An unused one is removed, and a used one changes.
    daemon
        .update_network(change(&[group("web", 7002)]))
        .await
        .unwrap();
    daemon.start_vm("a").await.unwrap();
    for vm in ["a", "b"] {
        daemon.delete(vm, true).await.unwrap();
    }
    daemon.update_network(change(&[])).await.unwrap();
}

#[tokio::test]
async fn changed_group_applies_to_all_its_running_guests() {
    let namespace = Namespace::new();
    if !tracks_bridges(&namespace) {
        return;
    }
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let groups = [group("web", 7000), group("db", 7001)];
    daemon.make_network_as("lan", with_groups(&groups)).await.unwrap();
    let own = NicSpec {
        firewall: Some(v1::NicFirewall {
            ingress: group("", 7003).ingress,
            egress: None,
        }),
        ..in_groups(&["web", "db"])
    };
    for (vm, nic) in [("a", in_groups(&["web"])), ("b", own), ("c", nic("lan"))] {
        daemon.start_in(vm, nic).await.unwrap();
    }
    let a = Guest::in_place_of(&namespace, &daemon, "a").await;
    let b = Guest::in_place_of(&namespace, &daemon, "b").await;
    let c = Guest::in_place_of(&namespace, &daemon, "c").await;
    const PORTS: [u16; 4] = [7000, 7001, 7002, 7003];
    let mut ears = [&a, &b].map(|guest| listen(&guest.namespace, &PORTS));
    // From another port each time: a known connection continues.
    let ask = |port| {
        for to in ["10.80.0.2", "10.80.0.3"] {
            c.namespace.send(("10.80.0.4", port), to, &PORTS, "hello");
        }
    };
    ask(8000);
    assert_eq!(ears[0].next(), "7000 hello");
    let mut heard = [ears[1].next(), ears[1].next(), ears[1].next()];
    heard.sort();
    assert_eq!(heard, ["7000 hello", "7001 hello", "7003 hello"]);

    daemon
        .update_network(change(&[group("web", 7002), group("db", 7001)]))
        .await
        .unwrap();
    ask(8001);
    assert_eq!(ears[0].next(), "7002 hello");
    let mut heard = [ears[1].next(), ears[1].next(), ears[1].next()];
    heard.sort();
    assert_eq!(heard, ["7001 hello", "7002 hello", "7003 hello"]);

    // After a flush, and with another daemon.
    let whole = rules(&namespace);
    namespace.run("nft flush ruleset");
    within(async || (rules(&namespace) == whole).then_some(())).await;
    daemon.kill_and_restart().await;
    assert_eq!(rules(&namespace), whole);

    // NICs leave their groups without a restart of their VMs.
    drop((ears, a, b));
    for vm in ["a", "b"] {
        daemon.start_vm(vm).await.unwrap();
    }
    let changed = daemon
        .change("a", |spec| spec.nics = vec![in_groups(&["db"])])
        .await;
    assert_eq!(status(&changed.unwrap()).pending_changes, []);
    let refused = daemon
        .update_network(change(&[group("web", 7002)]))
        .await
        .unwrap_err();
    assert_says(&refused, "in use by VM \"a\", VM \"b\"");
    for vm in ["a", "b"] {
        let changed = daemon.change(vm, |spec| spec.nics = vec![nic("lan")]).await;
        assert_eq!(status(&changed.unwrap()).pending_changes, []);
    }
    daemon.update_network(change(&[])).await.unwrap();
    let left = namespace.run("nft list table bridge vmmd");
    assert!(
        !left.contains("chain ingress") && !left.contains("-web"),
        "{left}"
    );
}
