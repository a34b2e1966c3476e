//! Subnets behind guests.

use super::{
    guest::{mirror, seen_by, world},
    *,
};

/// A NIC of "lan" with these subnets behind its guest.
fn router(network: &str, subnets: &[&str]) -> NicSpec {
    NicSpec {
        routed_subnets: subnets.iter().map(|subnet| (*subnet).to_owned()).collect(),
        ..nic(network)
    }
}

/// The subnets to which the node has routes by way of guests, with the guest's address.
fn routes(namespace: &Namespace) -> Vec<String> {
    let shown = ["-4", "-6"].map(|family| namespace.ip(&format!("{family} route show proto 118")));
    let lines = shown.iter().flat_map(|text| text.lines());
    let route = |line: &str| line.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
    lines.map(route).collect()
}

/// A guest with addresses of subnets behind it, which asks for neighbors with its own address.
fn behind(guest: &Guest, addresses: &[&str]) {
    guest.namespace.run("sysctl -qw net.ipv4.conf.all.arp_announce=2");
    guest.namespace.ip("link set lo up");
    for address in addresses {
        let nodad = if address.contains(':') { " nodad" } else { "" };
        guest.namespace.ip(&format!("addr add {address} dev lo{nodad}"));
    }
}

#[tokio::test]
async fn subnets_behind_a_guest_are_reached_and_translated() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    namespace.ip("addr add fd00:99::1/64 dev world nodad");
    world.ip("addr add fd00:99::2/64 dev eth0 nodad");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon.make_network_as("lan", dual_stack()).await.unwrap();
    let bridge = made.status.unwrap().bridge;
    let own = daemon
        .start_in("r", router("lan", &["10.90.0.0/24", "fd00:90::/64"]))
        .await
        .unwrap();
    daemon.start_in("a", nic("lan")).await.unwrap();
    let both = [
        format!("10.90.0.0/24 via {}", own[0]),
        format!("fd00:90::/64 via {}", own[1]),
    ];
    assert_eq!(routes(&namespace), both);
    let (r, a) = (
        Guest::in_place_of(&namespace, &daemon, "r").await,
        Guest::in_place_of(&namespace, &daemon, "a").await,
    );
    behind(&r, &["10.90.0.1/32", "fd00:90::1/128"]);
    r.has(&own[1]).await;

    // The world knows no way to the subnets: the node translates.
    let _mirrors = [
        mirror(&world, &["198.51.100.2", "fd00:99::2"]),
        mirror(&r.namespace, &["10.90.0.1", "fd00:90::1"]),
    ];
    assert_eq!(seen_by(&r.namespace, "10.90.0.1", "198.51.100.2"), "198.51.100.1");
    assert_eq!(seen_by(&r.namespace, "fd00:90::1", "fd00:99::2"), "fd00:99::1");
    // From the node and from the network.
    assert_eq!(seen_by(&namespace, "10.80.0.1", "10.90.0.1"), "10.80.0.1");
    assert_eq!(seen_by(&namespace, "fd00:80::1", "fd00:90::1"), "fd00:80::1");
    assert_eq!(seen_by(&a.namespace, "10.80.0.3", "10.90.0.1"), "10.80.0.3");
    // No other guest has the addresses, and the guest has no others.
    for (guest, address) in [(&a, "10.90.0.2"), (&r, "10.91.0.1")] {
        guest.namespace.ip("link set lo up");
        guest.namespace.ip(&format!("addr add {address}/32 dev lo"));
        assert_eq!(
            seen_by(&guest.namespace, address, "198.51.100.2"),
            "none",
            "{address}"
        );
    }

    // After a flush of the rules, and of the routes while no daemon runs.
    let constant = || {
        let mut all = rules(&namespace);
        // Packets add the elements of these sets.
        all.retain(|name, _| !name.contains("connections") && !name.contains("counted"));
        all
    };
    let whole = constant();
    namespace.run("nft flush ruleset");
    within(async || (constant() == whole).then_some(())).await;
    daemon.kill();
    namespace.ip("route flush proto 118");
    namespace.ip("-6 route flush proto 118");
    // A route of an administrator stays.
    namespace.ip(&format!("route add 10.95.0.0/24 via 10.80.0.3 dev {bridge}"));
    daemon.relaunch().await;
    within(async || (routes(&namespace) == both).then_some(())).await;
    assert_eq!(constant(), whole);
    assert_eq!(seen_by(&r.namespace, "10.90.0.1", "198.51.100.2"), "198.51.100.1");
    assert!(namespace.ip("route").contains("10.95.0.0/24 via 10.80.0.3"));
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert_eq!(leases[0].routed_subnets, ["10.90.0.0/24", "fd00:90::/64"]);
}

#[tokio::test]
async fn subnet_behind_a_routed_network_is_reached_from_outside() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    world.ip("route add 10.90.0.0/16 via 198.51.100.1");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Routed)
        .await;
    made.unwrap();
    daemon
        .start_in("r", router("lan", &["10.90.0.0/24"]))
        .await
        .unwrap();
    let r = Guest::in_place_of(&namespace, &daemon, "r").await;
    behind(&r, &["10.90.0.1/32"]);
    let _mirrors = [
        mirror(&world, &["198.51.100.2"]),
        mirror(&r.namespace, &["10.90.0.1"]),
    ];
    assert_eq!(seen_by(&r.namespace, "10.90.0.1", "198.51.100.2"), "10.90.0.1");
    assert_eq!(seen_by(&world, "198.51.100.2", "10.90.0.1"), "198.51.100.2");
}

