//! Other packet filters of the node that drop packets of guests, such as those of ufw, firewalld and
//! Docker. A packet passes when no table drops it, so the rules of the networks alone are not enough.
//!
//! Only tables of nftables are found, which include those of iptables-nft.

use std::{fmt, io};

use serde_json::Value;

use super::{nft, rules::TABLE};

/// A chain of another program that drops packets of guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    family: String,
    table: String,
    chain: String,
    hook: Hook,
    manager: Manager,
}

/// Program whose commands change the rules of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manager {
    /// It opens zones, which have interfaces.
    Firewalld,
    /// It loads its own rules at each start.
    Ufw,
    /// It keeps the rules of others in the chain `DOCKER-USER` alone.
    Docker,
    /// The chain is a built-in one of iptables.
    Iptables,
    /// No program is known.
    Nft,
}

/// Packets that a chain is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// To the node: DHCP, DNS and pings of the gateway.
    Input,
    /// To and from the outside.
    Forward,
}

/// The chains that drop packets of guests now.
pub async fn find() -> io::Result<Vec<Obstacle>> {
    let chains = nft::list(&["chains"]).await?;
    let mut found = Vec::new();
    for (mut obstacle, drops) in candidates(&chains) {
        let Obstacle {
            family, table, chain, ..
        } = &obstacle;
        let rules = nft::list(&["chain", family, table, chain]).await?;
        if !drops && !ends_with_drop(&rules) {
            continue;
        }
        // The rule that lets guests pass may be in any chain of the table.
        let table = nft::list(&["table", family, table]).await?;
        if !names_bridges(&table) {
            obstacle.manager = manager(&obstacle, &table);
            found.push(obstacle);
        }
    }
    Ok(found)
}

/// Base chains of other programs that filter packets of guests, and whether a packet that no rule decides on is dropped.
fn candidates(listed: &Value) -> Vec<(Obstacle, bool)> {
    let chains = objects(listed, "chain").filter_map(|chain| {
        let text = |name: &str| chain.get(name).and_then(Value::as_str);
        let hook = match text("hook")? {
            "input" => Hook::Input,
            "forward" => Hook::Forward,
            _ => return None,
        };
        let (family, table) = (text("family")?, text("table")?);
        let is_other = ["ip", "ip6", "inet"].contains(&family) && table != TABLE;
        let obstacle = Obstacle {
            family: family.to_owned(),
            table: table.to_owned(),
            chain: text("name")?.to_owned(),
            hook,
            manager: Manager::Nft,
        };
        (is_other && text("type") == Some("filter")).then(|| (obstacle, text("policy") == Some("drop")))
    });
    chains.collect()
}

/// The program that manages a chain of the listed table.
fn manager(obstacle: &Obstacle, listed: &Value) -> Manager {
    let has = |names: &[&str]| {
        let mut chains = objects(listed, "chain").filter_map(|chain| chain.get("name")?.as_str());
        chains.any(|chain| names.contains(&chain))
    };
    match (obstacle.table.as_str(), obstacle.chain.as_str()) {
        ("firewalld", _) => Manager::Firewalld,
        (_, "INPUT" | "FORWARD") if has(&["ufw-user-input", "ufw6-user-input"]) => Manager::Ufw,
        (_, "FORWARD") if has(&["DOCKER-USER"]) => Manager::Docker,
        (_, "INPUT" | "FORWARD") => Manager::Iptables,
        _ => Manager::Nft,
    }
}

/// Whether the last rule of a chain drops all packets that come to it.
fn ends_with_drop(listed: &Value) -> bool {
    let last = objects(listed, "rule").last();
    let steps = last.and_then(|rule| rule.get("expr")?.as_array());
    let is = |step: &Value, names: &[&str]| names.iter().any(|name| step.get(name).is_some());
    steps.is_some_and(|steps| {
        steps
            .iter()
            .all(|step| is(step, &["drop", "reject", "counter", "log"]))
            && steps.iter().any(|step| is(step, &["drop", "reject"]))
    })
}

/// Whether a rule of a table is about bridges of networks: an administrator has let them pass.
fn names_bridges(listed: &Value) -> bool {
    objects(listed, "rule").any(|rule| rule.to_string().contains("\"vmb"))
}

fn objects<'a>(listed: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    let objects = listed.get("nftables").and_then(Value::as_array);
    objects
        .into_iter()
        .flatten()
        .filter_map(move |object| object.get(kind))
}

