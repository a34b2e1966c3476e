//! Networks that the node creates: addresses, private names, access to the outside, and repairs.

use serde_json::{Value, json};
use vmmd_tests::Case;
use vmmd_tests::node::{Kernel, Packages};
use vmmd_tests::vm::{Console, Vm, VmSpec, base64};

/// A network of the node, and a namespace that stands for the world; both are removed with the case.
struct Place<'case> {
    case: &'case Case,
}

impl<'case> Place<'case> {
    fn new(case: &'case Case) -> Self {
        let node = case.node();
        // A link to the world: the node is 198.51.100.1 and 2001:db8::1, the world 198.51.100.2 and 2001:db8::2, which knows no other way
        // back (RFC 5737, RFC 3849).
        node.sh(
            "ip netns add world && ip link add world0 type veth peer name eth0 netns world && \
             ip addr add 198.51.100.1/24 dev world0 && ip link set world0 up && \
             ip addr add 2001:db8::1/64 dev world0 nodad && ip -n world addr add 2001:db8::2/64 dev eth0 nodad && \
             ip -n world addr add 198.51.100.2/24 dev eth0 && ip -n world link set eth0 up && ip -n world link set lo up",
        );
        case.at_end("ip netns pids world | xargs -r kill; ip netns del world; ip link del world0");
        Self { case }
    }

    fn network(&self, name: &str, more: &str) -> Value {
        self.case.at_end(format!("vmmctl network rm {name}"));
        let node = self.case.node();
        node.sh(&format!("vmmctl network create {name} {more}"));
        self.describe(name)
    }

    /// Serves names at 198.51.100.2 in the world: those below `outside.example` have the address 203.0.113.7.
    fn name_server(&self) {
        self.case.node().sh(
            "ip netns exec world dnsmasq --conf-file=/dev/null --no-resolv --no-hosts --user=root --bind-interfaces \
             --listen-address=198.51.100.2 --address=/outside.example/203.0.113.7 --pid-file",
        );
    }

    fn uid(&self, name: &str) -> String {
        let uid = self.describe(name)["metadata"]["uid"].as_str().map(str::to_owned);
        uid.expect("a UUID")
    }

    fn describe(&self, name: &str) -> Value {
        let all = self.case.node().sh("vmmctl network ls --json");
        let all: Vec<Value> = serde_json::from_str(&all).expect("JSON");
        let is = |network: &Value| network["metadata"]["name"] == name;
        all.into_iter().find(is).expect("the network")
    }
}

fn with_nic(case: &Case, nic: &Value) -> VmSpec {
    let spec = case.net_guest(Kernel::Cloud612);
    spec.set("/nics", json!([nic]))
}

fn guest<'case>(case: &'case Case, suffix: &str, nic: &Value) -> (Vm<'case>, Console, String) {
    let (vm, mut console) = Vm::boot(case, suffix, &with_nic(case, nic));
    console.run("ip link set eth0 up && udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2");
    let address = vm.field("/status/nics/0/addresses/0");
    let shown = console.run("ip addr show dev eth0");
    assert!(shown.contains(&format!("inet {address}/")), "{address}: {shown}");
    (vm, console, address)
}

/// Returns the IPv6 address of a VM, after the guest has configured it from the router
/// advertisement.
fn address6(vm: &Vm<'_>, console: &mut Console) -> String {
    let address = vm.field("/status/nics/0/addresses/1");
    let made = format!("ip -6 addr show dev eth0 | grep -v tentative | grep -q 'inet6 {address}/64'");
    console.run(&format!("until {made}; do usleep 200000; done"));
    address
}

/// Whether an answer comes to one of `tries` pings. `to` is an address, with options of ping(8) in front of it.
fn answers(console: &mut Console, to: &str, tries: u32) -> bool {
    let command = format!(
        "for try in $(seq {tries}); do ping -c 1 -W 4 {to} > /dev/null && echo reached && break; done; true"
    );
    console.run(&command).trim() == "reached"
}

