//! Packet filter: guests of the tests send packets, and receive the packets that pass.

use super::{
    guest::{Program, world},
    *,
};

impl Guest {
    /// One in place of a running VM, whose process is killed, with the VM's IPv4 address and a route to the gateway.
    pub(super) async fn in_place_of(node: &Namespace, daemon: &Daemon, vm: &str) -> Self {
        let running = daemon.get(vm).await.unwrap();
        let nic = status(&running).nics[0].clone();
        daemon.kill_vm(vm).await.unwrap();
        let network = daemon.network(&nic.network).await.unwrap().status.unwrap();
        let guest = Self::on(node, &nic.tap, &network.bridge, &nic.mac);
        for command in [
            format!("addr add {}/24 dev eth0", nic.addresses[0]),
            format!("route add default via {}", network.gateway),
        ] {
            guest.namespace.ip(&command);
        }
        guest
    }

    fn mac(&self) -> String {
        let shown = self.namespace.run("cat /sys/class/net/eth0/address");
        shown.trim().to_owned()
    }
}

impl Namespace {
    /// Sends a datagram to each of `ports`, in this order.
    pub(super) fn send(&self, (from, port): (&str, u16), to: &str, ports: &[u16], text: &str) {
        let program = r#"
import os, socket, sys
source, port, to, text, *ports = sys.argv[1:]
# By one processor, so that none overtakes the one before.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
s = socket.socket(socket.AF_INET6 if ':' in to else socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
s.bind((source, int(port)))
for port in ports:
    s.sendto(text.encode(), (to, int(port)))
"#;
        let ports = ports.iter().map(u16::to_string);
        let output = self
            .python(program)
            .args([from, &port.to_string(), to, text])
            .args(ports)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// Receives the datagrams to some ports of a namespace. It prints the port and the datagram of each,
/// as "7000 hello", and an empty line after a timeout. The order of simultaneous ones is that of `ports`.
pub(super) fn listen(namespace: &Namespace, ports: &[u16]) -> Program {
    let program = r#"
import select, socket, sys
sockets = []
for port in sys.argv[1:]:
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    s.bind(('::', int(port)))
    sockets.append(s)
print('ready', flush=True)
while ready := select.select(sockets, [], [], 20)[0]:
    for s in sockets:
        if s in ready:
            print(s.getsockname()[1], s.recv(2000).decode(), flush=True)
"#;
    let ports = ports.iter().map(u16::to_string);
    Program::start(namespace.python(program).args(ports))
}

#[tokio::test]
async fn foreign_port_of_a_bridge_reaches_neither_guests_nor_the_node() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon.make_network("lan", "10.80.0.0/24", NetworkMode::Nat).await;
    let bridge = made.unwrap().status.unwrap().bridge;
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
    }
    let plain = NicSpec {
        attachment: Some(Attachment::Bridge(bridge.clone())),
        ..nic("lan")
    };
    let refused = daemon.start_in("c", plain).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NETWORK_BRIDGE");
    assert_says(&refused, "`network: lan`");

    let (a, b) = (
        Guest::in_place_of(&namespace, &daemon, "a").await,
        Guest::in_place_of(&namespace, &daemon, "b").await,
    );
    daemon.kill();
    let stranger = Guest::on(&namespace, "other", &bridge, "52:54:00:00:00:77");
    let gateway = namespace.run(&format!("cat /sys/class/net/{bridge}/address"));
    for command in [
        "addr add 10.80.0.1/32 dev eth0".to_owned(),
        "addr add 10.80.0.99/24 dev eth0".to_owned(),
        format!("neigh add 10.80.0.2 lladdr {} dev eth0", a.mac()),
        // Its own address comes first, so the node is reached by one of its other addresses.
        format!("neigh add 10.80.0.98 lladdr {} dev eth0", gateway.trim()),
    ] {
        stranger.namespace.ip(&command);
    }
    namespace.ip(&format!("addr add 10.80.0.98/32 dev {bridge}"));
    namespace.run("nft delete table inet vmmd");
    let mut guest = listen(&a.namespace, &[7000]);
    let mut node = listen(&namespace, &[7001]);
    let lie = || {
        let source = |from| (from, 7000);
        stranger
            .namespace
            .send(source("10.80.0.1"), "10.80.0.2", &[7000], "lie");
        stranger
            .namespace
            .send(source("10.80.0.99"), "10.80.0.98", &[7001], "lie");
    };
    lie();
    b.namespace
        .send(("10.80.0.3", 7000), "10.80.0.2", &[7000], "truth");
    b.namespace
        .send(("10.80.0.3", 7000), "10.80.0.98", &[7001], "truth");
    assert_eq!([guest.next(), node.next()], ["7000 truth", "7001 truth"]);
    // It is the rules that keep it away from the guest. The node takes nothing then, also from guests.
    namespace.run("nft delete table bridge vmmd");
    lie();
    b.namespace
        .send(("10.80.0.3", 7000), "10.80.0.98", &[7001], "truth");
    assert_eq!(guest.next(), "7000 lie");
    namespace.run(&format!("tc qdisc delete dev {bridge} ingress"));
    lie();
    assert_eq!([guest.next(), node.next()], ["7000 lie", "7001 lie"]);
}

#[tokio::test]
async fn guests_do_not_reach_each_other_while_rules_are_missing() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let mut guests = Vec::new();
    let mut taps = Vec::new();
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
        let tap = status(&daemon.get(vm).await.unwrap()).nics[0].tap.clone();
        let filters = |tap: &str| namespace.run(&format!("tc filter show dev {tap} egress"));
        assert!(filters(&tap).contains("bpf"), "a new tap has a guard");
        guests.push(Guest::in_place_of(&namespace, &daemon, vm).await);
        assert!(!filters(&tap).contains("bpf"), "the tap of the test has none");
        taps.push(tap);
    }
    // A daemon guards the taps that it finds.
    daemon.kill_and_restart().await;
    for tap in &taps {
        let filters = || namespace.run(&format!("tc filter show dev {tap} egress"));
        within(async || filters().contains("bpf").then_some(())).await;
    }
    daemon.kill();
    let mut ear = listen(&guests[1].namespace, &[7000]);
    let (a, b) = (&guests[0], &guests[1]);
    a.namespace
        .ip(&format!("neigh replace 10.80.0.3 lladdr {} dev eth0", b.mac()));
    let send = |text| {
        a.namespace.send(("10.80.0.2", 7000), "10.80.0.3", &[7000], text);
        namespace.send(("10.80.0.1", 7000), "10.80.0.3", &[7000], "node");
    };
    send("with rules");
    assert_eq!([ear.next(), ear.next()], ["7000 with rules", "7000 node"]);
    namespace.run("nft flush ruleset");
    send("without rules");
    assert_eq!(ear.next(), "7000 node");
    // It is the guard that keeps it away.
    namespace.run(&format!("tc qdisc delete dev {} clsact", taps[1]));
    send("without a guard");
    assert_eq!(ear.next(), "7000 without a guard");
}

