//! Packet filter rules of the networks, as the JSON of libnftables (libnftables-json(5)).
//! [`ruleset`](super::ruleset) describes how they get into the kernel.
//!
//! Each network or NIC has its own chain, named by its interface. The chains listed here jump to
//! these chains.
//!
//! - *forward*: traffic from and to a network. A network with NAT receives packets of its own
//!   connections, and packets to published ports. A routed network receives no new connections from
//!   networks that are not routed.
//! - *input*: traffic from guests to the node itself: DHCP, and DNS queries and pings of the
//!   gateway.
//! - *source*, *published*, *local*: address translation.
//! - *egress*, *ingress* (of the bridge): the connections that a guest with a firewall may open,
//!   and that others may open to it. All traffic of a guest passes these chains, including traffic
//!   within its network.
//! - *strangers* (of the bridge): other ports of a network's bridge cannot send to its guests.
//! - *ports* (of the bridge): the frames that a guest may send: its own MAC, IPv4 and IPv6
//!   addresses, ARP and neighbor discovery for these, and no messages of a router or a DHCP server.
//!   A port that is no NIC's cannot send to the node.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use serde_json::{Value, json};
use vmmd_spec::{
    firewall::Firewall,
    network::{Ipv4Net, Ipv6Net, NetworkMode, link_local},
    nic::{Mac, Protocol, PublishedPort},
};

use super::ruleset::{Chains, Ruleset, TABLE, chain};

/// A network as the packet filter sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its interface.
    pub bridge: String,
    /// The MAC address of that.
    pub mac: Mac,
    /// Who reaches whom.
    pub mode: NetworkMode,
    /// Its addresses.
    pub net: Ipv4Net,
    /// Its IPv6 addresses.
    pub net6: Option<Ipv6Net>,
    /// The node's own.
    pub gateway: Ipv4Addr,
    /// The NICs in it.
    pub ports: Vec<Port>,
}

/// A NIC in a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its interface on the node.
    pub tap: String,
    /// Its addresses.
    pub mac: Mac,
    pub address: Ipv4Addr,
    pub address6: Option<Ipv6Addr>,
    /// Ports of the node that lead to it.
    pub published: Vec<PublishedPort>,
    /// Which connections its guest may have.
    pub firewall: Firewall,
}

/// The ruleset for these networks. Without networks it takes the tables away.
pub fn ruleset(networks: &[Network]) -> Ruleset {
    let mut objects = Chains::default();
    if !networks.is_empty() {
        forward(networks, &mut objects);
        input(networks, &mut objects);
        translation(networks, &mut objects);
        spoofing(networks, &mut objects);
        super::connections::connections(networks, &mut objects);
    }
    Ruleset::new(objects)
}

fn forward(networks: &[Network], objects: &mut Chains) {
    let (mut from, mut to) = (Vec::new(), Vec::new());
    let not_routed = networks
        .iter()
        .filter(|network| network.mode != NetworkMode::Routed);
    let not_routed: Vec<_> = not_routed.map(|network| network.bridge.as_str()).collect();
    for network in networks {
        let bridge = network.bridge.as_str();
        if network.mode == NetworkMode::Isolated {
            let chain = format!("from-{bridge}");
            objects.push(&self::chain("inet", &chain));
            let elsewhere = unequal(&meta("oifname"), &json!(bridge));
            objects.push(&rule("inet", &chain, &json!([elsewhere, drop()])));
            from.push((bridge, chain));
        }
        let chain = format!("to-{bridge}");
        objects.push(&self::chain("inet", &chain));
        let mut rule = |expressions: Value| objects.push(&self::rule("inet", &chain, &expressions));
        rule(json!([iifname(bridge), accept()]));
        match network.mode {
            NetworkMode::Nat => {
                rule(json!([state(&["established", "related"]), accept()]));
                rule(json!([translated(), accept()]));
                rule(json!([drop()]));
            }
            NetworkMode::Isolated => rule(json!([drop()])),
            NetworkMode::Routed if not_routed.is_empty() => {}
            NetworkMode::Routed => {
                rule(json!([state(&["established", "related"]), accept()]));
                rule(json!([
                    equal(&meta("iifname"), &json!({"set": not_routed})),
                    drop()
                ]));
            }
        }
        to.push((bridge, chain));
    }
    objects.push(&base("inet", "forward", "filter", "forward", 0));
    // These jumps come first: no later rule may accept packets from an isolated network.
    jumps(objects, ("inet", "forward"), "iifname", &from);
    jumps(objects, ("inet", "forward"), "oifname", &to);
}