/// Checks that `to` answers. A failure includes the network state of the guest and the node.
#[track_caller]
fn reached(case: &Case, console: &mut Console, to: &str) {
    if answers(console, to, 5) {
        return;
    }
    let known =
        "ip -s link show dev eth0; ip addr show dev eth0; ip neigh; busybox route -n; cat /proc/interrupts";
    let guest = console.try_run(known).unwrap_or_default();
    let known = "bridge fdb; bridge -d link; ip -s link; ip neigh; nft list ruleset";
    let node = case.node().try_sh(known).unwrap_or_default();
    panic!("{to} is not reached.\nThe guest:\n{guest}\nThe node:\n{node}");
}

#[track_caller]
fn lost(console: &mut Console, to: &str) {
    assert!(!answers(console, to, 1), "{to} is reached");
}

#[test]
fn vms_have_addresses_nat_and_published_ports() {
    let case = Case::new("network");
    let node = case.node();
    let place = Place::new(&case);
    let lan = place.network("lan", "--cidr 10.80.0.0/24 --ipv6 fd00:80::/64");
    let apart = place.network("apart", "--cidr 10.81.0.0/24 --ipv6 fd00:81::/64");
    let bridge = lan["status"]["bridge"].as_str().expect("a bridge").to_owned();
    assert_ne!(lan["status"]["bridge"], apart["status"]["bridge"]);

    let published = json!([{"protocol": "PORT_PROTOCOL_TCP", "nodePort": 18080, "guestPort": 80}]);
    let (web, mut web_console, web_address) = guest(
        &case,
        "-web",
        &json!({"name": "eth0", "network": "lan", "publishedPorts": published}),
    );
    let (db, mut db_console, db_address) = guest(&case, "-db", &json!({"name": "eth0", "network": "lan"}));
    let (other, mut other_console, other_address) =
        guest(&case, "-other", &json!({"name": "eth0", "network": "apart"}));
    assert_ne!(web_address, db_address);
    let web_address6 = address6(&web, &mut web_console);
    assert_ne!(web_address6, address6(&db, &mut db_console));
    let other_address6 = address6(&other, &mut other_console);

    // In one network they reach each other, in two they do not.
    for address in [&web_address, &web_address6] {
        reached(&case, &mut db_console, address);
        lost(&mut other_console, address);
    }
    for address in [&other_address, &other_address6] {
        lost(&mut web_console, address);
    }
    // The gateway of a network of others.
    lost(&mut other_console, "10.80.0.1");

    // The outside is reached, with the node's address; guests are not reached from there.
    for outside in ["198.51.100.2", "2001:db8::2"] {
        reached(&case, &mut web_console, outside);
        reached(&case, &mut other_console, outside);
    }
    node.sh("ip -n world route add 10.80.0.0/15 via 198.51.100.1 && ip -n world route add fd00::/16 via 2001:db8::1");
    for address in [&web_address, &web_address6] {
        let from_world = format!("ip netns exec world ping -c 2 -W 3 {address}");
        assert!(
            node.try_sh(&from_world).is_err(),
            "{address} is reached from outside"
        );
    }
    node.sh("ip -n world route del 10.80.0.0/15 && ip -n world route del fd00::/16");

    // A published port is reached from outside and from the node.
    web_console.run("(while :; do echo published | nc -l -p 80; done) > /dev/null 2>&1 & true");
    let mut fetched = |command: &str| {
        web_console.run("until busybox netstat -lnt | grep -q :80; do usleep 100000; done");
        let line = node.sh(command);
        assert_eq!(line.trim(), "published", "{command}");
    };
    let fetch =
        |address: &str| format!("timeout 20 bash -c 'exec 3<>/dev/tcp/{address}/18080; head -n 1 <&3'");
    for address in ["198.51.100.1", "2001:db8::1"] {
        fetched(&format!("ip netns exec world {}", fetch(address)));
    }
    fetched(&fetch("198.51.100.1"));

    // The daemon repairs rules and bridges that others delete, and keeps the rules of others.
    node.sh("nft flush ruleset && nft add table inet theirs");
    node.sh(&format!("ip link del {bridge}"));
    node.sh("systemctl kill --kill-whom=main -s KILL vmmd.service");
    node.sh("timeout 60 sh -c 'until nft list ruleset | grep -q masquerade; do sleep 0.2; done'");
    let rules = node.sh("nft list ruleset");
    assert!(rules.contains("table inet theirs"), "{rules}");
    for address in ["10.80.0.1/24", "fd00:80::1/64"] {
        let there = format!("ip addr show dev {bridge} | grep -q {address}");
        node.sh(&format!("timeout 60 sh -c 'until {there}; do sleep 0.2; done'"));
    }
    node.sh("nft delete table inet theirs");
    for console in [&mut web_console, &mut other_console] {
        console.attached_again();
    }
    // By NAT again.
    reached(&case, &mut web_console, "198.51.100.2");
    reached(&case, &mut other_console, "2001:db8::2");
    let addresses = web.field("/status/nics/0/addresses/0");
    assert_eq!(addresses, web_address);
}

