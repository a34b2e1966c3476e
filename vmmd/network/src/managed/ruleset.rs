//! A packet filter ruleset as chains, and the `nft` input that brings it into the kernel
//! (libnftables-json(5)): the whole ruleset, or the difference from the previous one.
//!
//! The ruleset is in two tables of vmmd, `inet vmmd` and `bridge vmmd`. Tables of other owners stay
//! unchanged. An empty chain in each table has a hash of the ruleset as its name: when the kernel
//! has these chains, it has the ruleset. Both ways are one transaction.
//!
//! An obsolete chain loses its rules at once. The next change deletes it, because older kernels
//! still count the jump of a map that the same transaction deletes. Until then the chain is
//! *unused*.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The tables' name.
pub const TABLE: &str = "vmmd";
/// Families that have a table.
pub const FAMILIES: [&str; 2] = ["inet", "bridge"];

/// Family and name of a chain.
pub type Name = (String, String);

/// Wanted content of the kernel's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// The chain that stands for it.
    pub mark: String,
    /// Targets of jumps precede the chains that jump to them.
    chains: Vec<Chain>,
}

/// JSON of a chain and its rules, as text: as values they take thirty times as much memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chain {
    name: Name,
    object: String,
    rules: Vec<String>,
    fact: Fact,
}

/// The chains of a ruleset that is being made.
#[derive(Debug, Default)]
pub struct Chains {
    chains: Vec<Chain>,
    places: BTreeMap<Name, usize>,
}

impl Chains {
    /// Adds a chain, or a rule to one that was added before.
    pub fn push(&mut self, object: &Value) {
        let text = |field: &str, of: &str| object[of][field].as_str().unwrap_or_default().to_owned();
        if object.get("chain").is_some() {
            let name = (text("family", "chain"), text("name", "chain"));
            self.places.insert(name.clone(), self.chains.len());
            self.chains.push(Chain {
                name,
                object: object.to_string(),
                rules: Vec::new(),
                fact: Fact {
                    hash: String::new(),
                    is_base: object["chain"].get("hook").is_some(),
                },
            });
        } else {
            let name = (text("family", "rule"), text("chain", "rule"));
            let chain = self
                .places
                .get(&name)
                .and_then(|place| self.chains.get_mut(*place));
            if let Some(chain) = chain {
                chain.rules.push(object.to_string());
            }
        }
    }
}

/// State of a chain in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fact {
    /// Hash of the chain and its rules.
    hash: String,
    /// The kernel calls it, and no other chain jumps to it.
    is_base: bool,
}

/// A ruleset that is in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    mark: String,
    chains: BTreeMap<Name, Fact>,
    unused: Vec<Name>,
}

impl Known {
    /// Whether it is this ruleset.
    pub fn is(&self, ruleset: &Ruleset) -> bool {
        self.mark == ruleset.mark
    }
}

impl Ruleset {
    /// Creates the ruleset of these chains, in their order.
    pub fn new(Chains { mut chains, .. }: Chains) -> Self {
        let mut all = Sha256::new();
        for chain in &mut chains {
            let mut hash = Sha256::new();
            hash.update(&chain.object);
            for rule in &chain.rules {
                hash.update(rule);
            }
            chain.fact.hash = brief(hash);
            all.update(&chain.fact.hash);
        }
        Self {
            mark: format!("ruleset-{}", brief(all)),
            chains,
        }
    }

    /// Returns the input for `nft -j -f -` that replaces any state of the kernel. Without chains it
    /// deletes the tables.
    pub fn whole(&self) -> String {
        let mut commands = Commands::new();
        for family in FAMILIES {
            // Adding an existing table is no error, but deleting a missing one is.
            let table = json!({"table": {"family": family, "name": TABLE}}).to_string();
            commands.push("add", &table);
            commands.push("delete", &table);
            if !self.chains.is_empty() {
                commands.push("add", &table);
                commands.push("add", &chain(family, &self.mark).to_string());
            }
        }
        for chain in &self.chains {
            commands.push("add", &chain.object);
        }
        for rule in self.chains.iter().flat_map(|chain| &chain.rules) {
            commands.push("add", rule);
        }
        commands.end()
    }

