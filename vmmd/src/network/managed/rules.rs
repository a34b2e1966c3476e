//! What the packet filter is told of the networks, as the JSON of libnftables (libnftables-json(5)).
//!
//! All of it is in two tables of our own, `inet vmmd` and `bridge vmmd`, which are replaced as a whole in one transaction.
//! Nothing of other owners is touched. An empty chain in each names the ruleset by a hash of it: where the chains are in the kernel, the
//! rules are.
//!
//! - *forward*: what comes from a network and goes to it. Into a network with NAT goes what belongs to a connection from there, and
//!   what was sent to a published port.
//! - *input*: what guests may send to the node itself: DHCP, and DNS queries and pings of the gateway.
//! - *source*, *published*, *local*: the addresses that are translated.
//! - *egress*, *ingress* (of the bridge): the connections that a guest with a firewall may open, and that others may open to it.
//!   All that a guest sends and receives passes there, also what stays in its network.
//! - *ports* (of the bridge): what a guest may send at all: its own MAC, IPv4 and IPv6 addresses, ARP and neighbor discovery that say
//!   so, and nothing that a router or a DHCP server says.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::model::{
    firewall::Firewall,
    network::{Ipv4Net, Ipv6Net, NetworkMode, link_local},
    nic::{Mac, Protocol, PublishedPort},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The tables' name.
pub const TABLE: &str = "vmmd";
/// Families that have a table.
pub const FAMILIES: [&str; 2] = ["inet", "bridge"];

/// A network as the packet filter sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its interface.
    pub bridge: String,
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

/// What is to be in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// The chain that stands for it.
    pub mark: String,
    /// What `nft -j -f -` is to be given.
    pub commands: Value,
}

/// The ruleset for these networks. Without networks it takes the tables away.
pub fn ruleset(networks: &[Network]) -> Ruleset {
    let mut objects = Vec::new();
    if !networks.is_empty() {
        for family in FAMILIES {
            objects.push(json!({"table": {"family": family, "name": TABLE}}));
        }
        forward(networks, &mut objects);
        input(networks, &mut objects);
        translation(networks, &mut objects);
        spoofing(networks, &mut objects);
        super::connections::connections(networks, &mut objects);
    }
    let hash = Sha256::digest(Value::Array(objects.clone()).to_string());
    let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let mark = format!("ruleset-{hash}");
    // Adding a table that is there is no error, deleting one that is not would be.
    let mut commands = vec![json!({"metainfo": {"json_schema_version": 1}})];
    for family in FAMILIES {
        let table = json!({"table": {"family": family, "name": TABLE}});
        commands.push(json!({"add": table}));
        commands.push(json!({"delete": table}));
    }
    commands.extend(objects.into_iter().map(|object| json!({"add": object})));
    if !networks.is_empty() {
        for family in FAMILIES {
            commands.push(json!({"add": {"chain": {"family": family, "table": TABLE, "name": mark}}}));
        }
    }
    Ruleset {
        mark,
        commands: json!({"nftables": commands}),
    }
}

fn forward(networks: &[Network], objects: &mut Vec<Value>) {
    objects.push(base("inet", "forward", "filter", "forward", 0));
    let mut rule = |expressions: Value| objects.push(self::rule("inet", "forward", &expressions));
    // First: no later rule may accept what comes from an isolated network.
    for network in networks
        .iter()
        .filter(|network| network.mode == NetworkMode::Isolated)
    {
        let elsewhere = unequal(&meta("oifname"), &json!(network.bridge));
        rule(json!([iifname(&network.bridge), elsewhere, drop()]));
    }
    for network in networks {
        let (to, within) = (oifname(&network.bridge), iifname(&network.bridge));
        rule(json!([within, to, accept()]));
        match network.mode {
            NetworkMode::Nat => {
                rule(json!([to, state(&["established", "related"]), accept()]));
                rule(json!([to, translated(), accept()]));
                rule(json!([to, drop()]));
            }
            NetworkMode::Isolated => rule(json!([to, drop()])),
            NetworkMode::Routed => {}
        }
    }
}