/// The obstacles of a network with IPv4, IPv6 or both in words; empty without any. Packets of an isolated network are not forwarded.
pub fn warning(obstacles: &[Obstacle], is_isolated: bool, [has_ipv4, has_ipv6]: [bool; 2]) -> String {
    let matters = |obstacle: &&Obstacle| {
        let has_packets = match obstacle.family.as_str() {
            "ip" => has_ipv4,
            "ip6" => has_ipv6,
            _ => true,
        };
        (obstacle.hook == Hook::Input || !is_isolated) && has_packets
    };
    let found: Vec<_> = obstacles
        .iter()
        .filter(matters)
        .map(ToString::to_string)
        .collect();
    found.join("; ")
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            table,
            chain,
            hook,
            ..
        } = self;
        let packets = match hook {
            Hook::Input => "DHCP and names of guests",
            Hook::Forward => "packets between guests and the outside",
        };
        write!(
            f,
            "the chain \"{chain}\" of the table \"{family} {table}\" drops {packets}: add "
        )?;
        let program = if family == "ip6" { "ip6tables" } else { "iptables" };
        match (self.manager, hook) {
            (Manager::Firewalld, _) => f.write_str(
                "the bridges to a zone (firewall-cmd --permanent --zone=trusted --add-interface=vmb+; firewall-cmd --reload)",
            ),
            (Manager::Ufw, Hook::Input) => f.write_str("a rule (ufw allow in on vmb+)"),
            (Manager::Ufw, Hook::Forward) => {
                f.write_str("rules (ufw route allow in on vmb+; ufw route allow out on vmb+)")
            }
            (Manager::Docker | Manager::Iptables, Hook::Input) => {
                write!(f, "a rule ({program} -I INPUT -i vmb+ -j ACCEPT)")
            }
            (Manager::Docker | Manager::Iptables, Hook::Forward) => {
                let chain = if self.manager == Manager::Docker { "DOCKER-USER" } else { "FORWARD" };
                write!(
                    f,
                    "rules ({program} -I {chain} -i vmb+ -j ACCEPT; {program} -I {chain} -o vmb+ -j ACCEPT)"
                )
            }
            (Manager::Nft, Hook::Input) => write!(
                f,
                "a rule (nft insert rule {family} {table} {chain} iifname \"vmb*\" accept)"
            ),
            (Manager::Nft, Hook::Forward) => write!(
                f,
                "rules (nft insert rule {family} {table} {chain} iifname \"vmb*\" accept; \
                 nft insert rule {family} {table} {chain} oifname \"vmb*\" accept)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chain(family: &str, table: &str, name: &str, hook: &str, policy: &str) -> Value {
        json!({"chain": {"family": family, "table": table, "name": name, "handle": 1,
            "type": "filter", "hook": hook, "prio": 0, "policy": policy}})
    }

    #[test]
    fn base_chains_of_others_are_candidates() {
        let listed = json!({"nftables": [
            {"metainfo": {"version": "1.0.6"}},
            chain("inet", "vmmd", "input", "input", "accept"),
            chain("bridge", "theirs", "f", "forward", "drop"),
            chain("ip", "filter", "FORWARD", "forward", "drop"),
            chain("inet", "firewalld", "filter_INPUT", "input", "accept"),
            {"chain": {"family": "ip", "table": "filter", "name": "DOCKER-USER", "handle": 2}},
        ]});
        let found: Vec<_> = candidates(&listed)
            .into_iter()
            .map(|(obstacle, drops)| (obstacle.chain, obstacle.hook, drops))
            .collect();
        assert_eq!(
            found,
            [
                ("FORWARD".to_owned(), Hook::Forward, true),
                ("filter_INPUT".to_owned(), Hook::Input, false)
            ]
        );
    }

    #[test]
    fn chain_that_rejects_the_rest_drops() {
        let with = |last: Value| {
            json!({"nftables": [
                {"rule": {"expr": [{"accept": null}]}},
                {"rule": {"expr": last}},
            ]})
        };
        assert!(ends_with_drop(&with(
            json!([{"reject": {"type": "icmpx", "expr": "admin-prohibited"}}])
        )));
        assert!(ends_with_drop(&with(
            json!([{"counter": {"packets": 1, "bytes": 2}}, {"drop": null}])
        )));
        assert!(!ends_with_drop(&with(
            json!([{"match": {"op": "in"}}, {"drop": null}])
        )));
        assert!(!ends_with_drop(&with(json!([{"accept": null}]))));
        assert!(!ends_with_drop(&json!({"nftables": []})));
    }

    #[test]
    fn warning_has_the_rule_to_add() {
        let obstacle = |table: &str, chain: &str, hook, manager| Obstacle {
            family: "inet".into(),
            table: table.into(),
            chain: chain.into(),
            hook,
            manager,
        };
        let all = [
            obstacle("fw", "in", Hook::Input, Manager::Nft),
            obstacle("filter", "FORWARD", Hook::Forward, Manager::Iptables),
        ];
        let text = warning(&all, false, [true, false]);
        assert!(
            text.contains("nft insert rule inet fw in iifname \"vmb*\" accept"),
            "{text}"
        );
        assert!(text.contains("iptables -I FORWARD -i vmb+ -j ACCEPT"), "{text}");
        assert!(!warning(&all, true, [true, false]).contains("FORWARD"));
        let six = Obstacle {
            family: "ip6".into(),
            ..obstacle("filter", "INPUT", Hook::Input, Manager::Iptables)
        };
        assert_eq!(warning(std::slice::from_ref(&six), false, [true, false]), "");
        assert!(warning(&[six], false, [false, true]).contains("ip6tables -I INPUT"));
        let zones = obstacle("firewalld", "filter_INPUT", Hook::Input, Manager::Firewalld);
        assert!(warning(&[zones], true, [true, false]).contains("firewall-cmd"));
    }

    #[test]
    fn chains_of_a_table_show_its_manager() {
        let of = |table: &str, chain: &str, chains: &[&str]| {
            let obstacle = Obstacle {
                family: "ip".into(),
                table: table.into(),
                chain: chain.into(),
                hook: Hook::Forward,
                manager: Manager::Nft,
            };
            let listed = chains.iter().map(|name| json!({"chain": {"name": name}}));
            manager(&obstacle, &json!({"nftables": listed.collect::<Vec<_>>()}))
        };
        assert_eq!(of("firewalld", "filter_FORWARD", &[]), Manager::Firewalld);
        let both = ["FORWARD", "DOCKER-USER", "ufw-user-input"];
        assert_eq!(of("filter", "FORWARD", &both), Manager::Ufw);
        assert_eq!(of("filter", "FORWARD", &both[..2]), Manager::Docker);
        assert_eq!(of("filter", "INPUT", &both[..2]), Manager::Iptables);
        assert_eq!(of("fw", "through", &both), Manager::Nft);
    }
}
