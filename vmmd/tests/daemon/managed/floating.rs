//! Floating addresses.

use super::{
    guest::{mirror, seen_by, world},
    *,
};

/// Prints each address of IPv4 and IPv6 that is announced.
const ANNOUNCED: &str = r#"
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(('eth0', 0))
print('ready', flush=True)
while True:
    frame = s.recv(2000)
    if frame[12:14] == b'\x08\x06' and frame[28:32] == frame[38:42]:
        print(socket.inet_ntoa(frame[28:32]), frame[22:28] == frame[6:12], flush=True)
    # An unsolicited neighbor advertisement to all nodes, of a router, which overrides known addresses.
    elif frame[12:14] == b'\x86\xdd' and frame[20] == 58 and frame[54] == 136 and frame[58] == 0xa0:
        print(socket.inet_ntop(socket.AF_INET6, frame[62:78]), frame[80:86] == frame[6:12], flush=True)
"#;

fn floating(addresses: &[&str]) -> NicSpec {
    NicSpec {
        floating_addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
        ..nic("lan")
    }
}

/// The addresses for which the node answers.
fn answered(namespace: &Namespace) -> Vec<String> {
    let shown = ["-4", "-6"].map(|family| namespace.ip(&format!("{family} neigh show proxy")));
    let lines = shown.iter().flat_map(|text| text.lines());
    lines
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .collect()
}

impl Guest {
    /// Instead of a VM that continues to run, with all of its addresses.
    async fn beside(node: &Namespace, daemon: &Daemon, vm: &str) -> Self {
        let running = daemon.get(vm).await.unwrap();
        let nic = status(&running).nics[0].clone();
        let state = daemon.network(&nic.network).await.unwrap().status.unwrap();
        node.ip(&format!("link set {} down", nic.tap));
        node.ip(&format!("link set {} name x{}", nic.tap, nic.tap));
        let guest = Self::on(node, &nic.tap, &state.bridge, &nic.mac);
        guest
            .namespace
            .ip(&format!("addr add {}/24 dev eth0", nic.addresses[0]));
        guest
            .namespace
            .ip(&format!("route add default via {}", state.gateway));
        if let Some(address) = nic.addresses.get(1) {
            guest.has(address).await;
        }
        guest
    }
}

#[tokio::test]
async fn floating_addresses_lead_to_a_guest_and_back_while_it_runs() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    namespace.ip("addr add fd00:99::1/64 dev world nodad");
    world.ip("addr add fd00:99::2/64 dev eth0 nodad");
    let config = "floating_addresses = ['198.51.100.64/26', 'fd00:99::/64']\n";
    let mut daemon = Daemon::in_network_with(&namespace.0, config).await;
    daemon.make_network_as("lan", dual_stack()).await.unwrap();
    let mut announced = Program::start(&mut world.python(ANNOUNCED));
    let both = ["198.51.100.70", "fd00:99::70"];
    let own = daemon.start_in("a", floating(&both)).await.unwrap();
    daemon.start_in("b", nic("lan")).await.unwrap();
    let mut heard = BTreeMap::new();
    while heard.len() < 2 {
        let line = announced.next();
        let (address, is_of_the_node) = line.split_once(' ').unwrap();
        heard.insert(address.to_owned(), is_of_the_node.to_owned());
    }
    let expected = both.map(|address| (address.to_owned(), "True".to_owned()));
    assert_eq!(heard, BTreeMap::from(expected));
    assert_eq!(answered(&namespace), both);
    let (a, b) = (
        Guest::beside(&namespace, &daemon, "a").await,
        Guest::beside(&namespace, &daemon, "b").await,
    );
    let _mirrors = [
        mirror(&world, &["198.51.100.2", "fd00:99::2"]),
        mirror(&a.namespace, &[&own[0], &own[1]]),
    ];
    let leads = || {
        // The guest sees the address of the client.
        assert_eq!(seen_by(&world, "198.51.100.2", both[0]), "198.51.100.2");
        assert_eq!(seen_by(&world, "fd00:99::2", both[1]), "fd00:99::2");
        assert_eq!(seen_by(&a.namespace, &own[0], "198.51.100.2"), both[0]);
        assert_eq!(seen_by(&a.namespace, &own[1], "fd00:99::2"), both[1]);
    };
    leads();
    assert_eq!(seen_by(&b.namespace, "10.80.0.3", "198.51.100.2"), "198.51.100.1");
    // From the network itself, and from the node.
    assert_eq!(seen_by(&b.namespace, "10.80.0.3", both[0]), "10.80.0.1");
    assert_eq!(seen_by(&namespace, "198.51.100.1", both[0]), "198.51.100.1");
    // No other packets of the outside reach the guest.
    world.ip("route add 10.80.0.0/24 via 198.51.100.1");
    assert_eq!(seen_by(&world, "198.51.100.2", &own[0]), "none");

    namespace.run("nft flush ruleset");
    within(async || {
        let rules = namespace.run("nft list ruleset");
        rules.contains(&format!("{} : {}", both[0], own[0])).then_some(())
    })
    .await;
    daemon.kill();
    leads();
    daemon.relaunch().await;
    leads();
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert_eq!(leases[0].floating_addresses, both);

    daemon.kill_vm("a").await.unwrap();
    within(async || answered(&namespace).is_empty().then_some(())).await;
    let leases = daemon.network("lan").await.unwrap().status.unwrap().leases;
    assert!(leases[0].floating_addresses.is_empty(), "{leases:?}");
    assert_eq!(namespace.ip("route show proto 118").trim(), "");
    assert!(!namespace.run("nft list ruleset").contains(both[0]));
}

