//! Which connections guests may have: a chain of the bridge's table for each direction of a guest
//! that has rules, and the maps that lead there (`firewall.nft`). A security group has a chain for each of its directions, to which the
//! chains of its guests jump: a change of the group changes one chain.

use std::{collections::BTreeMap, fmt::Display, net::Ipv4Addr};

use vmmd_spec::firewall::{Firewall, Rule, RuleProtocol};

use super::rules::{Network, Port, TABLE};

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

/// Chains of guests and of security groups: the direction of each and its name, and its rules.
pub type Chains = BTreeMap<(&'static str, String), String>;

/// Each direction of connections, and the other side's address in its packets. A map with the name of the direction leads to the
/// chains of guests.
const DIRECTIONS: [(&str, &str); 2] = [(EGRESS, "daddr"), ("ingress", "saddr")];
const EGRESS: &str = "egress";

/// The rules of a direction.
fn side<'a>(firewall: &'a Firewall, direction: &str) -> Option<&'a [Rule]> {
    match direction {
        EGRESS => firewall.egress.as_deref(),
        _ => firewall.ingress.as_deref(),
    }
}

/// The chains of a guest in a network. A direction has a chain when the NIC, or one of its security groups, has rules for it. A group that the
/// network does not have allows nothing.
pub fn chains(network: &Network, port: &Port) -> Chains {
    let with_rules = DIRECTIONS.into_iter().filter_map(|(direction, other)| {
        let own = side(&port.firewall, direction);
        let groups = port.groups.iter().filter(|name| {
            let group = network.groups.get(name.as_str());
            group.is_none_or(|group| side(group, direction).is_some())
        });
        let groups: Vec<_> = groups.collect();
        if own.is_none() && groups.is_empty() {
            return None;
        }
        let known = groups
            .into_iter()
            .filter(|name| network.groups.contains_key(name.as_str()));
        let jumps = known.map(|name| format!("\t\tjump {}\n", group_chain(network, direction, name)));
        let rules = rules(other, own.unwrap_or_default()) + &jumps.collect::<String>();
        let name = (direction, format!("{direction}-{}", port.tap));
        Some((name, chain(network.gateway, other, &rules)))
    });
    with_rules.collect()
}

/// The chains of these security groups of a network: one for each direction for which a group has rules.
pub fn group_chains<'a>(network: &Network, groups: impl IntoIterator<Item = &'a String>) -> Chains {
    let known = groups
        .into_iter()
        .filter_map(|name| Some((name, network.groups.get(name)?)));
    let chains = known.flat_map(|(name, group)| {
        DIRECTIONS.into_iter().filter_map(move |(direction, other)| {
            let rules = rules(other, side(group, direction)?);
            Some(((direction, group_chain(network, direction, name)), rules))
        })
    });
    chains.collect()
}

/// Name of the chain of a security group. That of a guest has no bridge in it.
fn group_chain(network: &Network, direction: &str, group: &str) -> String {
    format!("{direction}-{}-{group}", network.bridge)
}

/// Input for nft that makes chains, or replaces their rules. All chains exist before a rule leads to one.
pub fn text(chains: &Chains) -> String {
    let names = chains
        .keys()
        .map(|(_, name)| format!("add chain bridge {TABLE} {name}\nflush chain bridge {TABLE} {name}\n"));
    let rules = chains
        .iter()
        .map(|((_, name), rules)| format!("table bridge {TABLE} {{\n\tchain {name} {{\n{rules}\t}}\n}}\n"));
    names.chain(rules).collect()
}

/// Input for nft that removes chains to which nothing leads but each other.
pub fn removal(chains: &Chains) -> String {
    let all = |verb| {
        let names = chains.keys();
        names.map(move |(_, name)| format!("{verb} chain bridge {TABLE} {name}\n"))
    };
    all("flush").chain(all("delete")).collect()
}

/// The rules of a guest's chain, with its own `rules`. The other side of a packet is its `other`.
fn chain(gateway: Option<Ipv4Addr>, other: &str, rules: &str) -> String {
    let mut text = "\t\tjump connected\n".to_owned();
    if let Some(gateway) = gateway {
        // DHCP with the gateway. A guest cannot send the packets of a server.
        let dhcp = match other {
            "daddr" => format!("ip daddr {{ 255.255.255.255, {gateway} }} udp dport 67"),
            _ => format!("ip saddr {gateway} udp sport 67"),
        };
        text += &format!("\t\t{dhcp} accept\n");
    }
    text + rules + "\t\tdrop\n"
}