fn input(networks: &[Network], objects: &mut Chains) {
    let mut from = Vec::new();
    for network in networks {
        let chain = format!("input-{}", network.bridge);
        objects.push(&self::chain("inet", &chain));
        let mut rule = |expressions: Value| objects.push(&self::rule("inet", &chain, &expressions));
        rule(json!([state(&["established", "related"]), accept()]));
        rule(json!([equal(&payload("udp", "dport"), &json!(67)), accept()]));
        let gateway = equal(&payload("ip", "daddr"), &json!(network.gateway.to_string()));
        let query = equal(&payload("udp", "dport"), &json!(53));
        rule(json!([gateway, query, accept()]));
        let ping = equal(&payload("icmp", "type"), &json!("echo-request"));
        rule(json!([gateway, ping, accept()]));
        if let Some(net6) = network.net6 {
            let gateway = equal(&payload("ip6", "daddr"), &json!(net6.gateway().to_string()));
            let ping = equal(&payload("icmpv6", "type"), &json!("echo-request"));
            rule(json!([gateway, ping, accept()]));
            // Messages between hosts of a link, and solicitations of a router (RFC 4861), but no
            // messages of a router.
            let said = json!({"set": ["nd-router-solicit", "nd-neighbor-solicit", "nd-neighbor-advert", "mld2-listener-report"]});
            rule(json!([equal(&payload("icmpv6", "type"), &said), accept()]));
        }
        rule(json!([drop()]));
        from.push((network.bridge.as_str(), chain));
    }
    objects.push(&base("inet", "input", "filter", "input", 0));
    jumps(objects, ("inet", "input"), "iifname", &from);
}

fn translation(networks: &[Network], objects: &mut Chains) {
    objects.push(&base("inet", "source", "nat", "postrouting", 100));
    objects.push(&base("inet", "published", "nat", "prerouting", -100));
    // The node's own connections to its published ports.
    objects.push(&base("inet", "local", "nat", "output", -100));
    let gateways: Vec<_> = networks.iter().map(|network| network.gateway).collect();
    for network in networks.iter().filter(|network| network.mode == NetworkMode::Nat) {
        let net = json!({"prefix": {"addr": network.net.first().to_string(), "len": network.net.prefix()}});
        let from = equal(&payload("ip", "saddr"), &net);
        let other = unequal(&meta("oifname"), &json!(network.bridge));
        let masquerade = json!({"masquerade": null});
        objects.push(&rule("inet", "source", &json!([from, other, masquerade])));
        // A guest that uses a published port of its own network: the answer has to come back by the node.
        let within = equal(&payload("ip", "daddr"), &net);
        objects.push(&rule(
            "inet",
            "source",
            &json!([from, within, translated(), masquerade]),
        ));
        if let Some(net6) = network.net6 {
            let net = json!({"prefix": {"addr": net6.first().to_string(), "len": Ipv6Net::PREFIX}});
            let from = equal(&payload("ip6", "saddr"), &net);
            let within = equal(&payload("ip6", "daddr"), &net);
            objects.push(&rule("inet", "source", &json!([from, other, masquerade])));
            objects.push(&rule(
                "inet",
                "source",
                &json!([from, within, translated(), masquerade]),
            ));
        }
        for port in &network.ports {
            let addresses = [Some(port.address.into()), port.address6.map(IpAddr::from)];
            for address in addresses.into_iter().flatten() {
                for published in &port.published {
                    for chain in ["published", "local"] {
                        objects.push(&rule("inet", chain, &publish(address, published, &gateways)));
                    }
                }
            }
        }
    }
}