/// Sends datagrams to a port of an address all the time, until the test ends.
fn send_always(namespace: &Namespace, (from, to): (&str, &str), port: u16) -> Program {
    let program = r#"
import socket, sys, time
source, to, port = sys.argv[1:]
s = socket.socket(socket.AF_INET6 if ':' in to else socket.AF_INET, socket.SOCK_DGRAM)
s.bind((source, 0))
print('ready', flush=True)
while True:
    try:
        s.sendto(b'always', (to, int(port)))
    except OSError:
        pass
    time.sleep(0.0002)
"#;
    Program::start(namespace.python(program).args([from, to, &port.to_string()]))
}

#[tokio::test]
async fn isolated_guest_stays_isolated_while_rules_are_flushed() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    for command in ["addr add fd00:99::1/64 dev world nodad", "link set lo up"] {
        namespace.ip(command);
    }
    world.ip("addr add fd00:99::2/64 dev eth0 nodad");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    // The node forwards packets: another network needs it.
    for (name, mode, number) in [("nat", NetworkMode::Nat, 0), ("lan", NetworkMode::Isolated, 1)] {
        let spec = v1::NetworkSpec {
            mode: mode.into(),
            ipv4_cidr: format!("10.8{number}.0.0/24"),
            ipv6_cidr: format!("fd00:8{number}::/64"),
            ..v1::NetworkSpec::default()
        };
        daemon.make_network_as(name, spec).await.unwrap();
    }
    let addresses = daemon.start_in("a", nic("lan")).await.unwrap();
    let guest = Guest::in_place_of(&namespace, &daemon, "a").await;
    guest.has(&addresses[1]).await;
    guest.namespace.ip("-6 route add default via fd00:81::1");
    let mut outside = listen(&world, &[7000, 7001]);
    let _ways = [
        send_always(&guest.namespace, (&addresses[0], "198.51.100.2"), 7000),
        send_always(&guest.namespace, (&addresses[1], "fd00:99::2"), 7000),
    ];
    let there = || rules(&namespace);
    let whole = there();
    for _ in 0..10 {
        namespace.run("nft flush ruleset");
        within(async || (there() == whole).then_some(())).await;
    }
    daemon.told("PacketFilterRepaired", 1).await;
    // Also without a daemon.
    daemon.kill();
    namespace.run("nft flush ruleset");
    // The outside is reached, and prints datagrams in the order of their arrival.
    namespace.send(("198.51.100.1", 7001), "198.51.100.2", &[7001], "end");
    assert_eq!(outside.next(), "7001 end");
    // It is the guard of the bridge that keeps it away.
    let bridges = namespace
        .interfaces()
        .into_iter()
        .filter(|name| name.starts_with("vmb"));
    for bridge in bridges {
        namespace.run(&format!("tc qdisc delete dev {bridge} ingress"));
    }
    assert_eq!(outside.next(), "7000 always");
}