/// The helper of a network works without the daemon. Packets in which a guest claims other
/// addresses are dropped.
#[test]
fn dhcp_and_dns_need_no_daemon_and_spoofing_is_dropped() {
    let case = Case::new("network");
    let node = case.node();
    let place = Place::new(&case);
    place.name_server();
    let lan = place.network(
        "lan",
        "--cidr 10.80.0.0/24 --ipv6 fd00:80::/64 --dns 198.51.100.2",
    );
    let bridge = lan["status"]["bridge"].as_str().expect("a bridge").to_owned();
    let nic = json!({"name": "eth0", "network": "lan"});
    let (liar, mut liar_console, liar_address) = guest(&case, "-liar", &nic);
    let (honest, mut console, address) = guest(&case, "-honest", &nic);
    reached(&case, &mut liar_console, &address);

    // Without the daemon: names of VMs, names of the outside, and the renewal of an address.
    // Consoles go through the daemon. So the guest starts its commands when a client connects to
    // it, and sends the results to the next client.
    let ask = format!(
        "busybox nslookup -type=a {0}.lan.internal 10.80.0.1; busybox nslookup -type=aaaa {0}.lan.internal 10.80.0.1; \
         busybox nslookup -type=a www.outside.example 10.80.0.1; \
         udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2",
        liar.name()
    );
    console.run(&format!(
        "(nc -l -p 99; {{ {ask}; }} > /tmp/alone 2>&1; nc -l -p 98 < /tmp/alone) > /dev/null 2>&1 & \
                 until busybox netstat -lnt | grep -q :99; do usleep 100000; done"
    ));
    let served = node.sh(&format!(
        "systemctl stop vmmd.service; trap 'systemctl start vmmd.service' EXIT; \
         timeout 10 bash -c 'exec 3<>/dev/tcp/{address}/99' && \
         timeout 60 bash -c 'until (exec 3<>/dev/tcp/{address}/98 && cat <&3) 2>/dev/null; do sleep 0.2; done'"
    ));
    let liar_address6 = liar.field("/status/nics/0/addresses/1");
    for wanted in [
        &liar_address,
        &liar_address6,
        "203.0.113.7",
        &format!("lease of {address} obtained"),
    ] {
        assert!(served.contains(wanted), "{wanted}: {served}");
    }

    for console in [&mut liar_console, &mut console] {
        console.attached_again();
    }
    let gateway = node.sh(&format!("cat /sys/class/net/{bridge}/address"));
    lies_about_addresses(
        &case,
        &mut liar_console,
        &mut console,
        &liar_address,
        &address,
        &gateway,
    );
    lies_about_neighbors(
        &case,
        &mut liar_console,
        &mut console,
        &liar_address6,
        gateway.trim(),
    );

    // A guest's DHCP server reaches no other guest, even while the network's server is silent.
    liar_console.run(
        "printf 'start 10.80.0.100\\nend 10.80.0.110\\ninterface eth0\\nlease_file /tmp/leases\\npidfile /tmp/pid\\n' \
         > /tmp/udhcpd.conf && touch /tmp/leases && busybox udhcpd -S /tmp/udhcpd.conf && sleep 1 && \
         kill -0 $(cat /tmp/pid)");
    let helper = format!("pkill -f '[v]mmd-netd.*{}'", place.uid("lan"));
    node.sh(&helper.replace("pkill", "pkill -STOP"));
    let ask = "udhcpc -i eth0 -s /bin/true -n -q -t 3 -T 2 > /dev/null 2>&1 && echo served || echo nobody";
    let heard = console.run(ask);
    node.sh(&helper.replace("pkill", "pkill -CONT"));
    assert_eq!(heard.trim(), "nobody");
    let heard = console.run(ask);
    assert_eq!(heard.trim(), "served");

    drop((liar, honest));
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    /// Script for a guest. It renews its lease and asks for a name of its network and a name of the
    /// outside, in a loop. Each answer, and each missing answer, is a line of `/tmp/said`; each round
    /// is a line of `/tmp/rounds`.
    const CLIENT: &str = r#"
printf '#!/bin/sh\necho "$1 $ip" >> /tmp/said\n' > /tmp/told
chmod +x /tmp/told
: > /tmp/rounds
udhcpc -f -i eth0 -s /tmp/told -t 20 -T 2 > /tmp/udhcpc 2>&1 &
client=$!
until grep -q bound /tmp/said; do usleep 100000; done
: > /tmp/said
named() {
    busybox nslookup -type=a $1 10.80.0.1 > /tmp/named 2>&1
    if grep -q "Address: $2\$" /tmp/named; then echo "$1 $2"; else tr '\n' ' ' < /tmp/named; echo; fi >> /tmp/said
}
renewed() { [ $(wc -l < /tmp/said) -gt $had ]; }
while :; do
    had=$(wc -l < /tmp/said)
    # It asks for its address before half of its time is over.
    kill -USR1 $client
    for try in $(seq 100); do renewed && break; usleep 50000; done
    renewed || echo "no renewal" >> /tmp/said
    named NAME.lan.internal ADDRESS
    named www.outside.example 203.0.113.7
    echo >> /tmp/rounds
done
"#;

    /// Waits until the guest that runs [`CLIENT`] has made some rounds more. All rounds so far had nothing but answers, and were as many.
    fn rounds(console: &mut Console, vm: &Vm<'_>, address: &str) -> u32 {
        let more = "had=$(wc -l < /tmp/rounds); until [ $(wc -l < /tmp/rounds) -ge $((had + 3)) ]; do usleep 200000; done; \
                    sort /tmp/said | uniq > /tmp/all; cat /tmp/all; wc -l < /tmp/rounds";
        let said = console.run(more);
        let mut lines: Vec<&str> = said.lines().collect();
        let count = lines.pop().and_then(|count| count.trim().parse().ok());
        let mut wanted = [
            format!("renew {address}"),
            format!("{}.lan.internal {address}", vm.name()),
            "www.outside.example 203.0.113.7".to_owned(),
        ];
        wanted.sort();
        assert_eq!(lines, wanted);
        count.unwrap_or_else(|| panic!("no count of rounds: {said}"))
    }

    /// A guest renews its lease and asks for names all the time. The helper is exchanged after an upgrade, since its program file is another one. A
    /// daemon that only starts again keeps it.
    #[test]
    fn leases_are_renewed_and_names_are_told_while_vmmd_is_upgraded() {
        let case = Case::new("network");
        let node = case.node();
        let packages = Packages::new(node).expect("a package was built");
        let place = Place::new(&case);
        place.name_server();
        place.network("lan", "--cidr 10.80.0.0/24 --dns 198.51.100.2");
        let (vm, mut console, address) = guest(&case, "", &json!({"name": "eth0", "network": "lan"}));
        let client = CLIENT.replace("NAME", vm.name()).replace("ADDRESS", &address);
        // In pieces: the shell of busybox truncates input lines at 1,023 characters.
        for piece in base64(client.as_bytes()).as_bytes().chunks(512) {
            let piece = String::from_utf8_lossy(piece);
            console.run(&format!("printf %s {piece} >> /tmp/client.base64"));
        }
        console.run(
            "base64 -d /tmp/client.base64 > /tmp/client && { sh /tmp/client > /tmp/client.log 2>&1 & } && until [ -e /tmp/rounds ]; do usleep 100000; done",
        );
        let uid = place.uid("lan");
        let helper = || {
            let pid = node.sh(&format!("pgrep -f '[v]mmd-netd.*{uid}'"));
            pid.trim().to_owned()
        };

        let (before, first) = (rounds(&mut console, &vm, &address), helper());
        packages.upgrade().expect("upgrade");
        console.attached_again();
        let after = rounds(&mut console, &vm, &address);
        assert!(
            after > before + 3,
            "the guest asked while the package was upgraded"
        );
        // Its program file is another one.
        node.sh(&format!(
            "timeout 60 sh -c 'while kill -0 {first} 2>/dev/null; do sleep 0.2; done'"
        ));
        rounds(&mut console, &vm, &address);
        let second = helper();
        assert_ne!(second, first);

        node.restart_daemon().expect("restart");
        console.attached_again();
        rounds(&mut console, &vm, &address);
        assert_eq!(helper(), second);
        assert_eq!(vm.field("/status/nics/0/addresses/0"), address);
    }
}

