//! IPv6 in networks of the daemon: addresses that guests form themselves, and messages that guests
//! cannot send.

use super::*;

impl Guest {
    /// One that listens to routers, in place of a running VM, whose process is killed; with the IPv6 address that its NIC is to have.
    async fn with_ipv6(node: &Namespace, daemon: &Daemon, vm: &str, bridge: &str) -> (Self, String) {
        let running = daemon.get(vm).await.unwrap();
        let nic = status(&running).nics[0].clone();
        daemon.kill_vm(vm).await.unwrap();
        let guest = Self::on(node, &nic.tap, bridge, &nic.mac);
        let address = nic.addresses.last().unwrap();
        assert!(address.contains(':'), "{:?}", nic.addresses);
        (guest, address.clone())
    }

    /// Waits until the guest's kernel has formed an address from an advertisement.
    pub async fn has(&self, address: &str) {
        within(async || {
            let shown = self.namespace.ip("-6 addr show dev eth0 scope global");
            let formed = shown.contains(&format!("inet6 {address}/64")) && !shown.contains("tentative");
            formed.then_some(())
        })
        .await;
    }

    /// Whether an echo request is answered, that comes from the address `from`, or from one that the kernel chooses.
    fn reaches(&self, to: &str, from: &str) -> bool {
        let program = r#"
import select, socket, sys, time
to, source = sys.argv[1:]
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
if source:
    s.bind((source, 0))
for number in range(3):
    s.sendto(bytes([128, 0, 0, 0, 7, 7, 0, number]), (to, 0))
    end = time.monotonic() + 1
    while select.select([s], [], [], max(0, end - time.monotonic()))[0]:
        if s.recv(2000).startswith(bytes([129, 0])):
            sys.exit(0)
sys.exit(1)
"#;
        let output = self.namespace.python(program).args([to, from]).output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        output.status.success()
    }

    /// Sends an ICMPv6 message without its checksum to all nodes, as only a neighbor can.
    fn says(&self, message: &[u8]) {
        let program = r#"
import socket, sys
s = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
s.sendto(bytes.fromhex(sys.argv[1]), ('ff02::1', 0, 0, socket.if_nametoindex('eth0')))
"#;
        let hex: String = message.iter().map(|byte| format!("{byte:02x}")).collect();
        let said = self.namespace.python(program).args([&hex]).output().unwrap();
        assert!(said.status.success(), "{said:?}");
    }
}