fn input(networks: &[Network], objects: &mut Vec<Value>) {
    objects.push(base("inet", "input", "filter", "input", 0));
    let mut rule = |expressions: Value| objects.push(self::rule("inet", "input", &expressions));
    for network in networks {
        let from = iifname(&network.bridge);
        rule(json!([from, state(&["established", "related"]), accept()]));
        rule(json!([
            from,
            equal(&payload("udp", "dport"), &json!(67)),
            accept()
        ]));
        let gateway = equal(&payload("ip", "daddr"), &json!(network.gateway.to_string()));
        let query = equal(&payload("udp", "dport"), &json!(53));
        rule(json!([from, gateway, query, accept()]));
        let ping = equal(&payload("icmp", "type"), &json!("echo-request"));
        rule(json!([from, gateway, ping, accept()]));
        if let Some(net6) = network.net6 {
            let gateway = equal(&payload("ip6", "daddr"), &json!(net6.gateway().to_string()));
            let ping = equal(&payload("icmpv6", "type"), &json!("echo-request"));
            rule(json!([from, gateway, ping, accept()]));
            // What hosts of a link say to each other and ask a router for (RFC 4861), but not what a router says.
            let said = json!({"set": ["nd-router-solicit", "nd-neighbor-solicit", "nd-neighbor-advert", "mld2-listener-report"]});
            rule(json!([from, equal(&payload("icmpv6", "type"), &said), accept()]));
        }
        rule(json!([from, drop()]));
    }
}

fn translation(networks: &[Network], objects: &mut Vec<Value>) {
    objects.push(base("inet", "source", "nat", "postrouting", 100));
    objects.push(base("inet", "published", "nat", "prerouting", -100));
    // The node's own connections to its published ports.
    objects.push(base("inet", "local", "nat", "output", -100));
    for network in networks.iter().filter(|network| network.mode == NetworkMode::Nat) {
        let net = json!({"prefix": {"addr": network.net.first().to_string(), "len": network.net.prefix()}});
        let from = equal(&payload("ip", "saddr"), &net);
        let other = unequal(&meta("oifname"), &json!(network.bridge));
        let masquerade = json!({"masquerade": null});
        objects.push(rule("inet", "source", &json!([from, other, masquerade])));
        // A guest that uses a published port of its own network: the answer has to come back by the node.
        let within = equal(&payload("ip", "daddr"), &net);
        objects.push(rule(
            "inet",
            "source",
            &json!([from, within, translated(), masquerade]),
        ));
        if let Some(net6) = network.net6 {
            let net = json!({"prefix": {"addr": net6.first().to_string(), "len": Ipv6Net::PREFIX}});
            let from = equal(&payload("ip6", "saddr"), &net);
            let within = equal(&payload("ip6", "daddr"), &net);
            objects.push(rule("inet", "source", &json!([from, other, masquerade])));
            objects.push(rule(
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
                        objects.push(rule("inet", chain, &publish(address, published)));
                    }
                }
            }
        }
    }
}

fn publish(address: IpAddr, port: &PublishedPort) -> Value {
    let protocol = match port.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    let local = json!({"fib": {"result": "type", "flags": ["daddr"]}});
    let (family, dnat) = match address {
        IpAddr::V4(_) => ("ipv4", "ip"),
        IpAddr::V6(_) => ("ipv6", "ip6"),
    };
    json!([
        equal(&json!({"meta": {"key": "nfproto"}}), &json!(family)),
        equal(&local, &json!("local")),
        equal(&payload(protocol, "dport"), &json!(port.node_port)),
        {"dnat": {"family": dnat, "addr": address.to_string(), "port": port.guest_port}},
    ])
}