fn mac(console: &mut Console) -> String {
    let mac = console.run("cat /sys/class/net/eth0/address");
    mac.trim().to_owned()
}

/// `liar` says that it has other addresses; `honest` does not hear it.
fn lies_about_addresses(
    case: &Case,
    liar: &mut Console,
    honest: &mut Console,
    liar_address: &str,
    honest_address: &str,
    gateway: &str,
) {
    let (liar_mac, honest_mac) = (mac(liar), mac(honest));
    // Another IP address. Both know where the other one is, so that no ARP is needed.
    liar.run(&format!(
        "busybox arp -s {honest_address} {honest_mac} && ip addr add 10.80.0.200/24 dev eth0"
    ));
    honest.run(&format!("busybox arp -s 10.80.0.200 {liar_mac}"));
    lost(liar, &format!("-I 10.80.0.200 {honest_address}"));
    reached(case, liar, &format!("-I {liar_address} {honest_address}"));
    liar.run("ip addr del 10.80.0.200/24 dev eth0");

    // The gateway's IP address, by ARP.
    reached(case, honest, "10.80.0.1");
    liar.run(
        "ip addr add 10.80.0.1/32 dev eth0 && busybox arping -U -c 3 -I eth0 -s 10.80.0.1 10.80.0.1; \
         ip addr del 10.80.0.1/32 dev eth0",
    );
    let known = honest.run("ip neigh show 10.80.0.1");
    assert!(
        known.contains(gateway.trim()),
        "{gateway} is the gateway: {known}"
    );

    // Another MAC address, at which the other guest would answer.
    liar.run("ip link set eth0 address 02:00:00:00:00:99");
    honest.run(&format!("busybox arp -s {liar_address} 02:00:00:00:00:99"));
    lost(liar, honest_address);
    liar.run(&format!("ip link set eth0 address {liar_mac}"));
    honest.run(&format!("busybox arp -d {liar_address}"));
    reached(case, liar, honest_address);

    // IPv6 addresses that are not of the network.
    for (console, address) in [(&mut *liar, "fd00::1"), (&mut *honest, "fd00::2")] {
        console.run(
            &format!(
                "ip addr add {address}/64 dev eth0 && while ip -6 addr show dev eth0 | grep -q tentative; do usleep 100000; done"
            ));
    }
    let six = liar.run("ping6 -c 2 -W 3 fd00::2 > /dev/null && echo reached || echo lost");
    assert_eq!(six.trim(), "lost");
}

