//! The table against the protocol files and the documentation.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;
use prost_types::{DescriptorProto, FileDescriptorSet, MethodDescriptorProto, field_descriptor_proto::Type};

use super::*;
use crate::auth::object::REQUEST_ID;

/// All methods that are served, by path, and all messages, by name.
fn served() -> (
    BTreeMap<String, MethodDescriptorProto>,
    BTreeMap<String, DescriptorProto>,
) {
    let (mut methods, mut messages) = (BTreeMap::new(), BTreeMap::new());
    for set in [
        proto::DESCRIPTORS,
        tonic_health::pb::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
    ] {
        for file in FileDescriptorSet::decode(set).unwrap().file {
            let package = file.package().to_owned();
            for service in &file.service {
                for method in &service.method {
                    let path = format!("{package}.{}/{}", service.name(), method.name());
                    methods.insert(path, method.clone());
                }
            }
            for message in &file.message_type {
                messages.insert(format!(".{package}.{}", message.name()), message.clone());
            }
        }
    }
    (methods, messages)
}

#[test]
fn every_method_has_one_rule_and_every_rule_a_method() {
    let (methods, _) = served();
    let ruled: BTreeSet<_> = RULES.iter().map(|rule| rule.method.to_owned()).collect();
    assert_eq!(ruled.len(), RULES.len(), "a method has two rules");
    let methods: BTreeSet<_> = methods.into_keys().collect();
    assert!(methods.len() > 30, "{methods:?}");
    let without: Vec<_> = methods.difference(&ruled).collect();
    assert!(without.is_empty(), "methods without a rule: {without:?}");
    let gone: Vec<_> = ruled.difference(&methods).collect();
    assert!(gone.is_empty(), "rules without a method: {gone:?}");
}

#[test]
fn what_rules_say_of_the_messages_is_so() {
    let (methods, messages) = served();
    for rule in RULES {
        let method = &methods[rule.method];
        assert_eq!(rule.stream, method.client_streaming(), "{}", rule.method);
        let request = &messages[method.input_type()];
        let id = request.field.iter().find(|field| field.name() == "request_id");
        assert!(
            id.is_none_or(|id| id.number() == i32::try_from(REQUEST_ID).unwrap()),
            "{}",
            rule.method
        );
        assert!(
            id.is_none() || rule.changes.is_some(),
            "{} changes something",
            rule.method
        );
        let Some(object) = rule.audited() else { continue };
        let mut message = Some(request);
        for (index, number) in object.path.iter().enumerate() {
            let fields = &message
                .unwrap_or_else(|| panic!("{}: no message", rule.method))
                .field;
            let number = i32::try_from(*number).unwrap();
            let field = fields.iter().find(|field| field.number() == number).unwrap();
            message = messages.get(field.type_name());
            if index + 1 == object.path.len() {
                assert_eq!(field.r#type(), Type::String, "{}", rule.method);
                assert!(["name", "vm", "id"].contains(&field.name()), "{}", rule.method);
            }
        }
    }
}

#[test]
fn roles_contain_each_other_and_a_peer_is_apart() {
    for rule in RULES {
        for (less, more) in [(Role::Viewer, Role::Operator), (Role::Operator, Role::Admin)] {
            assert!(!rule.admits(less) || rule.admits(more), "{}", rule.method);
        }
        assert!(rule.admits(Role::Admin), "{}", rule.method);
        assert!(
            !(rule.peer && rule.changes.is_some()),
            "{}: peers change nothing",
            rule.method
        );
    }
    assert!(find("/vmmd.v1.VmService/GetVm").is_some());
    for path in ["vmmd.v1.VmService/GetVm", "/vmmd.v1.VmService/getVm", "/", ""] {
        assert!(find(path).is_none(), "{path}");
    }
}

#[test]
fn the_documented_table_is_this_one() {
    let mut table =
        String::from("| method | viewer | operator | admin | peer | audited |\n|---|---|---|---|---|---|\n");
    for rule in RULES {
        let yes = |yes: bool| if yes { "yes" } else { "" };
        let method = rule.method.trim_start_matches("vmmd.v1.");
        table += &format!(
            "| `{method}` | {} | {} | {} | {} | {} |\n",
            yes(rule.admits(Role::Viewer)),
            yes(rule.admits(Role::Operator)),
            yes(rule.admits(Role::Admin)),
            yes(rule.admits(Role::Peer)),
            yes(rule.audited().is_some())
        );
    }
    let page = include_str!("../../../../docs/src/security.md");
    assert!(
        page.contains(&table),
        "docs/src/security.md should have this table:\n{table}"
    );
}