fn spoofing(networks: &[Network], objects: &mut Vec<Value>) {
    objects.push(base("bridge", "ports", "filter", "prerouting", -300));
    for port in networks.iter().flat_map(|network| &network.ports) {
        let from = iifname(&port.tap);
        let (mac, address) = (json!(port.mac.to_string()), json!(port.address.to_string()));
        let mut rule = |expressions: Value| objects.push(self::rule("bridge", "ports", &expressions));
        rule(json!([from, unequal(&payload("ether", "saddr"), &mac), drop()]));
        rule(json!([
            from,
            is("arp"),
            unequal(&payload("arp", "saddr ether"), &mac),
            drop()
        ]));
        // A probe for an address says that it has none yet (RFC 5227).
        let nobody = json!({"set": [address, "0.0.0.0"]});
        rule(json!([
            from,
            is("arp"),
            unequal(&payload("arp", "saddr ip"), &nobody),
            drop()
        ]));
        rule(json!([from, is("arp"), accept()]));
        // Without an address it can only ask for one.
        rule(json!([
            from,
            equal(&payload("ip", "saddr"), &json!("0.0.0.0")),
            equal(&payload("udp", "dport"), &json!(67)),
            accept()
        ]));
        rule(json!([
            from,
            is("ip"),
            unequal(&payload("ip", "saddr"), &address),
            drop()
        ]));
        rule(json!([
            from,
            is("ip"),
            equal(&payload("udp", "sport"), &json!(67)),
            drop()
        ]));
        rule(json!([from, is("ip"), accept()]));
        if let Some(address) = port.address6 {
            spoofing6(&from, [address, link_local(port.mac)], &mut rule);
        }
        rule(json!([from, drop()]));
    }
}

/// What a guest may send with IPv6: its own addresses, what asks for and tells of these alone (RFC 4861), and nothing that a router
/// or a DHCP server says.
fn spoofing6(from: &Value, own: [Ipv6Addr; 2], rule: &mut impl FnMut(Value)) {
    let kind = |kinds: &[&str]| equal(&payload("icmpv6", "type"), &json!({"set": kinds}));
    let addresses = own.map(|address| address.to_string());
    rule(json!([from, kind(&["nd-router-advert", "nd-redirect"]), drop()]));
    rule(json!([
        from,
        is("ip6"),
        equal(&payload("udp", "sport"), &json!(547)),
        drop()
    ]));
    // An advertisement of an address, and the question whether somebody has one, which who has none yet asks.
    let nobody = equal(&payload("ip6", "saddr"), &json!("::"));
    for address in own {
        let target = target(address);
        let with = |first: Vec<Value>| {
            let all = [vec![from.clone()], first, target.clone(), vec![accept()]];
            Value::Array(all.concat())
        };
        rule(with(vec![
            equal(&payload("ip6", "saddr"), &json!({"set": addresses})),
            kind(&["nd-neighbor-advert"]),
        ]));
        rule(with(vec![nobody.clone(), kind(&["nd-neighbor-solicit"])]));
    }
    rule(json!([from, kind(&["nd-neighbor-advert"]), drop()]));
    let listens = kind(&["mld-listener-report", "mld-listener-done", "mld2-listener-report"]);
    rule(json!([from, nobody, listens, accept()]));
    rule(json!([
        from,
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
    use proto::model::firewall::{Rule, RuleProtocol};

    use super::*;

    fn network(mode: NetworkMode) -> Network {
        Network {
            bridge: "vmb0123456789".into(),
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
        let commands = ruleset.commands["nftables"].as_array().unwrap();
        let rules = commands
            .iter()
            .filter(|command| command["add"]["rule"]["chain"] == chain);
        rules.count()
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
        assert_eq!(chain(&nat, "ports"), 9);
    }

    #[test]
    fn with_ipv6_guests_have_the_addresses_that_they_make_and_ports_lead_there() {
        let mut both = network(NetworkMode::Nat);
        let net: Ipv6Net = "fd00:80::/64".parse().unwrap();
        (both.net6, both.ports[0].address6) = (Some(net), Some(net.of(both.ports[0].mac)));
        let rules = ruleset(&[both]);
        assert_eq!(
            ["source", "published", "local", "ports"].map(|name| chain(&rules, name)),
            [4, 2, 2, 18]
        );
        let text = rules.commands.to_string();
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
        let text = ruleset(std::slice::from_ref(&open)).commands.to_string();
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
        let text = closed.commands.to_string();
        for part in [r#"{"set":[80,{"range":[8000,8100]}]}"#, r#""right":6}"#] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn without_networks_the_tables_are_taken_away() {
        let none = ruleset(&[]);
        let commands = none.commands["nftables"].as_array().unwrap();
        assert_eq!(commands.len(), 5, "{commands:?}");
    }
}