/// Redirects packets to the node's `port` to `address`. The loopback interface stays with the node,
/// as do the ports on which the gateways of all networks answer DNS and DHCP.
fn publish(address: IpAddr, port: &PublishedPort, gateways: &[Ipv4Addr]) -> Value {
    let protocol = match port.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    let local = json!({"fib": {"result": "type", "flags": ["daddr"]}});
    let (family, dnat, loopback) = match address {
        IpAddr::V4(_) => ("ipv4", "ip", json!({"prefix": {"addr": "127.0.0.0", "len": 8}})),
        IpAddr::V6(_) => ("ipv6", "ip6", json!("::1")),
    };
    let served = port.protocol == Protocol::Udp && matches!(port.node_port, 53 | 67);
    let gateways = gateways.iter().filter(|_| served && address.is_ipv4());
    let kept: Vec<_> = std::iter::once(loopback)
        .chain(gateways.map(|gateway| json!(gateway.to_string())))
        .collect();
    json!([
        equal(&json!({"meta": {"key": "nfproto"}}), &json!(family)),
        equal(&local, &json!("local")),
        unequal(&payload(dnat, "daddr"), &json!({"set": kept})),
        equal(&payload(protocol, "dport"), &json!(port.node_port)),
        {"dnat": {"family": dnat, "addr": address.to_string(), "port": port.guest_port}},
    ])
}

fn spoofing(networks: &[Network], objects: &mut Chains) {
    let ports = networks.iter().flat_map(|network| &network.ports);
    // A key is in a map once.
    let ports: BTreeMap<_, _> = ports.map(|port| (port.tap.as_str(), port)).collect();
    let mut from = Vec::new();
    for (tap, port) in ports {
        let chain = format!("port-{tap}");
        objects.push(&self::chain("bridge", &chain));
        port_rules(port, |expressions| {
            objects.push(&rule("bridge", &chain, &expressions));
        });
        from.push((tap, chain));
    }
    objects.push(&base("bridge", "ports", "filter", "prerouting", -300));
    jumps(objects, ("bridge", "ports"), "iifname", &from);
    // The chain of a NIC ends with a verdict, so these frames come from other ports. Their
    // destination shows that they arrive on a network's bridge: here the kernel knows the bridge's
    // name only with its module nft_meta_bridge.
    let bridges: Vec<_> = networks.iter().map(|network| network.mac.to_string()).collect();
    let to_the_node = equal(&payload("ether", "daddr"), &json!({"set": bridges}));
    objects.push(&rule("bridge", "ports", &json!([to_the_node, drop()])));
    let taps: Vec<_> = from.iter().map(|(tap, _)| tap).collect();
    if !taps.is_empty() {
        let taps = json!({"set": taps});
        objects.push(&base("bridge", "strangers", "filter", "forward", -300));
        for (key, verdict) in [("iifname", accept()), ("oifname", drop())] {
            let expressions = json!([equal(&meta(key), &taps), verdict]);
            objects.push(&rule("bridge", "strangers", &expressions));
        }
    }
}

/// The EtherType field of the frame, which is that of the tag in a tagged frame. The protocol match
/// that nft itself adds differs between rules: some use the type behind the tag, others that of the
/// tag. A guest treats a received frame with the tag of VLAN 0 as untagged.
fn ether_type() -> Value {
    json!({"payload": {"base": "ll", "offset": 96, "len": 16}})
}

/// Rules for the frames that a guest may send.
fn port_rules(port: &Port, mut rule: impl FnMut(Value)) {
    let (mac, address) = (json!(port.mac.to_string()), json!(port.address.to_string()));
    rule(json!([
        unequal(&ether_type(), &json!({"set": [0x0800, 0x0806, 0x86dd]})),
        drop()
    ]));
    rule(json!([unequal(&payload("ether", "saddr"), &mac), drop()]));
    rule(json!([
        is("arp"),
        unequal(&payload("arp", "saddr ether"), &mac),
        drop()
    ]));
    // An ARP probe has the sender address 0.0.0.0 (RFC 5227).
    let nobody = json!({"set": [address, "0.0.0.0"]});
    rule(json!([
        is("arp"),
        unequal(&payload("arp", "saddr ip"), &nobody),
        drop()
    ]));
    rule(json!([is("arp"), accept()]));
    // Without an address it can only ask for one.
    rule(json!([
        equal(&payload("ip", "saddr"), &json!("0.0.0.0")),
        equal(&payload("udp", "dport"), &json!(67)),
        accept()
    ]));
    rule(json!([
        is("ip"),
        unequal(&payload("ip", "saddr"), &address),
        drop()
    ]));
    rule(json!([
        is("ip"),
        equal(&payload("udp", "sport"), &json!(67)),
        drop()
    ]));
    // A client takes an answer from any port of a server (RFC 2131, 4.1).
    rule(json!([
        is("ip"),
        equal(&payload("udp", "dport"), &json!(68)),
        drop()
    ]));
    rule(json!([is("ip"), accept()]));
    if let Some(address) = port.address6 {
        port_rules6([address, link_local(port.mac)], &mut rule);
    }
    rule(json!([drop()]));
}