#[tokio::test]
async fn subnets_of_a_guest_change_while_it_runs() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan", "dmz"]).await;
    daemon
        .start_in("r", router("lan", &["10.90.0.0/24"]))
        .await
        .unwrap();
    let other = NicSpec {
        name: "eth1".into(),
        ..router("dmz", &["10.91.0.0/24"])
    };
    let changed = daemon
        .change("r", |spec| {
            spec.nics[0] = router("lan", &["10.90.0.0/23", "10.92.0.7"]);
        })
        .await;
    assert_eq!(status(&changed.unwrap()).pending_changes, []);
    assert_eq!(
        routes(&namespace),
        ["10.90.0.0/23 via 10.80.0.2", "10.92.0.7 via 10.80.0.2"]
    );
    // A NIC of the VM gets the subnet of another one.
    daemon.kill_vm("r").await.unwrap();
    daemon
        .change("r", |spec| spec.nics = vec![nic("lan"), other])
        .await
        .unwrap();
    daemon.start_vm("r").await.unwrap();
    assert_eq!(routes(&namespace), ["10.91.0.0/24 via 10.80.1.2"]);
    let swap = |spec: &mut v1::VmSpec| {
        let (first, second) = spec.nics.split_at_mut(1);
        std::mem::swap(&mut first[0].routed_subnets, &mut second[0].routed_subnets);
    };
    daemon.change("r", swap).await.unwrap();
    within(async || (routes(&namespace) == ["10.91.0.0/24 via 10.80.0.2"]).then_some(())).await;
    daemon.delete("r", true).await.unwrap();
    within(async || routes(&namespace).is_empty().then_some(())).await;
    let rules = rules(&namespace);
    assert!(rules["\"inet\" \"behind4\""].is_empty(), "{rules:?}");
}

#[tokio::test]
async fn subnet_that_is_reached_elsewhere_is_refused_by_name() {
    let namespace = Namespace::new();
    let config = "routed_subnets = ['10.0.0.0/8', '192.168.0.0/16', '172.16.0.0/12', 'fd00::/8']\n";
    let mut daemon = Daemon::in_network_with(&namespace.0, config).await;
    for command in [
        "link add eth1 up type bridge",
        "addr add 192.168.1.200/24 dev eth1",
        "route add 172.20.0.0/16 via 192.168.1.1",
        "route add default via 192.168.1.1",
    ] {
        namespace.ip(command);
    }
    for (name, cidr, mode) in [
        ("lan", "10.80.0.0/24", NetworkMode::Nat),
        ("alone", "10.81.0.0/24", NetworkMode::Isolated),
    ] {
        daemon.make_network(name, cidr, mode).await.unwrap();
    }
    daemon
        .start_in("r", router("lan", &["10.90.0.0/24"]))
        .await
        .unwrap();
    for (vm, network, subnet, reason, says) in [
        ("b", "lan", "10.80.0.0/16", "SUBNET_OVERLAPS", "network \"lan\""),
        ("c", "lan", "10.81.0.9", "SUBNET_OVERLAPS", "network \"alone\""),
        (
            "d",
            "lan",
            "10.90.0.128/25",
            "SUBNET_OVERLAPS",
            "NIC \"eth0\" of VM \"r\"",
        ),
        (
            "e",
            "lan",
            "192.168.0.0/16",
            "SUBNET_OVERLAPS",
            "interface \"eth1\"",
        ),
        (
            "f",
            "lan",
            "172.20.5.0/24",
            "SUBNET_OVERLAPS",
            "interface \"eth1\"",
        ),
        ("g", "lan", "fd00:90::/64", "NOT_ROUTED", "fd00:90::/64"),
        (
            "k",
            "lan",
            "203.0.113.0/24",
            "SUBNET_NOT_ALLOWED",
            "`routed_subnets`",
        ),
        ("h", "alone", "10.91.0.0/24", "NOT_ROUTED", "is isolated"),
    ] {
        let refused = daemon.start_in(vm, router(network, &[subnet])).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, reason);
        assert_says(&refused, says);
    }
    let refused = daemon.start_in("i", router("lan", &["169.254.0.0/16"])).await;
    assert_says(
        &refused.unwrap_err(),
        "spec.nics[0].routedSubnets[0]: overlaps with 169.254.0.0/16",
    );
    let refused = daemon
        .make_network("other", "10.90.0.0/25", NetworkMode::Nat)
        .await;
    let refused = refused.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NETWORK_OVERLAPS");
    assert_says(&refused, "behind NIC \"eth0\" of VM \"r\"");
    let isolated = v1::NetworkSpec {
        mode: NetworkMode::Isolated.into(),
        ..Default::default()
    };
    let refused = daemon
        .update_network(changes::change(&["spec.mode"], isolated))
        .await;
    assert_refused(&refused.unwrap_err(), Code::FailedPrecondition, "SUBNETS_ROUTED");
    // The default route does not count, and a deleted VM leaves nothing.
    daemon.delete("r", true).await.unwrap();
    daemon
        .start_in("j", router("lan", &["10.90.0.0/25"]))
        .await
        .unwrap();
    assert_eq!(routes(&namespace), ["10.90.0.0/25 via 10.80.0.3"]);
}