    /// The same where the kernel has `before`; `None` when there is nothing that both have.
    pub fn change(&self, before: &Known) -> Option<String> {
        if self.chains.is_empty() || before.chains.is_empty() {
            return None;
        }
        let of = |(family, name): &Name| chain(family, name).to_string();
        let wanted = self.names();
        let mut commands = Commands::new();
        for name in before.unused.iter().filter(|name| !wanted.contains(name)) {
            commands.push("delete", &of(name));
        }
        let is_new = |chain: &&Chain| before.chains.get(&chain.name) != Some(&chain.fact);
        for new in self.chains.iter().filter(is_new) {
            commands.push("add", &new.object);
            commands.push("flush", &of(&new.name));
        }
        for (name, fact) in before.chains.iter().filter(|(name, _)| !wanted.contains(name)) {
            commands.push("flush", &of(name));
            if fact.is_base {
                commands.push("delete", &of(name));
            }
        }
        for rule in self.chains.iter().filter(is_new).flat_map(|chain| &chain.rules) {
            commands.push("add", rule);
        }
        for family in FAMILIES {
            commands.push("delete", &chain(family, &before.mark).to_string());
            commands.push("add", &chain(family, &self.mark).to_string());
        }
        Some(commands.end())
    }

    /// State of the kernel after [`Self::whole`].
    pub fn known(&self) -> Known {
        let chains = self.chains.iter();
        Known {
            mark: self.mark.clone(),
            chains: chains
                .map(|chain| (chain.name.clone(), chain.fact.clone()))
                .collect(),
            unused: Vec::new(),
        }
    }

    /// State of the kernel after [`Self::change`].
    pub fn known_after(&self, before: &Known) -> Known {
        let wanted = self.names();
        let unused = before
            .chains
            .iter()
            .filter(|(name, fact)| !fact.is_base && !wanted.contains(name));
        Known {
            unused: unused.map(|(name, _)| name.clone()).collect(),
            ..self.known()
        }
    }

    /// State of a kernel whose tables have the chains `listed`; `None` when these are of another
    /// ruleset.
    pub fn known_by(&self, listed: &[Name]) -> Option<Known> {
        let mark = |family: &str| (family.to_owned(), self.mark.clone());
        let marks = FAMILIES.map(mark);
        if !marks.iter().all(|mark| listed.contains(mark)) {
            return None;
        }
        let wanted = self.names();
        let unused = listed
            .iter()
            .filter(|name| !wanted.contains(name) && !marks.contains(name));
        Some(Known {
            unused: unused.cloned().collect(),
            ..self.known()
        })
    }

    fn names(&self) -> BTreeSet<&Name> {
        self.chains.iter().map(|chain| &chain.name).collect()
    }
}

/// A regular chain, without a hook.
pub fn chain(family: &str, name: &str) -> Value {
    json!({"chain": {"family": family, "table": TABLE, "name": name}})
}

/// A document with commands.
struct Commands(String);