/// Rules for the IPv6 packets that a guest may send: from its own addresses, with neighbor
/// discovery for these only (RFC 4861), and no messages of a router or a DHCP server.
fn port_rules6(own: [Ipv6Addr; 2], rule: &mut impl FnMut(Value)) {
    let kind = |kinds: &[&str]| {
        let kinds = match kinds {
            [one] => json!(one),
            kinds => json!({"set": kinds}),
        };
        equal(&payload("icmpv6", "type"), &kinds)
    };
    let addresses = own.map(|address| address.to_string());
    rule(json!([kind(&["nd-router-advert", "nd-redirect"]), drop()]));
    rule(json!([
        is("ip6"),
        equal(&payload("udp", "sport"), &json!(547)),
        drop()
    ]));
    rule(json!([
        is("ip6"),
        equal(&payload("udp", "dport"), &json!(546)),
        drop()
    ]));
    // Advertisements of an own address, and duplicate address detection, whose source is the
    // unspecified address.
    let nobody = equal(&payload("ip6", "saddr"), &json!("::"));
    for address in own {
        let target = target(address);
        let with = |first: Vec<Value>| Value::Array([first, target.clone(), vec![accept()]].concat());
        rule(with(vec![
            equal(&payload("ip6", "saddr"), &json!({"set": addresses})),
            kind(&["nd-neighbor-advert"]),
        ]));
        rule(with(vec![nobody.clone(), kind(&["nd-neighbor-solicit"])]));
    }
    rule(json!([kind(&["nd-neighbor-advert"]), drop()]));
    let listens = kind(&["mld-listener-report", "mld-listener-done", "mld2-listener-report"]);
    rule(json!([nobody, listens, accept()]));
    rule(json!([
        equal(&payload("ip6", "saddr"), &json!({"set": addresses})),
        accept()
    ]));
}

/// The target of a neighbor solicitation or advertisement, 8 bytes into the message (RFC 4861, 4.3, 4.4).
fn target(address: Ipv6Addr) -> Vec<Value> {
    let words = address.octets();
    let words = words.chunks_exact(4).zip([64, 96, 128, 160]);
    let words = words.filter_map(|(word, offset)| {
        let word = u32::from_be_bytes(word.try_into().ok()?);
        let at = json!({"payload": {"base": "th", "offset": offset, "len": 32}});
        Some(equal(&at, &json!(word)))
    });
    words.collect()
}

fn is(protocol: &str) -> Value {
    equal(&meta("protocol"), &json!(protocol))
}

pub(super) fn base(family: &str, name: &str, kind: &str, hook: &str, priority: i32) -> Value {
    json!({"chain": {
        "family": family, "table": TABLE, "name": name,
        "type": kind, "hook": hook, "prio": priority, "policy": "accept",
    }})
}

/// Adds a rule that leads from `chain` to the one for a packet's interface, if there is any: (interface, chain). It is a map, so a packet
/// passes the rules of one network or NIC, however many the node has.
fn jumps(objects: &mut Chains, (family, chain): (&str, &str), key: &str, chains: &[(&str, String)]) {
    let jump = |(interface, chain): &(&str, String)| json!([interface, {"jump": {"target": chain}}]);
    let set: Vec<_> = chains.iter().map(jump).collect();
    // There are no empty maps.
    if !set.is_empty() {
        let map = json!({"vmap": {"key": meta(key), "data": {"set": set}}});
        objects.push(&rule(family, chain, &json!([map])));
    }
}

pub(super) fn rule(family: &str, chain: &str, expressions: &Value) -> Value {
    json!({"rule": {"family": family, "table": TABLE, "chain": chain, "expr": expressions}})
}