#[tokio::test]
async fn guest_cannot_send_from_an_address_that_is_not_its_own() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let mut guests = Vec::new();
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
        guests.push(Guest::in_place_of(&namespace, &daemon, vm).await);
    }
    daemon.kill();
    let (liar, victim) = (&guests[0].namespace, &guests[1]);
    let mut ear = listen(&victim.namespace, &[7000]);
    let neighbor = format!("neigh replace 10.80.0.3 lladdr {} dev eth0", victim.mac());
    liar.ip("addr add 10.80.0.99/24 dev eth0");
    liar.ip(&neighbor);
    let own = guests[0].mac();
    let lie = || {
        liar.send(("10.80.0.99", 7000), "10.80.0.3", &[7000], "address");
        liar.ip("link set eth0 address 52:54:00:00:00:77");
        liar.ip(&neighbor);
        liar.send(("10.80.0.2", 7000), "10.80.0.3", &[7000], "MAC");
        liar.ip(&format!("link set eth0 address {own}"));
        liar.ip(&neighbor);
        liar.send(("10.80.0.2", 7000), "10.80.0.3", &[7000], "truth");
    };
    lie();
    assert_eq!(ear.next(), "7000 truth");
    // It is the rules that keep it away.
    namespace.run("nft delete table bridge vmmd");
    lie();
    let heard = [ear.next(), ear.next(), ear.next()];
    assert_eq!(heard, ["7000 address", "7000 MAC", "7000 truth"]);
}

#[tokio::test]
async fn nat_takes_translated_packets_for_published_ports_only() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    let mut daemon = Daemon::in_network(&namespace.0).await;
    daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    let published = NicSpec {
        published_ports: vec![PublishedPort {
            protocol: v1::PortProtocol::Udp.into(),
            node_port: 8000,
            guest_port: 7000,
            ..Default::default()
        }],
        ..nic("lan")
    };
    daemon.start_in("a", published).await.unwrap();
    let guest = Guest::in_place_of(&namespace, &daemon, "a").await;
    daemon.kill();
    // Another program of the node leads a port to the guest, such as kube-proxy.
    namespace.run("nft add table ip theirs");
    namespace.run("nft add chain ip theirs nat { type nat hook prerouting priority dstnat ; }");
    namespace.run("nft add rule ip theirs nat udp dport 9000 dnat to 10.80.0.2:7001");
    let mut ear = listen(&guest.namespace, &[7000, 7001]);
    let send = |port| world.send(("198.51.100.2", port), "198.51.100.1", &[9000, 8000], "hello");
    send(7002);
    assert_eq!(ear.next(), "7000 hello");
    // It is the rules that keep it away.
    namespace.run("nft delete chain inet vmmd forward");
    send(7003);
    let heard = [ear.next(), ear.next()];
    assert!(heard.contains(&"7001 hello".to_owned()), "{heard:?}");
}

