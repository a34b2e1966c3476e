//! Which connections guests may have: a chain of the bridge's table for each direction of a guest
//! that has rules, and the maps that lead there (`firewall.nft`).

use std::{collections::BTreeMap, fmt::Display, net::Ipv4Addr};

use vmmd_spec::firewall::{Rule, RuleProtocol};

use super::rules::{Port, TABLE};

/// Input for nft with the parts that all guests' chains need, for a table without them.
pub const SHARED: &str = include_str!("firewall.nft");

/// Test ruleset for nft's check mode: the kernel accepts it if it can track connections on a
/// bridge.
pub const PROBE: &str = "table bridge vmmd-probe {
    chain probe {
        type filter hook postrouting priority 0; policy accept;
        ct state established accept
    }
}
";

/// Input for nft that removes the parts of [`SHARED`], behind all guests' elements and chains.
pub const NOT_SHARED: &str = "delete chain bridge vmmd egress
delete chain bridge vmmd ingress
delete chain bridge vmmd connected
delete map bridge vmmd egress
delete map bridge vmmd ingress
";

/// Chains of guests: the map that leads to each and its name, and its rules.
pub type Chains = BTreeMap<(&'static str, String), String>;

/// The chains of a guest in the network with this IPv4 address of the node.
pub fn chains(gateway: Option<Ipv4Addr>, port: &Port) -> Chains {
    let directions = [
        ("egress", "daddr", &port.firewall.egress),
        ("ingress", "saddr", &port.firewall.ingress),
    ];
    let with_rules = directions.into_iter().filter_map(|(map, other, rules)| {
        let name = (map, format!("{map}-{}", port.tap));
        Some((name, chain(gateway, other, rules.as_ref()?)))
    });
    with_rules.collect()
}

/// Input for nft that makes chains, or replaces their rules.
pub fn text(chains: &Chains) -> String {
    let chains = chains.iter().map(|((_, name), rules)| {
        format!(
            "add chain bridge {TABLE} {name}\nflush chain bridge {TABLE} {name}\n\
             table bridge {TABLE} {{\n\tchain {name} {{\n{rules}\t}}\n}}\n"
        )
    });
    chains.collect()
}

/// Input for nft that removes chains that nothing leads to.
pub fn removal(chains: &Chains) -> String {
    let names = chains.keys();
    names
        .map(|(_, name)| format!("delete chain bridge {TABLE} {name}\n"))
        .collect()
}

/// The rules of a chain. The other side of a packet is its `other`.
fn chain(gateway: Option<Ipv4Addr>, other: &str, rules: &[Rule]) -> String {
    let mut text = "\t\tjump connected\n".to_owned();
    if let Some(gateway) = gateway {
        // DHCP with the gateway. A guest cannot send the packets of a server.
        let dhcp = match other {
            "daddr" => format!("ip daddr {{ 255.255.255.255, {gateway} }} udp dport 67"),
            _ => format!("ip saddr {gateway} udp sport 67"),
        };
        text += &format!("\t\t{dhcp} accept\n");
    }
    for rule in rules {
        let connections = connections(rule);
        if rule.addresses.is_empty() {
            text += &format!("\t\t{connections}accept\n");
        }
        for family in ["ip", "ip6"] {
            let own = rule.addresses.iter();
            let mut own = own
                .filter(|one| one.first.is_ipv6() == (family == "ip6"))
                .peekable();
            if own.peek().is_some() {
                text += &format!("\t\t{family} {other} {{ {} }} {connections}accept\n", list(own));
            }
        }
    }
    text + "\t\tdrop\n"
}

/// The protocol and the ports of a rule, with a space at the end.
fn connections(rule: &Rule) -> String {
    // By their numbers (IANA, Protocol Numbers): nft looks names up in /etc/protocols, which not every node has.
    let (protocol, numbers) = match rule.protocol {
        RuleProtocol::Any => ("", ""),
        RuleProtocol::Tcp => ("tcp", "6"),
        RuleProtocol::Udp => ("udp", "17"),
        RuleProtocol::Icmp => ("", "{ 1, 58 }"),
    };
    let mut text = String::new();
    if !numbers.is_empty() {
        text += &format!("meta l4proto {numbers} ");
    }
    if !protocol.is_empty() && !rule.ports.is_empty() {
        let ports = rule.ports.iter();
        let ports = ports.map(|ports| match (ports.start(), ports.end()) {
            (first, last) if first == last => format!("{first}"),
            (first, last) => format!("{first}-{last}"),
        });
        text += &format!("{protocol} dport {{ {} }} ", list(ports));
    }
    text
}

fn list(items: impl Iterator<Item = impl Display>) -> String {
    let items: Vec<_> = items.map(|item| item.to_string()).collect();
    items.join(", ")
}

#[cfg(test)]
mod tests {
    use vmmd_spec::firewall::Firewall;

    use super::*;

    #[test]
    fn a_direction_with_rules_has_a_chain() {
        let port = Port {
            tap: "vm0123456789n0".into(),
            mac: "52:54:00:00:00:01".parse().unwrap(),
            address: Some([10, 80, 0, 2].into()),
            address6: None,
            published: Vec::new(),
            metadata: false,
            firewall: Firewall {
                ingress: Some(vec![Rule {
                    addresses: ["10.80.0.9", "fd00:80::9", "192.0.2.0/24"]
                        .map(|text| text.parse().unwrap())
                        .to_vec(),
                    protocol: RuleProtocol::Tcp,
                    ports: vec![80..=80, 8000..=8100],
                }]),
                egress: None,
            },
        };
        let chains = chains(Some([10, 80, 0, 1].into()), &port);
        let rules = "\t\tjump connected\n\t\tip saddr 10.80.0.1 udp sport 67 accept\n\
                     \t\tip saddr { 10.80.0.9/32, 192.0.2.0/24 } meta l4proto 6 tcp dport { 80, 8000-8100 } accept\n\
                     \t\tip6 saddr { fd00:80::9/128 } meta l4proto 6 tcp dport { 80, 8000-8100 } accept\n\t\tdrop\n";
        let name = ("ingress", "ingress-vm0123456789n0".to_owned());
        assert_eq!(chains, Chains::from([(name, rules.to_owned())]));
    }
}