#[tokio::test]
async fn floating_address_moves_between_running_guests() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    let config = "floating_addresses = ['198.51.100.0/24']\n";
    let mut daemon = Daemon::in_network_with(&namespace.0, config).await;
    daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    let address = "198.51.100.70";
    daemon.start_in("a", floating(&[address])).await.unwrap();
    daemon.start_in("b", nic("lan")).await.unwrap();
    within(async || (answered(&namespace) == [address]).then_some(())).await;
    let (a, b) = (
        Guest::beside(&namespace, &daemon, "a").await,
        Guest::beside(&namespace, &daemon, "b").await,
    );
    let _mirrors = [
        mirror(&world, &["198.51.100.2"]),
        mirror(&b.namespace, &["10.80.0.3"]),
    ];
    assert_eq!(seen_by(&a.namespace, "10.80.0.2", "198.51.100.2"), address);

    let change = async |daemon: &mut Daemon, vm, addresses: &[&str]| {
        let wanted = floating(addresses).floating_addresses;
        let changed = daemon
            .change(vm, |spec| spec.nics[0].floating_addresses = wanted)
            .await;
        assert_eq!(status(&changed.unwrap()).pending_changes, []);
    };
    change(&mut daemon, "a", &[]).await;
    change(&mut daemon, "b", &[address]).await;
    assert_eq!(answered(&namespace), [address]);
    // The port of the connection that the other guest had is used again.
    assert_eq!(seen_by(&b.namespace, "10.80.0.3", "198.51.100.2"), address);
    assert_eq!(seen_by(&a.namespace, "10.80.0.2", "198.51.100.2"), "198.51.100.1");
    assert_eq!(seen_by(&world, "198.51.100.2", address), "198.51.100.2");
    if tracks_bridges(&namespace) {
        let closed = v1::NicFirewall {
            ingress: Some(v1::NicRules::default()),
            egress: None,
        };
        let changed = daemon
            .change("b", |spec| spec.nics[0].firewall = Some(closed))
            .await;
        changed.unwrap();
        assert_eq!(seen_by(&world, "198.51.100.2", address), "none");
    }
}

#[tokio::test]
async fn floating_address_that_is_in_use_is_refused_by_name() {
    let namespace = Namespace::new();
    let _world = world(&namespace);
    namespace.ip("route add default via 198.51.100.2");
    let config = "floating_addresses = ['198.51.100.0/25', '10.80.0.0/16', 'fd00:99::/64']\n";
    let mut daemon = Daemon::in_network_with(&namespace.0, config).await;
    for (name, cidr, mode) in [
        ("lan", "10.80.0.0/24", NetworkMode::Nat),
        ("wan", "10.81.0.0/24", NetworkMode::Routed),
    ] {
        daemon.make_network(name, cidr, mode).await.unwrap();
    }
    daemon.start_in("a", floating(&["198.51.100.70"])).await.unwrap();
    let routed = NicSpec {
        routed_subnets: vec!["10.80.9.0/24".into()],
        ..nic("lan")
    };
    daemon.start_in("r", routed).await.unwrap();
    let in_wan = |nic| NicSpec {
        attachment: Some(Attachment::Network("wan".into())),
        ..nic
    };
    let not_allowed = "FLOATING_ADDRESS_NOT_ALLOWED";
    let in_use = "FLOATING_ADDRESS_IN_USE";
    for (vm, nic, reason, says) in [
        (
            "b",
            floating(&["198.51.100.70"]),
            in_use,
            "NIC \"eth0\" of VM \"a\"",
        ),
        (
            "c",
            floating(&["198.51.100.200"]),
            not_allowed,
            "`floating_addresses`",
        ),
        (
            "d",
            floating(&["198.51.100.1"]),
            in_use,
            "the node's interface \"world\"",
        ),
        ("e", floating(&["198.51.100.2"]), in_use, "a router of the node"),
        ("f", floating(&["10.80.0.9"]), in_use, "network \"lan\""),
        (
            "g",
            floating(&["10.80.9.9"]),
            in_use,
            "behind NIC \"eth0\" of VM \"r\"",
        ),
        ("h", floating(&["fd00:99::70"]), not_allowed, "fd00:99::70"),
        ("i", in_wan(floating(&["198.51.100.71"])), "NOT_NAT", "mode NAT"),
    ] {
        let refused = daemon.start_in(vm, nic).await.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, reason);
        assert_says(&refused, says);
    }
    let routed = v1::NetworkSpec {
        mode: NetworkMode::Routed.into(),
        ..Default::default()
    };
    let refused = daemon
        .update_network(changes::change(&["spec.mode"], routed))
        .await;
    assert_refused(
        &refused.unwrap_err(),
        Code::FailedPrecondition,
        "ADDRESSES_FLOATING",
    );
    // The address is free when the run ends, and its VM cannot start while another one has it.
    daemon.kill_vm("a").await.unwrap();
    within(async || answered(&namespace).is_empty().then_some(())).await;
    daemon.start_in("j", floating(&["198.51.100.70"])).await.unwrap();
    within(async || (answered(&namespace) == ["198.51.100.70"]).then_some(())).await;
    let refused = daemon.start_vm("a").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, in_use);
    assert_says(&refused, "VM \"j\"");
}
