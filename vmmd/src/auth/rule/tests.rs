//! Comparison of the rules with the served methods and the documentation.

use std::collections::BTreeMap;

use prost::Message;
use prost_types::FileDescriptorSet;

use super::*;

/// The paths of all methods that are served, and whether their clients send streams.
fn served() -> BTreeMap<String, bool> {
    let mut methods = BTreeMap::new();
    for set in [
        vmmd_api::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
    ] {
        for file in FileDescriptorSet::decode(set).unwrap().file {
            let package = file.package().to_owned();
            for service in &file.service {
                for method in &service.method {
                    let path = format!("{package}.{}/{}", service.name(), method.name());
                    methods.insert(path, method.client_streaming());
                }
            }
        }
    }
    methods
}

#[test]
fn every_method_has_one_rule_and_every_rule_a_method() {
    let methods = served();
    assert!(methods.len() > 30, "{methods:?}");
    let ruled: BTreeMap<_, _> = RULES
        .iter()
        .map(|rule| (rule.method.to_owned(), rule.stream))
        .collect();
    assert_eq!(ruled.len(), RULES.len(), "a method has two rules");
    assert_eq!(ruled, methods);
}

#[test]
fn reads_that_wait_for_others_have_turns_of_their_own() {
    let looks = RULES.iter().filter(|rule| rule.read == Some(Read::Look));
    let mut looks: Vec<_> = looks.map(|rule| rule.method).collect();
    looks.sort_unstable();
    assert_eq!(looks, LOOKS);
    assert_eq!(find("/vmmd.v1.VmService/GetVm").unwrap().read, Some(Read::Known));
    for method in ["grpc.health.v1.Health/Check", "vmmd.v1.VmService/CreateVm"] {
        assert_eq!(find(&format!("/{method}")).unwrap().read, None, "{method}");
    }
}

#[test]
fn roles_contain_each_other_and_a_peer_and_an_agent_are_apart() {
    for rule in RULES.iter() {
        for (less, more) in [(Role::Viewer, Role::Operator), (Role::Operator, Role::Admin)] {
            assert!(!rule.admits(less) || rule.admits(more), "{}", rule.method);
        }
        assert!(rule.admits(Role::Admin), "{}", rule.method);
    }
    assert!(find("/vmmd.v1.VmService/GetVm").is_some());
    for path in ["vmmd.v1.VmService/GetVm", "/vmmd.v1.VmService/getVm", "/", ""] {
        assert!(find(path).is_none(), "{path}");
    }
}

#[test]
fn the_documented_table_is_this_one() {
    let mut table = String::from(
        "| method | viewer | operator | admin | agent | peer | audited |\n|---|---|---|---|---|---|---|\n",
    );
    for rule in RULES.iter() {
        let yes = |yes: bool| if yes { "yes" } else { "" };
        let of = |role: Role| match yes(rule.admits(role)) {
            "yes" if !role.contains(rule.whole) => "by mask",
            word => word,
        };
        let method = rule.method.trim_start_matches("vmmd.v1.");
        table += &format!(
            "| `{method}` | {} | {} | {} | {} | {} | {} |\n",
            of(Role::Viewer),
            of(Role::Operator),
            of(Role::Admin),
            yes(rule.admits(Role::Agent)),
            yes(rule.admits(Role::Peer)),
            yes(rule.audited.is_some())
        );
    }
    let page = include_str!("../../../../docs/src/security.md");
    assert!(
        page.contains(&table),
        "docs/src/security.md should have this table:\n{table}"
    );
}
