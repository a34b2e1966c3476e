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
    fn send(&self, (from, port): (&str, u16), to: &str, ports: &[u16], text: &str) {
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
fn listen(namespace: &Namespace, ports: &[u16]) -> Program {
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
    // It is the rules that keep it away.
    namespace.run("nft delete table bridge vmmd");
    lie();
    assert_eq!([guest.next(), node.next()], ["7000 lie", "7001 lie"]);
}

/// A server in a namespace that sends each client the address on which it listens.
fn serve(namespace: &Namespace, address: &str, port: u16) -> Program {
    let program = r#"
import socket, sys
address, port = sys.argv[1:]
s = socket.create_server((address, int(port)), family=socket.AF_INET6 if ':' in address else socket.AF_INET)
print('ready', flush=True)
while True:
    s.accept()[0].sendall(address.encode())
"#;
    Program::start(namespace.python(program).args([address, &port.to_string()]))
}

/// First data of a server.
fn said(namespace: &Namespace, address: &str, port: u16) -> String {
    let program = r#"
import socket, sys
address, port = sys.argv[1:]
s = socket.create_connection((address, int(port)), 5)
print(s.recv(100).decode())
"#;
    let output = namespace
        .python(program)
        .args([address, &port.to_string()])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn a_published_port_takes_nothing_away_that_the_node_serves() {
    let namespace = Namespace::new();
    namespace.ip("link set lo up");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    daemon.make_network_as("lan", dual_stack()).await.unwrap();
    let publishing = |ports: &[(v1::PortProtocol, u32)]| NicSpec {
        published_ports: ports
            .iter()
            .map(|(protocol, port)| PublishedPort {
                protocol: (*protocol).into(),
                node_port: *port,
                guest_port: 0,
            })
            .collect(),
        ..nic("lan")
    };
    let (tcp, udp) = (v1::PortProtocol::Tcp, v1::PortProtocol::Udp);
    let mut vms = ["a", "b", "c"].into_iter();
    for address in ["0.0.0.0", "::"] {
        let _server = serve(&namespace, address, 8080);
        let refused = daemon
            .start_in(vms.next().unwrap(), publishing(&[(tcp, 8080)]))
            .await;
        let refused = refused.unwrap_err();
        assert_refused(&refused, Code::FailedPrecondition, "PORT_IN_USE");
        assert_says(&refused, "the node itself");
    }
    let twice = publishing(&[(tcp, 8081), (udp, 8081), (tcp, 8081)]);
    let refused = daemon.start_in(vms.next().unwrap(), twice).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "PORT_IN_USE");

    let _servers = ["127.0.0.1", "::1"].map(|address| serve(&namespace, address, 9000));
    let published = publishing(&[(tcp, 9000), (tcp, 9001), (udp, 53)]);
    let addresses = daemon.start_in("d", published).await.unwrap();
    for address in ["127.0.0.1", "::1"] {
        assert_eq!(said(&namespace, address, 9000), address);
    }
    // Published ports stay published, regardless of later listeners.
    let _later = serve(&namespace, "0.0.0.0", 9001);
    daemon.kill_vm("d").await.unwrap();
    daemon.start_vm("d").await.unwrap();

    let guest = Guest::in_place_of(&namespace, &daemon, "d").await;
    let expected = format!("0 {}", addresses[0]);
    assert_eq!(guest.resolve("10.80.0.1", "d.lan.internal"), expected);
    // The other addresses of the node lead to the guest.
    let _served = serve(&guest.namespace, "0.0.0.0", 9000);
    assert_eq!(said(&namespace, "10.80.0.1", 9000), "0.0.0.0");
}

#[tokio::test]
async fn dhcp_answers_of_a_guest_are_dropped_from_any_port() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    daemon.make_network_as("lan", dual_stack()).await.unwrap();
    let addresses = daemon.start_in("liar", nic("lan")).await.unwrap();
    daemon.start_in("client", nic("lan")).await.unwrap();
    let liar = Guest::in_place_of(&namespace, &daemon, "liar").await;
    let client = Guest::in_place_of(&namespace, &daemon, "client").await;
    // It can't send from an address that it has not made yet.
    liar.has(&addresses[1]).await;
    let mut ear = listen(&client.namespace, &[68, 546, 7000]);
    let lie = || {
        let liar = &liar.namespace;
        liar.send((&addresses[0], 1067), "255.255.255.255", &[68, 7000], "IPv4");
        liar.send((&addresses[1], 1547), "ff02::1%eth0", &[546, 7000], "IPv6");
    };
    lie();
    assert_eq!([ear.next(), ear.next()], ["7000 IPv4", "7000 IPv6"]);
    // It is the rules that keep it away.
    daemon.kill();
    namespace.run("nft delete table bridge vmmd");
    lie();
    let heard = [ear.next(), ear.next(), ear.next(), ear.next()];
    assert_eq!(heard, ["68 IPv4", "7000 IPv4", "546 IPv6", "7000 IPv6"]);
}