impl Commands {
    fn new() -> Self {
        Self(r#"{"nftables":[{"metainfo":{"json_schema_version":1}}"#.to_owned())
    }

    fn push(&mut self, verb: &str, object: &str) {
        for part in [",{\"", verb, "\":", object, "}"] {
            self.0.push_str(part);
        }
    }

    fn end(mut self) -> String {
        self.0.push_str("]}");
        self.0
    }
}

/// 16 digits.
fn brief(hash: Sha256) -> String {
    let bytes = hash.finalize();
    bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A base chain that leads to a chain for each of `ports`, with that many rules.
    fn ruleset(ports: &[(&str, usize)]) -> Ruleset {
        let rule = |chain: &str, number: usize| json!({"rule": {"family": "bridge", "table": TABLE, "chain": chain, "expr": [number]}});
        let mut objects = Chains::default();
        for (port, rules) in ports {
            objects.push(&chain("bridge", port));
            (0..*rules).for_each(|number| objects.push(&rule(port, number)));
        }
        objects.push(
            &json!({"chain": {"family": "bridge", "table": TABLE, "name": "ports", "hook": "prerouting"}}),
        );
        objects.push(&rule("ports", ports.len()));
        Ruleset::new(objects)
    }

    /// "delete a": the operation and its chain; "add a 1" for a rule. Marks are omitted.
    fn steps(commands: &str) -> Vec<String> {
        let commands: Value = serde_json::from_str(commands).unwrap();
        let commands = commands["nftables"].as_array().unwrap().iter().skip(1);
        let steps = commands.map(|command| {
            let (what, object) = command.as_object().unwrap().iter().next().unwrap();
            let (chain, rule) = (&object["chain"]["name"], &object["rule"]);
            match rule["chain"].as_str() {
                Some(chain) => format!("{what} {chain} {}", rule["expr"][0]),
                None => format!("{what} {}", chain.as_str().unwrap_or_default()),
            }
        });
        steps.filter(|step| !step.contains("ruleset-")).collect()
    }

    #[test]
    fn a_new_chain_is_added_with_what_leads_to_it_and_the_others_are_left_alone() {
        let before = ruleset(&[("a", 2)]).known();
        let after = ruleset(&[("a", 2), ("b", 1)]);
        assert_eq!(
            steps(&after.change(&before).unwrap()),
            [
                "add b",
                "flush b",
                "add ports",
                "flush ports",
                "add b 0",
                "add ports 2"
            ]
        );
        assert_eq!(after.known_after(&before), after.known());
    }

    #[test]
    fn a_chain_that_is_not_wanted_is_emptied_and_goes_with_the_next_change() {
        let before = ruleset(&[("a", 2), ("b", 1)]).known();
        let after = ruleset(&[("a", 2)]);
        assert_eq!(
            steps(&after.change(&before).unwrap()),
            ["add ports", "flush ports", "flush b", "add ports 1"]
        );
        let before = after.known_after(&before);
        let next = ruleset(&[("a", 3)]);
        assert_eq!(
            steps(&next.change(&before).unwrap()),
            ["delete b", "add a", "flush a", "add a 0", "add a 1", "add a 2"]
        );
        // Unless it is wanted again.
        let again = ruleset(&[("a", 2), ("b", 1)]);
        assert_eq!(
            steps(&again.change(&before).unwrap()),
            [
                "add b",
                "flush b",
                "add ports",
                "flush ports",
                "add b 0",
                "add ports 2"
            ]
        );
        assert_eq!(again.known_after(&before), again.known());
    }

    #[test]
    fn a_base_chain_that_is_not_wanted_goes_at_once() {
        let mut before = ruleset(&[("a", 1)]).known();
        let fact = Fact {
            hash: "other".into(),
            is_base: true,
        };
        before.chains.insert(("bridge".into(), "egress".into()), fact);
        let after = ruleset(&[("a", 1)]);
        assert_eq!(
            steps(&after.change(&before).unwrap()),
            ["flush egress", "delete egress"]
        );
        assert_eq!(after.known_after(&before), after.known());
    }

    #[test]
    fn a_ruleset_is_known_by_its_mark_and_what_else_is_there_is_unused() {
        let ruleset = ruleset(&[("a", 1)]);
        let name = |family: &str, name: &str| (family.to_owned(), name.to_owned());
        let mut listed = vec![name("bridge", "a"), name("bridge", "ports"), name("bridge", "b")];
        listed.push(name("bridge", &ruleset.mark));
        assert_eq!(ruleset.known_by(&listed), None);
        listed.push(name("inet", &ruleset.mark));
        let known = ruleset.known_by(&listed).unwrap();
        assert!(known.is(&ruleset));
        assert_eq!(known.unused, [name("bridge", "b")]);
    }

    #[test]
    fn without_chains_the_tables_are_taken_away() {
        let none = Ruleset::new(Chains::default());
        assert_eq!(steps(&none.whole()).len(), 4);
        assert_eq!(none.change(&ruleset(&[("a", 1)]).known()), None);
        assert_eq!(ruleset(&[("a", 1)]).change(&none.known()), None);
    }
}