pub(super) fn meta(key: &str) -> Value {
    json!({"meta": {"key": key}})
}

pub(super) fn payload(protocol: &str, field: &str) -> Value {
    json!({"payload": {"protocol": protocol, "field": field}})
}

pub(super) fn equal(left: &Value, right: &Value) -> Value {
    json!({"match": {"op": "==", "left": left, "right": right}})
}

fn unequal(left: &Value, right: &Value) -> Value {
    json!({"match": {"op": "!=", "left": left, "right": right}})
}

pub(super) fn iifname(name: &str) -> Value {
    equal(&meta("iifname"), &json!(name))
}

pub(super) fn oifname(name: &str) -> Value {
    equal(&meta("oifname"), &json!(name))
}

pub(super) fn state(states: &[&str]) -> Value {
    json!({"match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": states}})
}

/// Its destination was translated: it was sent to a published port.
fn translated() -> Value {
    json!({"match": {"op": "in", "left": {"ct": {"key": "status"}}, "right": "dnat"}})
}

pub(super) fn accept() -> Value {
    json!({"accept": null})
}

pub(super) fn drop() -> Value {
    json!({"drop": null})
}

#[cfg(test)]
mod tests {
    use vmmd_spec::firewall::{Rule, RuleProtocol};

    use super::*;

    fn network(mode: NetworkMode) -> Network {
        Network {
            bridge: "vmb0123456789".into(),
            mac: "02:01:23:45:67:89".parse().unwrap(),
            mode,
            net: "10.80.0.0/24".parse().unwrap(),
            net6: None,
            gateway: [10, 80, 0, 1].into(),
            ports: vec![Port {
                tap: "vm0123456789n0".into(),
                mac: "52:54:00:00:00:01".parse().unwrap(),
                address: [10, 80, 0, 2].into(),
                address6: None,
                published: vec![PublishedPort {
                    protocol: Protocol::Tcp,
                    node_port: 8080,
                    guest_port: 80,
                }],
                firewall: Firewall::default(),
            }],
        }
    }

    fn chain(ruleset: &Ruleset, chain: &str) -> usize {
        let whole: Value = serde_json::from_str(&ruleset.whole()).unwrap();
        let commands = whole["nftables"].as_array().unwrap().iter();
        commands
            .filter(|command| command["add"]["rule"]["chain"] == chain)
            .count()
    }

    #[test]
    fn the_same_networks_have_the_same_mark_and_others_another() {
        let nat = ruleset(&[network(NetworkMode::Nat)]);
        assert_eq!(nat, ruleset(&[network(NetworkMode::Nat)]));
        assert_ne!(nat.mark, ruleset(&[network(NetworkMode::Isolated)]).mark);
        assert_ne!(nat.mark, ruleset(&[]).mark);
    }

    #[test]
    fn ports_are_published_and_addresses_translated_with_nat_only() {
        let nat = ruleset(&[network(NetworkMode::Nat)]);
        assert_eq!(
            [
                chain(&nat, "source"),
                chain(&nat, "published"),
                chain(&nat, "local")
            ],
            [2, 1, 1]
        );
        for mode in [NetworkMode::Isolated, NetworkMode::Routed] {
            let other = ruleset(&[network(mode)]);
            assert_eq!([chain(&other, "source"), chain(&other, "published")], [0, 0]);
        }
        assert_eq!(
            ["ports", "port-vm0123456789n0", "strangers"].map(|name| chain(&nat, name)),
            [2, 11, 2]
        );
    }

    #[test]
    fn a_packet_passes_the_rules_of_one_network_and_one_nic_however_many_there_are() {
        let numbered = |number: usize| {
            let mut numbered =
                network([NetworkMode::Nat, NetworkMode::Isolated, NetworkMode::Routed][number % 3]);
            numbered.bridge = format!("vmb{number}");
            numbered.ports[0].tap = format!("vm0123456789n{number}");
            numbered
        };
        let rules = ruleset(&(0..30).map(numbered).collect::<Vec<_>>());
        let count = |names: &[&str]| -> Vec<_> { names.iter().map(|name| chain(&rules, name)).collect() };
        assert_eq!(count(&["forward", "input", "ports", "strangers"]), [2, 1, 2, 2]);
        assert_eq!(count(&["to-vmb0", "to-vmb1", "to-vmb2"]), [4, 2, 3]);
        assert_eq!(count(&["from-vmb0", "from-vmb1", "from-vmb2"]), [0, 1, 0]);
        assert_eq!(count(&["input-vmb7", "port-vm0123456789n7"]), [5, 11]);
        let text = rules.whole();
        for jump in [
            r#"["vmb1",{"jump":{"target":"from-vmb1"}}]"#,
            r#"["vmb1",{"jump":{"target":"to-vmb1"}}]"#,
            r#"["vmb7",{"jump":{"target":"input-vmb7"}}]"#,
            r#"["vm0123456789n7",{"jump":{"target":"port-vm0123456789n7"}}]"#,
        ] {
            assert_eq!(text.matches(jump).count(), 1, "{jump}: {text}");
        }
    }