#[tokio::test]
async fn routed_network_is_reached_from_outside_but_not_from_nat() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    world.ip("route add default via 198.51.100.1");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let mut guests = Vec::new();
    for (number, mode) in [NetworkMode::Nat, NetworkMode::Routed, NetworkMode::Routed]
        .into_iter()
        .enumerate()
    {
        let (network, vm) = (format!("net{number}"), format!("vm{number}"));
        let cidr = format!("10.8{number}.0.0/24");
        daemon.make_network(&network, &cidr, mode).await.unwrap();
        let published_ports = match mode {
            NetworkMode::Nat => vec![PublishedPort {
                protocol: v1::PortProtocol::Udp.into(),
                node_port: 8000,
                guest_port: 7000,
            }],
            _ => Vec::new(),
        };
        let nic = NicSpec {
            published_ports,
            ..nic(&network)
        };
        daemon.start_in(&vm, nic).await.unwrap();
        let guest = Guest::in_place_of(&namespace, &daemon, &vm).await;
        guests.push(guest.namespace);
    }
    daemon.kill();
    let [nat, routed, other] = guests.try_into().unwrap_or_else(|_| unreachable!());
    let mut outside = listen(&world, &[7000]);
    let mut inside = listen(&routed, &[7000]);
    // The outside is reached, so what does not arrive later did not fail on its first way.
    for (guest, address) in [(&nat, "10.80.0.2"), (&routed, "10.81.0.2"), (&other, "10.82.0.2")] {
        guest.send((address, 7002), "198.51.100.2", &[7000], address);
        assert_eq!(outside.next(), format!("7000 {address}"));
    }
    nat.send(("10.80.0.2", 7000), "10.81.0.2", &[7000], "nat");
    other.send(("10.82.0.2", 7000), "10.81.0.2", &[7000], "routed");
    world.send(("198.51.100.2", 7001), "10.81.0.2", &[7000], "world");
    assert_eq!([inside.next(), inside.next()], ["7000 routed", "7000 world"]);
    // A guest of the network with NAT answers a datagram to its published port.
    let mut published = listen(&nat, &[7000]);
    other.send(("10.82.0.2", 7001), "10.82.0.1", &[8000], "question");
    assert_eq!(published.next(), "7000 question");
    drop(published);
    let mut answered = listen(&other, &[7001]);
    nat.send(("10.80.0.2", 7000), "10.82.0.2", &[7001], "answer");
    assert_eq!(answered.next(), "7001 answer");
    // It is the rules that keep it away.
    namespace.run("nft delete table inet vmmd");
    nat.send(("10.80.0.2", 7003), "10.81.0.2", &[7000], "nat");
    assert_eq!(inside.next(), "7000 nat");
}

#[tokio::test]
async fn a_network_without_ipv6_carries_none() {
    let (namespace, mut daemon, _) = Daemon::with_networks(["lan"]).await;
    let mut guests = Vec::new();
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
        guests.push(Guest::in_place_of(&namespace, &daemon, vm).await.namespace);
    }
    daemon.kill();
    guests[0].ip("addr add fd00::1/64 dev eth0 nodad");
    let mut ear = listen(&guests[1], &[7000]);
    let send = || {
        guests[0].send(("fd00::1", 7000), "ff02::1%eth0", &[7000], "IPv6");
        guests[0].send(("10.80.0.2", 7000), "255.255.255.255", &[7000], "IPv4");
    };
    send();
    assert_eq!(ear.next(), "7000 IPv4");
    // It is the rules that keep it away.
    namespace.run("nft delete table bridge vmmd");
    send();
    assert_eq!([ear.next(), ear.next()], ["7000 IPv6", "7000 IPv4"]);
}

#[tokio::test]
async fn a_sender_of_datagrams_follows_a_published_port_to_another_vm() {
    let namespace = Namespace::new();
    let world = world(&namespace);
    let mut daemon = Daemon::in_network(&namespace.0).await;
    daemon
        .make_network("lan", "10.80.0.0/24", NetworkMode::Nat)
        .await
        .unwrap();
    // The same sender each time, before the node forgets the sender on its own.
    let send = |text: &str| world.send(("198.51.100.2", 7001), "198.51.100.1", &[8000], text);
    send("nobody");
    for vm in ["a", "b"] {
        let published = NicSpec {
            published_ports: vec![PublishedPort {
                protocol: v1::PortProtocol::Udp.into(),
                node_port: 8000,
                guest_port: 7000,
            }],
            ..nic("lan")
        };
        daemon.start_in(vm, published).await.unwrap();
        let guest = Guest::in_place_of(&namespace, &daemon, vm).await;
        let mut ear = listen(&guest.namespace, &[7000]);
        send(vm);
        assert_eq!(ear.next(), format!("7000 {vm}"));
        daemon.delete(vm, true).await.unwrap();
    }
}