/// `liar` says that it is the gateway, has other MAC addresses and is a router, with messages of IPv6 (RFC 4861). `honest` hears nothing but the
/// truth, which comes last.
fn lies_about_neighbors(case: &Case, liar: &mut Console, honest: &mut Console, own: &str, gateway: &str) {
    let liar_mac = mac(liar);
    reached(case, honest, "fd00:80::1");
    honest.run(
        &format!(
            "{{ netcheck listen eth0 {own} > /tmp/heard & }} && until grep -q listening /tmp/heard; do usleep 100000; done"
        ));
    liar.run(&format!("netcheck lie eth0 {own} fd00:80::1"));
    let truth = format!("{liar_mac} 136 {own}");
    let heard = honest.run(&format!(
        "until grep -q '{truth}' /tmp/heard; do usleep 100000; done; cat /tmp/heard"
    ));
    for line in heard.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let lie = match words[..] {
            ["02:00:00:00:00:99", ..] => true,
            [from, ..] if from != liar_mac => false,
            // A guest asks for other addresses and for routers. Only the gateway asks for the
            // guest's own address.
            [_, "133", _] => false,
            [_, "135", target] => target == own,
            [_, "136", target] => target == "fd00:80::1",
            _ => true,
        };
        assert!(!lie, "{line} is heard: {heard}");
    }
    let known = honest.run("ip neigh show fd00:80::1; ip -6 route; ip -6 addr show dev eth0");
    assert!(known.contains(gateway), "{gateway} is the gateway: {known}");
    for lie in ["2001:db8:bad", &liar_mac] {
        assert!(!known.contains(lie), "{lie}: {known}");
    }
}