/// Rules that accept connections.
fn rules(other: &str, rules: &[Rule]) -> String {
    let mut text = String::new();
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
    text
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
    use vmmd_spec::network::NetworkMode;

    use super::*;

    fn network(groups: &[(&str, Firewall)]) -> Network {
        let groups = groups
            .iter()
            .map(|(name, group)| ((*name).to_owned(), group.clone()));
        Network {
            bridge: "vmb0123456789".into(),
            mac: "02:01:23:45:67:89".parse().unwrap(),
            mode: NetworkMode::Nat,
            net6: None,
            gateway: Some([10, 80, 0, 1].into()),
            deny: Vec::new(),
            groups: groups.collect(),
        }
    }

    fn port(firewall: Firewall, groups: &[&str]) -> Port {
        Port {
            tap: "vm0123456789n0".into(),
            mac: "52:54:00:00:00:01".parse().unwrap(),
            address: Some([10, 80, 0, 2].into()),
            address6: None,
            published: Vec::new(),
            metadata: false,
            firewall,
            subnets: Vec::new(),
            floating: Vec::new(),
            groups: groups.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn tcp(port: u16) -> Vec<Rule> {
        vec![Rule {
            addresses: Vec::new(),
            protocol: RuleProtocol::Tcp,
            ports: vec![port..=port],
        }]
    }

    fn ingress(rules: Vec<Rule>) -> Firewall {
        Firewall {
            ingress: Some(rules),
            egress: None,
        }
    }

    #[test]
    fn a_direction_with_rules_has_a_chain() {
        let rule = Rule {
            addresses: ["10.80.0.9", "fd00:80::9", "192.0.2.0/24"]
                .map(|text| text.parse().unwrap())
                .to_vec(),
            protocol: RuleProtocol::Tcp,
            ports: vec![80..=80, 8000..=8100],
        };
        let chains = chains(&network(&[]), &port(ingress(vec![rule]), &[]));
        let rules = "\t\tjump connected\n\t\tip saddr 10.80.0.1 udp sport 67 accept\n\
                     \t\tip saddr { 10.80.0.9/32, 192.0.2.0/24 } meta l4proto 6 tcp dport { 80, 8000-8100 } accept\n\
                     \t\tip6 saddr { fd00:80::9/128 } meta l4proto 6 tcp dport { 80, 8000-8100 } accept\n\t\tdrop\n";
        let name = ("ingress", "ingress-vm0123456789n0".to_owned());
        assert_eq!(chains, Chains::from([(name, rules.to_owned())]));
    }

    #[test]
    fn groups_and_own_rules_are_united() {
        let out = Firewall {
            ingress: None,
            egress: Some(tcp(443)),
        };
        let network = network(&[("web", ingress(tcp(80))), ("out", out)]);
        let of = |own, groups: &[&str]| chains(&network, &port(own, groups));
        let chain = |chains: &Chains, direction| {
            let name = (direction, format!("{direction}-vm0123456789n0"));
            chains.get(&name).cloned()
        };
        let united = of(ingress(tcp(22)), &["web"]);
        assert_eq!(
            chain(&united, "ingress").unwrap(),
            "\t\tjump connected\n\t\tip saddr 10.80.0.1 udp sport 67 accept\n\t\tmeta l4proto 6 tcp dport { 22 } accept\n\
             \t\tjump ingress-vmb0123456789-web\n\t\tdrop\n"
        );
        // No rules of the other direction.
        assert_eq!(chain(&united, "egress"), None);
        let both = of(Firewall::default(), &["web", "out"]);
        assert!(
            chain(&both, "egress")
                .unwrap()
                .contains("jump egress-vmb0123456789-out")
        );
        // A group of which nothing is known.
        let unknown = of(Firewall::default(), &["gone"]);
        assert!(!chain(&unknown, "ingress").unwrap().contains("gone") && unknown.len() == 2);

        let used = ["web".to_owned(), "gone".to_owned()];
        let name = ("ingress", "ingress-vmb0123456789-web".to_owned());
        let rules = "\t\tmeta l4proto 6 tcp dport { 80 } accept\n".to_owned();
        assert_eq!(group_chains(&network, &used), Chains::from([(name, rules)]));
    }

    #[test]
    fn chains_are_made_before_the_rules_that_lead_to_them() {
        let network = network(&[("web", ingress(tcp(80)))]);
        let mut all = chains(&network, &port(Firewall::default(), &["web"]));
        all.extend(group_chains(&network, &["web".to_owned()]));
        let text = text(&all);
        let place = |part: &str| text.find(part).unwrap();
        assert!(
            place("add chain bridge vmmd ingress-vmb0123456789-web")
                < place("jump ingress-vmb0123456789-web")
        );
        let removal = removal(&all);
        let place = |part: &str| removal.rfind(part).unwrap();
        assert!(place("flush chain") < removal.find("delete chain").unwrap());
        assert!(place("delete chain") > 0);
    }
}