#[tokio::test]
async fn link_local_addresses_of_the_outside_are_not_reached() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    // The metadata service of a cloud.
    world.ip("addr add 169.254.169.254/32 dev eth0");
    namespace.ip("route add 169.254.169.254/32 dev world");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let mut outside = listen(&world, &[7000, 7001]);
    let mut guests = Vec::new();
    for (vm, mode, address) in [
        ("nat", NetworkMode::Nat, "10.80.0.2"),
        ("routed", NetworkMode::Routed, "10.81.0.2"),
    ] {
        let cidr = format!("{}.0/24", address.trim_end_matches(".2"));
        daemon.make_network(vm, &cidr, mode).await.unwrap();
        daemon.start_in(vm, nic(vm)).await.unwrap();
        let guest = Guest::in_place_of(&namespace, &daemon, vm).await.namespace;
        guest.send((address, 7000), "169.254.169.254", &[7000], vm);
        guest.send((address, 7000), "198.51.100.2", &[7001], vm);
        assert_eq!(outside.next(), format!("7001 {vm}"));
        guests.push((guest, address));
    }
    // It is the rules that keep it away.
    daemon.kill();
    namespace.run("nft delete chain inet vmmd forward");
    for (guest, address) in guests {
        guest.send((address, 7000), "169.254.169.254", &[7000], "metadata");
        assert_eq!(outside.next(), "7000 metadata");
    }
}

#[tokio::test]
async fn port_of_one_address_of_the_node_leads_to_its_guest() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    namespace.ip("addr add 198.51.100.9/24 dev world");
    let mut daemon = Daemon::in_network_with(&namespace.0, "published_ports = ['8000-8099']\n").await;
    let made = daemon.make_network("lan", "10.80.0.0/24", NetworkMode::Nat).await;
    made.unwrap();
    let published = |address: &str, first: u32, last: u32| NicSpec {
        published_ports: vec![PublishedPort {
            protocol: v1::PortProtocol::Udp.into(),
            node_port: first,
            guest_port: 7000,
            address: address.into(),
            last_node_port: last,
        }],
        ..nic("lan")
    };
    daemon
        .start_in("a", published("198.51.100.1", 8000, 8001))
        .await
        .unwrap();
    // The same port of another address is free, but not of all addresses.
    daemon
        .start_in("b", published("198.51.100.9", 8000, 0))
        .await
        .unwrap();
    let refused = daemon.start_in("c", published("", 8001, 0)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PORT_IN_USE");
    assert_says(
        &refused,
        "UDP port 8001 at 198.51.100.1 of the node leads to NIC \"eth0\" of VM \"a\"",
    );
    let refused = daemon.start_in("d", published("", 8099, 8100)).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PORT_NOT_ALLOWED");
    assert_says(&refused, "8100/udp");
    assert_says(&refused, "8000-8099");
    let (a, b) = (
        Guest::in_place_of(&namespace, &daemon, "a").await,
        Guest::in_place_of(&namespace, &daemon, "b").await,
    );
    daemon.kill();
    let mut of_a = listen(&a.namespace, &[7000, 7001]);
    let mut of_b = listen(&b.namespace, &[7000, 7001]);
    let send = |to, port, text| world.send(("198.51.100.2", 7002), to, &[port], text);
    send("198.51.100.9", 8001, "nobody's");
    send("198.51.100.9", 8000, "for b");
    send("198.51.100.1", 8000, "for a");
    send("198.51.100.1", 8001, "for a, too");
    assert_eq!(of_b.next(), "7000 for b");
    assert_eq!([of_a.next(), of_a.next()], ["7000 for a", "7001 for a, too"]);
}

#[tokio::test]
async fn denied_ranges_are_not_reached_and_change() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    world.ip("addr add 203.0.113.7/32 dev eth0");
    world.ip("addr add fd00:99::2/64 dev eth0 nodad");
    namespace.ip("addr add fd00:99::1/64 dev world nodad");
    namespace.ip("route add 203.0.113.0/24 dev world");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let deny = |ranges: &[&str]| v1::NetworkSpec {
        deny: ranges.iter().map(|range| (*range).to_owned()).collect(),
        ..dual_stack()
    };
    let wrong = daemon
        .make_network_as("lan", deny(&["203.0.113.1/24"]))
        .await
        .unwrap_err();
    assert_says(&wrong, "network.spec.deny[0]: must be an address, or a range");
    let spec = deny(&["203.0.113.0/25", "203.0.113.7", "fd00:99::/64"]);
    let made = daemon.create_network("lan", spec, "second").await.unwrap();
    let addresses = daemon.start_in("a", nic("lan")).await.unwrap();
    let guest = Guest::in_place_of(&namespace, &daemon, "a").await;
    guest.has(&addresses[1]).await;
    let mut outside = listen(&world, &[7000, 7001]);
    let send = |to, port, text| guest.namespace.send((&addresses[0], 7000), to, &[port], text);
    let send6 = |text| {
        guest
            .namespace
            .send((&addresses[1], 7000), "fd00:99::2", &[7000], text);
    };
    send("203.0.113.7", 7000, "denied");
    send6("denied");
    send("198.51.100.2", 7001, "allowed");
    assert_eq!(outside.next(), "7001 allowed");
    // By a few elements, while the VM keeps its NIC.
    let mut request = v1::UpdateNetworkRequest {
        network: Some(v1::Network {
            metadata: metadata_of("lan"),
            spec: Some(deny(&["203.0.113.0/25"])),
            status: None,
        }),
        update_mask: Some(vmmd_api::well_known::FieldMask {
            paths: vec!["spec.deny".into()],
        }),
        ..Default::default()
    };
    daemon
        .networks()
        .await
        .update_network(request.clone())
        .await
        .unwrap();
    send("203.0.113.7", 7000, "denied");
    send6("allowed by IPv6");
    assert_eq!(outside.next(), "7000 allowed by IPv6");
    request.network.as_mut().unwrap().spec = Some(deny(&[]));
    daemon.networks().await.update_network(request).await.unwrap();
    send("203.0.113.7", 7000, "allowed at last");
    assert_eq!(outside.next(), "7000 allowed at last");
    assert_eq!(made.status.unwrap().mtu, 1500);
}