#[tokio::test]
async fn guests_with_ipv6_reach_others_and_cannot_spoof() {
    let (namespace, world) = (Namespace::new(), Namespace::new());
    namespace.ip(&format!(
        "link add world type veth peer name eth0 netns {}",
        world.0
    ));
    namespace.ip("addr add fd00:99::1/64 dev world nodad");
    namespace.ip("link set world up");
    // It knows no way to the guests.
    world.ip("addr add fd00:99::2/64 dev eth0 nodad");
    world.ip("link set eth0 up");
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = dual_stack();
    let made = daemon.make_network_as("lan", spec.clone()).await.unwrap();
    let state = made.status.unwrap();
    assert_eq!(state.ipv6_gateway, "fd00:80::1");
    let clash = v1::NetworkSpec {
        ipv4_cidr: "10.81.0.0/24".into(),
        ..spec
    };
    let clash = daemon.make_network_as("other", clash).await.unwrap_err();
    assert_refused(&clash, Code::FailedPrecondition, "NETWORK_OVERLAPS");
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
    }
    let (a, own) = Guest::with_ipv6(&namespace, &daemon, "a", &state.bridge).await;
    let (b, other) = Guest::with_ipv6(&namespace, &daemon, "b", &state.bridge).await;
    // Router advertisements work without the daemon.
    daemon.kill();
    a.has(&own).await;
    b.has(&other).await;
    assert!(a.reaches(&other, ""), "each other");
    assert!(a.reaches("fd00:80::1", ""), "the gateway");
    assert!(a.reaches("fd00:99::2", ""), "the outside by NAT");

    // Another address of the network, even when the other guest knows its MAC address.
    a.namespace.ip("addr add fd00:80::bad/64 dev eth0 nodad");
    let mac = |guest: &Guest| {
        let shown = guest.namespace.ip("-o link show dev eth0");
        let (_, rest) = shown.split_once("link/ether ").unwrap();
        rest.split(' ').next().unwrap().to_owned()
    };
    b.namespace
        .ip(&format!("neigh replace fd00:80::bad lladdr {} dev eth0", mac(&a)));
    assert!(!a.reaches(&other, "fd00:80::bad"), "an address of nobody");
    assert!(a.reaches(&other, &own), "its own");

    // An advertisement of the gateway's address, which overrides known entries (RFC 4861, 4.4), and
    // a router with another prefix.
    assert!(b.reaches("fd00:80::1", ""));
    let address = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
    let octets = mac(&a)
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect::<Vec<_>>();
    let neighbor = [
        &[136, 0, 0, 0, 0x20, 0, 0, 0][..],
        &address("fd00:80::1"),
        &[2, 1],
        &octets,
    ]
    .concat();
    let router = [
        &[134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &[3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0],
        &address("fd00:bad::"),
    ]
    .concat();
    let lie = || [&neighbor, &router].map(|message| a.says(message));
    let believed = || {
        let gateway = b.namespace.ip("-6 neigh show fd00:80::1");
        let addresses = b.namespace.ip("-6 addr show dev eth0");
        (gateway.contains(&mac(&a)), addresses.contains("fd00:bad"))
    };
    lie();
    // Later messages arrive, so these two are not only late.
    assert!(a.reaches(&other, &own));
    assert_eq!(believed(), (false, false));
    // It is the rules that keep them away.
    namespace.run("nft delete table bridge vmmd");
    let deadline = Instant::now() + PATIENCE;
    while believed() != (true, true) {
        assert!(
            Instant::now() < deadline,
            "what is sent is wrong: {:?}",
            believed()
        );
        lie();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

impl Guest {
    /// Asks for an address by DHCP for IPv6, with an identifier that does not name the NIC; the address.
    fn dhcp6(&self) -> String {
        let program = r#"
import socket, struct
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.bind(('::', 546))
s.settimeout(2)
option = lambda code, value: struct.pack('!HH', code, len(value)) + value
# Solicit, with an identifier of a UUID, one association and rapid commit.
message = bytes([1, 1, 2, 3]) + option(1, bytes([0, 4]) + bytes(16)) + option(3, bytes(12)) + option(14, b'')
to = ('ff02::1:2', 547, 0, socket.if_nametoindex('eth0'))
for _ in range(5):
    s.sendto(message, to)
    try:
        answer = s.recv(2000)
    except TimeoutError:
        continue
    assert answer[:4] == bytes([7, 1, 2, 3]), answer
    options = answer[4:]
    while options:
        code, length = struct.unpack('!HH', options[:4])
        value, options = options[4:4 + length], options[4 + length:]
        if code == 3:
            print(socket.inet_ntop(socket.AF_INET6, value[16:32]))
    break
"#;
        let output = self.namespace.python(program).output().unwrap();
        assert!(output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

#[tokio::test]
async fn guest_with_stable_privacy_addresses_has_ipv6_by_dhcp() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let made = daemon.make_network_as("lan", dual_stack()).await.unwrap();
    for vm in ["a", "b"] {
        daemon.start_in(vm, nic("lan")).await.unwrap();
    }
    let bridge = made.status.unwrap().bridge;
    let (guest, own) = Guest::with_ipv6(&namespace, &daemon, "a", &bridge).await;
    let (other, of_other) = Guest::with_ipv6(&namespace, &daemon, "b", &bridge).await;
    daemon.kill();
    other.has(&of_other).await;
    // IN6_ADDR_GEN_MODE_RANDOM: as in RFC 7217, nothing of the MAC address is in the interface's identifier.
    let guest_ip = |command: &str| guest.namespace.ip(command);
    guest_ip("link set eth0 down");
    guest
        .namespace
        .run("sysctl -qw net.ipv6.conf.eth0.addr_gen_mode=3");
    guest_ip("link set eth0 up");
    within(async || {
        guest_ip("-6 route show")
            .contains("default via fe80::")
            .then_some(())
    })
    .await;
    within(async || {
        let shown = guest_ip("-6 addr show dev eth0 scope link");
        (shown.contains("fe80::") && !shown.contains("tentative")).then_some(())
    })
    .await;
    let shown = guest_ip("-6 addr show dev eth0");
    assert!(!shown.contains("ff:fe"), "{shown}");
    assert!(
        !shown.contains("fd00:80::"),
        "an address that the NIC may not use: {shown}"
    );
    assert_eq!(guest.dhcp6(), own);
    guest_ip(&format!("addr add {own}/128 dev eth0 nodad"));
    assert!(guest.reaches("fd00:80::1", &own), "the gateway");
    assert!(guest.reaches(&of_other, &own), "another guest");
}

#[tokio::test]
async fn network_without_ipv4_has_addresses_names_and_firewalls() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = v1::NetworkSpec {
        ipv6_cidr: "fd00:80::/64".into(),
        ..v1::NetworkSpec::default()
    };
    let made = daemon.make_network_as("lan", spec).await.unwrap();
    let state = made.status.unwrap();
    assert_eq!(
        (state.gateway.as_str(), state.ipv6_gateway.as_str()),
        ("", "fd00:80::1")
    );
    assert_eq!(namespace.ip("-4 addr show").trim(), "");
    let with_ipv4 = NicSpec {
        address: "10.80.0.9".into(),
        ..nic("lan")
    };
    let refused = daemon.start_in("x", with_ipv4).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "ADDRESS_NOT_IN_NETWORK");
    assert_says(&refused, "no IPv4 addresses");
    // The guest "b" takes connections of "a" alone.
    let rule = v1::NicRule {
        addresses: vec!["192.0.2.1".into(), "fd00:80::5054:ff:fe00:1/128".into()],
        ..v1::NicRule::default()
    };
    let firewall = v1::NicFirewall {
        ingress: Some(v1::NicRules { allow: vec![rule] }),
        egress: None,
    };
    let tracks = tracks_bridges(&namespace);
    for (number, vm) in (1..).zip(["a", "b", "c"]) {
        let nic = NicSpec {
            mac: format!("52:54:00:00:00:0{number}"),
            firewall: (vm == "b" && tracks).then(|| firewall.clone()),
            ..nic("lan")
        };
        let addresses = daemon.start_in(vm, nic).await.unwrap();
        assert_eq!(addresses, [format!("fd00:80::5054:ff:fe00:{number}")]);
    }
    let mut guests = Vec::new();
    for vm in ["a", "b", "c"] {
        guests.push(Guest::with_ipv6(&namespace, &daemon, vm, &state.bridge).await);
    }
    daemon.kill();
    let [(a, own), (b, of_b), (c, of_c)] = guests.as_slice() else {
        panic!("three guests");
    };
    for (guest, address) in &guests {
        guest.has(address).await;
    }
    assert_eq!(a.dhcp6(), *own);
    assert_eq!(a.resolve("fd00:80::1", "b.lan.internal"), format!("0 {of_b}"));
    assert!(
        a.resolve_by_tcp("fd00:80::1", 53, "b.lan.internal")
            .starts_with("0 ")
    );
    assert_eq!(a.resolve_by_tcp("fd00:80::1", 80, "b.lan.internal"), "refused");
    assert!(a.reaches(of_b, ""), "a rule names its address");
    assert_eq!(c.reaches(of_b, ""), !tracks, "no rule is about it");
    assert!(b.reaches(of_c, ""), "its own connection");
}

#[tokio::test]
async fn an_isolated_network_with_ipv6_is_no_way_out() {
    let namespace = Namespace::new();
    let mut daemon = Daemon::in_network(&namespace.0).await;
    let spec = v1::NetworkSpec {
        mode: NetworkMode::Isolated.into(),
        ..dual_stack()
    };
    let made = daemon.make_network_as("lan", spec).await.unwrap();
    daemon.start_in("a", nic("lan")).await.unwrap();
    let bridge = made.status.unwrap().bridge;
    let (guest, own) = Guest::with_ipv6(&namespace, &daemon, "a", &bridge).await;
    guest.has(&own).await;
    let routes = guest.namespace.ip("-6 route show");
    assert!(!routes.contains("default"), "{routes}");
    assert_eq!(
        namespace.run("cat /proc/sys/net/ipv6/conf/all/forwarding").trim(),
        "0"
    );
}
