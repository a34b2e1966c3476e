//! Firewalls that the NICs of a network share.

use std::collections::BTreeSet;

use vmmd_api::v1;

use crate::{Violations, firewall::Firewall, name::Name};

/// Most security groups of a network.
pub const MAX_GROUPS: usize = 32;
/// Most security groups of a NIC.
pub const MAX_GROUPS_OF_A_NIC: usize = 8;

/// A firewall that NICs name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityGroup {
    /// Unique in the network.
    pub name: Name,
    /// Connections of the guests. A direction without a list is not that of the group.
    pub firewall: Firewall,
}

/// Validates the security groups of a network; `field` is their path.
pub(super) fn groups(found: &mut Violations, field: &str, wire: &[v1::SecurityGroup]) -> Vec<SecurityGroup> {
    if wire.len() > MAX_GROUPS {
        found.add(
            field,
            format_args!("at most {MAX_GROUPS} groups, are {}", wire.len()),
        );
        return Vec::new();
    }
    let (mut groups, mut names) = (Vec::new(), BTreeSet::new());
    for (index, group) in wire.iter().enumerate() {
        let at = format!("{field}[{index}]");
        if group.ingress.is_none() && group.egress.is_none() {
            found.add(&at, "must have rules: give `ingress`, `egress` or both");
        }
        let wire = v1::NicFirewall {
            ingress: group.ingress.clone(),
            egress: group.egress.clone(),
        };
        let firewall = Firewall::new(found, &at, &wire);
        let at = format!("{at}.name");
        if let Some(name) = name(found, &at, &group.name, &mut names) {
            groups.push(SecurityGroup { name, firewall });
        }
    }
    groups
}

/// Validates the names of a NIC's security groups; `field` is their path.
pub(crate) fn names(found: &mut Violations, field: &str, wire: &[String]) -> Vec<Name> {
    if wire.len() > MAX_GROUPS_OF_A_NIC {
        let wrong = format_args!("at most {MAX_GROUPS_OF_A_NIC} groups, are {}", wire.len());
        found.add(field, wrong);
        return Vec::new();
    }
    let mut seen = BTreeSet::new();
    let numbered = wire.iter().enumerate();
    let names =
        numbered.filter_map(|(index, text)| name(found, &format!("{field}[{index}]"), text, &mut seen));
    names.collect()
}

/// A name that is not among the `seen` ones.
fn name(found: &mut Violations, field: &str, text: &str, seen: &mut BTreeSet<Name>) -> Option<Name> {
    match Name::try_from(text) {
        Ok(name) if !seen.insert(name.clone()) => {
            found.add(field, format_args!("\"{name}\" is given twice"));
            None
        }
        Ok(name) => Some(name),
        Err(error) => {
            found.add(field, error);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str) -> v1::SecurityGroup {
        v1::SecurityGroup {
            name: name.into(),
            ingress: Some(v1::NicRules::default()),
            egress: None,
        }
    }

    #[test]
    fn groups_have_distinct_names_and_valid_rules() {
        let check = |wire: &[v1::SecurityGroup]| {
            let mut found = Violations::default();
            (groups(&mut found, "g", wire).len(), found.to_string())
        };
        assert_eq!(check(&[group("web"), group("db")]), (2, String::new()));
        let bad_rule = v1::NicRule {
            addresses: vec!["x".into()],
            ..v1::NicRule::default()
        };
        for (wire, expected) in [
            (group("Web"), "g[1].name: must be 1 to 63"),
            (group("web"), "g[1].name: \"web\" is given twice"),
            (
                v1::SecurityGroup {
                    ingress: None,
                    ..group("db")
                },
                "g[1]: must have rules",
            ),
            (
                v1::SecurityGroup {
                    egress: Some(v1::NicRules {
                        allow: vec![bad_rule],
                    }),
                    ..group("db")
                },
                "g[1].egress.allow[0].addresses[0]",
            ),
        ] {
            let (_, said) = check(&[group("web"), wire]);
            assert!(said.contains(expected), "{expected}: {said}");
        }
        assert!(check(&vec![group("web"); 33]).1.contains("at most 32"));
    }

    #[test]
    fn nic_names_each_group_once() {
        let check = |texts: &[&str]| {
            let texts: Vec<_> = texts.iter().map(|text| (*text).to_owned()).collect();
            let mut found = Violations::default();
            (names(&mut found, "n", &texts).len(), found.to_string())
        };
        assert_eq!(check(&["web", "db"]), (2, String::new()));
        assert!(check(&["web", "web"]).1.contains("n[1]: \"web\" is given twice"));
        assert!(check(&["a b"]).1.contains("n[0]: must be"));
        assert!(check(&["a"; 9]).1.contains("at most 8"));
    }
}