    #[test]
    fn a_tap_that_two_leases_have_is_in_the_map_once() {
        let mut stale = network(NetworkMode::Nat);
        stale.bridge = "vmb9876543210".into();
        stale.ports[0].address = [10, 81, 0, 2].into();
        let rules = ruleset(&[stale, network(NetworkMode::Nat)]);
        assert_eq!(
            [chain(&rules, "ports"), chain(&rules, "port-vm0123456789n0")],
            [2, 11]
        );
        let of_the_last = rules.whole().matches(r#""right":"10.80.0.2""#).count();
        assert_eq!(of_the_last, 1);
    }

    /// With a tag, a frame passed the rules about routers and neighbors by not being IPv6 for them.
    #[test]
    fn a_guest_sends_no_frame_with_a_tag() {
        let whole: Value = serde_json::from_str(&ruleset(&[network(NetworkMode::Nat)]).whole()).unwrap();
        let commands = whole["nftables"].as_array().unwrap().iter();
        let mut rules = commands.map(|command| &command["add"]["rule"]);
        let first = rules.find(|rule| rule["chain"] == "port-vm0123456789n0").unwrap();
        let wanted = json!([
            {"match": {
                "op": "!=",
                "left": {"payload": {"base": "ll", "offset": 96, "len": 16}},
                "right": {"set": [0x0800, 0x0806, 0x86dd]},
            }},
            {"drop": null},
        ]);
        assert_eq!(first["expr"], wanted);
    }

    #[test]
    fn without_nics_there_is_no_map() {
        let mut none = network(NetworkMode::Nat);
        none.ports.clear();
        let rules = ruleset(&[none]);
        // The rule against frames from other ports to the node remains.
        assert_eq!([chain(&rules, "ports"), chain(&rules, "strangers")], [1, 0]);
    }

    #[test]
    fn with_ipv6_guests_have_the_addresses_that_they_make_and_ports_lead_there() {
        let mut both = network(NetworkMode::Nat);
        let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
        (both.net6, both.ports[0].address6) = (Some(net), Some(net.of(both.ports[0].mac)));
        let rules = ruleset(&[both]);
        assert_eq!(
            ["source", "published", "local", "port-vm0123456789n0"].map(|name| chain(&rules, name)),
            [4, 2, 2, 21]
        );
        let text = rules.whole();
        for part in [
            "fd00:80::5054:ff:fe00:1",
            "fe80::5054:ff:fe00:1",
            "nd-router-advert",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn connections_are_filtered_only_where_a_guest_has_a_firewall() {
        let open = network(NetworkMode::Nat);
        let text = ruleset(std::slice::from_ref(&open)).whole();
        assert!(!text.contains("egress") && !text.contains("ingress"), "{text}");
        let mut closed = open;
        closed.ports[0].firewall = Firewall {
            ingress: Some(vec![Rule {
                addresses: vec!["10.80.0.9".parse().unwrap(), "192.0.2.0/24".parse().unwrap()],
                protocol: RuleProtocol::Tcp,
                ports: vec![80..=80, 8000..=8100],
            }]),
            egress: None,
        };
        let closed = ruleset(&[closed]);
        // Established, ARP, neighbors, DHCP, the rule, the end.
        assert_eq!([chain(&closed, "ingress"), chain(&closed, "egress")], [6, 0]);
        let text = closed.whole();
        for part in [r#"{"set":[80,{"range":[8000,8100]}]}"#, r#""right":6}"#] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
