//! Which connections guests may have, as rules of the bridge's table: see [`rules`](super::rules).

use serde_json::{Value, json};
use vmmd_spec::firewall::{Rule, RuleProtocol};

use super::{
    rules::{Network, accept, base, drop, equal, iifname, meta, oifname, payload, rule, state},
    ruleset::Chains,
};

/// Test ruleset for nft's check mode: the kernel accepts it if it can track connections on a
/// bridge.
pub fn probe() -> Value {
    let table = json!({"table": {"family": "bridge", "name": "vmmd-probe"}});
    let chain = json!({"chain": {
        "family": "bridge", "table": "vmmd-probe", "name": "probe",
        "type": "filter", "hook": "postrouting", "prio": 0, "policy": "accept",
    }});
    let expressions = json!([state(&["established"]), accept()]);
    let rule =
        json!({"rule": {"family": "bridge", "table": "vmmd-probe", "chain": "probe", "expr": expressions}});
    json!({"nftables": [{"add": table}, {"add": chain}, {"add": rule}]})
}

/// Which connections guests may have. Where no guest has a firewall the kernel tracks no connections on bridges.
pub fn connections(networks: &[Network], objects: &mut Chains) {
    let mut ports = networks.iter().flat_map(|network| &network.ports);
    if ports.all(|port| port.firewall.is_open()) {
        return;
    }
    // Behind the tracking of connections, which has the priority -200.
    objects.push(&base("bridge", "egress", "filter", "prerouting", 0));
    objects.push(&base("bridge", "ingress", "filter", "postrouting", 0));
    for network in networks {
        // DHCP with the gateway. A guest cannot send the packets of a server.
        let gateway = json!(network.gateway.to_string());
        let servers = json!({"set": ["255.255.255.255", gateway]});
        let query = [
            equal(&payload("ip", "daddr"), &servers),
            equal(&payload("udp", "dport"), &json!(67)),
        ];
        let answer = [
            equal(&payload("ip", "saddr"), &gateway),
            equal(&payload("udp", "sport"), &json!(67)),
        ];
        for port in &network.ports {
            if let Some(rules) = &port.firewall.egress {
                direction(objects, ("egress", "daddr"), &iifname(&port.tap), &query, rules);
            }
            if let Some(rules) = &port.firewall.ingress {
                direction(objects, ("ingress", "saddr"), &oifname(&port.tap), &answer, rules);
            }
        }
    }
}

fn direction(
    objects: &mut Chains,
    (chain, other): (&str, &str),
    guest: &Value,
    [other_end, dhcp]: &[Value; 2],
    rules: &[Rule],
) {
    let mut add = |expressions: Value| objects.push(&rule("bridge", chain, &expressions));
    add(json!([guest, state(&["established", "related"]), accept()]));
    let arp = equal(&meta("protocol"), &json!("arp"));
    add(json!([guest, arp, accept()]));
    // The IPv6 counterpart of ARP (RFC 4861), with its multicast groups (RFC 3810). The rules of
    // the ports check the senders.
    let neighbors = json!({"set": [
        "nd-router-solicit", "nd-router-advert", "nd-neighbor-solicit", "nd-neighbor-advert", "mld2-listener-report",
    ]});
    add(json!([
        guest,
        equal(&payload("icmpv6", "type"), &neighbors),
        accept()
    ]));
    add(json!([guest, other_end, dhcp, accept()]));
    for rule in rules {
        let mut expressions = vec![guest.clone()];
        if !rule.addresses.is_empty() {
            let addresses = rule.addresses.iter();
            let addresses: Vec<_> = addresses
                .map(|range| json!({"prefix": {"addr": range.first.to_string(), "len": range.prefix}}))
                .collect();
            expressions.push(equal(&payload("ip", other), &json!({"set": addresses})));
        }
        // By their numbers (IANA, Protocol Numbers): nft looks names up in /etc/protocols, which not every node has.
        let protocol = match rule.protocol {
            RuleProtocol::Any => None,
            RuleProtocol::Tcp => Some(("tcp", json!(6))),
            RuleProtocol::Udp => Some(("udp", json!(17))),
            RuleProtocol::Icmp => Some(("icmp", json!({"set": [1, 58]}))),
        };
        if let Some((protocol, numbers)) = protocol {
            expressions.push(equal(&meta("l4proto"), &numbers));
            if !rule.ports.is_empty() {
                let ranges = rule.ports.iter();
                let ranges: Vec<_> = ranges
                    .map(|ports| match (*ports.start(), *ports.end()) {
                        (first, last) if first == last => json!(first),
                        (first, last) => json!({"range": [first, last]}),
                    })
                    .collect();
                expressions.push(equal(&payload(protocol, "dport"), &json!({"set": ranges})));
            }
        }
        expressions.push(accept());
        add(Value::Array(expressions));
    }
    add(json!([guest, drop()]));
}