/// Traffic that a guest may receive and send: within its network, and to the outside.
#[test]
fn nic_rules_hold_both_ways_and_change_at_run_time() {
    let case = Case::new("network");
    let place = Place::new(&case);
    place.network("lan", "--cidr 10.80.0.0/24 --ipv6 fd00:80::/64");
    let nic = |firewall: &Value| json!({"name": "eth0", "network": "lan", "firewall": firewall});
    let closed = nic(&json!({
        "ingress": {"allow": [{"protocol": "TCP", "ports": [{"first": 80}]}]},
        "egress": {"allow": [{"addresses": ["198.51.100.2"], "protocol": "ICMP"}]},
    }));
    // It gets its address by DHCP, which no rule is about.
    let (web, mut web_console, web_address) = guest(&case, "-web", &closed);
    let (db, mut db_console, db_address) = guest(&case, "-db", &json!({"name": "eth0", "network": "lan"}));
    // Nor is one about router advertisements.
    let web_address6 = address6(&web, &mut web_console);
    let db_address6 = address6(&db, &mut db_console);
    for port in [80, 81] {
        web_console.run(&format!(
            "(while :; do echo served-{port} | nc -l -p {port}; done) > /dev/null 2>&1 & true"
        ));
        web_console.run(&format!(
            "until busybox netstat -lnt | grep -q :{port}; do usleep 100000; done"
        ));
    }
    let fetch = |console: &mut Console, address: &str, port: u16| {
        let command = format!("nc -w 5 {address} {port} < /dev/null 2> /dev/null || echo refused");
        console.run(&command).trim().to_owned()
    };
    // A rule without addresses is about IPv6 too.
    for address in [&web_address, &web_address6] {
        assert_eq!(fetch(&mut db_console, address, 80), "served-80", "{address}");
        assert_eq!(fetch(&mut db_console, address, 81), "refused", "{address}");
        lost(&mut db_console, address);
    }
    // By NAT.
    reached(&case, &mut web_console, "198.51.100.2");
    for address in [
        "2001:db8::2",
        &db_address,
        &db_address6,
        "10.80.0.1",
        "fd00:80::1",
    ] {
        lost(&mut web_console, address);
    }

    let opened = nic(&json!({
        "ingress": {"allow": [{"addresses": [db_address]}]},
        "egress": {"allow": [{"addresses": ["10.80.0.0/24"]}]},
    }));
    web.apply(&with_nic(&case, &opened));
    let left = web.field("/status/pendingChanges");
    assert!(matches!(left.as_str(), "" | "[]"), "{left}");
    assert_eq!(fetch(&mut db_console, &web_address, 81), "served-81");
    reached(&case, &mut db_console, &web_address);
    reached(&case, &mut web_console, &db_address);
    lost(&mut web_console, "198.51.100.2");
    // One with addresses is about IPv4 alone.
    lost(&mut db_console, &web_address6);
    lost(&mut web_console, &db_address6);
    let opened = nic(&json!({"ingress": {"allow": [{}]}, "egress": {"allow": [{"protocol": "ICMP"}]}}));
    web.apply(&with_nic(&case, &opened));
    reached(&case, &mut db_console, &web_address6);
    reached(&case, &mut web_console, &db_address6);
    reached(&case, &mut web_console, "2001:db8::2");
}