#[tokio::test]
async fn guest_fills_neither_neighbors_nor_connections_of_the_node() {
    let (namespace, mut daemon, [made]) = Daemon::with_networks(["lan"]).await;
    let world = world(&namespace);
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
    }
    let (a, b) = (
        Guest::in_place_of(&namespace, &daemon, "a").await,
        Guest::in_place_of(&namespace, &daemon, "b").await,
    );
    daemon.kill();
    let bridge = made.status.unwrap().bridge;
    // By way of the gateway to addresses that no guest has, and to one that a guest has.
    let gateway = namespace.run(&format!("cat /sys/class/net/{bridge}/address"));
    for last in 3..60 {
        a.namespace.ip(&format!(
            "neigh replace 10.80.0.{last} lladdr {} dev eth0",
            gateway.trim()
        ));
    }
    for last in 4..60 {
        let to = format!("10.80.0.{last}");
        a.namespace.send(("10.80.0.2", 7000), &to, &[7000], "to nobody");
    }
    let mut ear = listen(&b.namespace, &[7000]);
    a.namespace
        .send(("10.80.0.2", 7000), "10.80.0.3", &[7000], "to b");
    assert_eq!(ear.next(), "7000 to b");
    let neighbors = namespace.ip(&format!("-4 neigh show dev {bridge}"));
    assert!(neighbors.lines().count() <= 2, "{neighbors}");
    // More connections than a guest may have.
    let program = r#"
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(20000):
    s.sendto(b'x', ('198.51.100.2', 10000 + number))
"#;
    let output = a.namespace.python(program).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let count = namespace.run("cat /proc/sys/net/netfilter/nf_conntrack_count");
    let count: u32 = count.trim().parse().unwrap();
    assert!((16_000..17_000).contains(&count), "{count} connections");
    let mut outside = listen(&world, &[7000]);
    b.namespace
        .send(("10.80.0.3", 7002), "198.51.100.2", &[7000], "of another guest");
    assert_eq!(outside.next(), "7000 of another guest");
}

#[tokio::test]
async fn network_has_the_mtu_of_the_default_route() {
    let namespace = Namespace::new();
    let _world = world(&namespace);
    for command in [
        "link add eth9 mtu 1300 up type bridge",
        "addr add 192.0.2.1/24 dev eth9",
        "link set world mtu 1400",
        "route add default via 192.0.2.2 dev eth9 metric 200",
        "route add default via 198.51.100.2 dev world metric 100",
    ] {
        namespace.ip(command);
    }
    let daemon = Daemon::in_network(&namespace.0).await;
    for (name, cidr, mode, own, expected) in [
        ("nat", "10.80.0.0/24", NetworkMode::Nat, 0, 1400),
        ("alone", "10.81.0.0/24", NetworkMode::Isolated, 0, 1500),
        ("own", "10.82.0.0/24", NetworkMode::Nat, 1280, 1280),
    ] {
        let spec = v1::NetworkSpec {
            ipv4_cidr: cidr.into(),
            mode: mode.into(),
            mtu: own,
            ..v1::NetworkSpec::default()
        };
        let made = daemon.make_network_as(name, spec).await.unwrap();
        let state = made.status.unwrap();
        assert_eq!((state.mtu, made.spec.unwrap().mtu), (expected, own));
        let link = namespace.ip(&format!("-o link show {}", state.bridge));
        assert!(link.contains(&format!("mtu {expected} ")), "{link}");
    }
}
