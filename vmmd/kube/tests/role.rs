//! The role `agent` of vmmd has the methods that the agent calls, and no others.

use std::{collections::BTreeSet, fs, path::Path};

use vmmd_api::rule::METHOD_RULES;

/// The clients of `Daemon`, and their services.
const CLIENTS: [(&str, &str); 8] = [
    ("vms", "VmService"),
    ("nodes", "NodeService"),
    ("events", "EventService"),
    ("disks", "DiskService"),
    ("migrations", "MigrationService"),
    ("images", "ImageService"),
    ("operations", "OperationService"),
    ("pods", "PodService"),
];

/// All sources below a folder, each without white space.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            found.push(text.split_whitespace().collect());
        }
    }
}

/// `GetVm` as the generated client calls it: `get_vm`.
fn snake(method: &str) -> String {
    let mut name = String::new();
    for letter in method.chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

#[test]
fn rules_for_agents_are_of_the_methods_that_the_agent_calls() {
    let mut texts = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut texts);
    let clients = texts.iter().filter(|text| text.contains("ServiceClient::new("));
    assert_eq!(clients.count(), 1, "clients of vmmd are made in daemon.rs alone");
    let called = METHOD_RULES.iter().filter(|rule| {
        let (service, method) = rule.method.split_once('/').unwrap();
        let of = |(_, name): &&(&str, &str)| service.ends_with(&format!(".{name}"));
        CLIENTS.iter().find(of).is_some_and(|(field, _)| {
            let call = format!(".{field}.clone().{}(", snake(method));
            texts.iter().any(|text| text.contains(&call))
        })
    });
    let called: BTreeSet<_> = called.map(|rule| rule.method).collect();
    let allowed = METHOD_RULES.iter().filter(|rule| rule.agents);
    let allowed: BTreeSet<_> = allowed.map(|rule| rule.method).collect();
    assert_eq!(allowed, called);
    assert!(allowed.contains("vmmd.v1.VmService/CreateVm"), "{allowed:?}");
}
