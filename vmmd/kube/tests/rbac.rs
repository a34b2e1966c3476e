//! Rights of the programs in the manifests.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;

/// Group, resource and verb of each rule of a kind in a manifest of that name.
fn rules(file: &str, kind: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests").join(file);
    let text = fs::read_to_string(path).unwrap();
    let documents = text.split("\n---\n");
    let documents = documents.map(|one| serde_saphyr::from_str::<Value>(one).unwrap());
    let mut found = BTreeSet::new();
    for document in documents.filter(|one| one["kind"] == kind) {
        for rule in document["rules"].as_array().unwrap() {
            let texts = |name: &str| {
                let all = rule[name].as_array().unwrap().iter();
                all.map(|one| one.as_str().unwrap().to_owned())
                    .collect::<Vec<_>>()
            };
            for group in texts("apiGroups") {
                for resource in texts("resources") {
                    for verb in texts("verbs") {
                        found.insert(format!("{group}/{resource} {verb}"));
                    }
                }
            }
        }
    }
    found
}

fn set(rules: &[&str]) -> BTreeSet<String> {
    rules.iter().map(|rule| (*rule).to_owned()).collect()
}

#[test]
fn rights_of_the_agent_are_these() {
    let wanted = [
        "vmmd.dev/virtualmachines get",
        "vmmd.dev/virtualmachines list",
        "vmmd.dev/virtualmachines watch",
        "events.k8s.io/events create",
        "events.k8s.io/events patch",
    ];
    assert_eq!(rules("rbac-agent.yaml", "ClusterRole"), set(&wanted));
    assert!(rules("rbac-agent.yaml", "Role").is_empty());
}

#[test]
fn rights_of_the_controller_are_these() {
    let wanted = [
        "vmmd.dev/virtualmachines get",
        "vmmd.dev/virtualmachines list",
        "vmmd.dev/virtualmachines watch",
        "vmmd.dev/virtualmachines patch",
        "vmmd.dev/virtualmachines/status update",
        "vmmd.dev/virtualmachines/finalizers update",
        "/pods get",
        "/pods list",
        "/pods watch",
        "/pods create",
        "/pods patch",
        "/pods delete",
        "/persistentvolumeclaims get",
        "/nodes list",
        "/nodes watch",
        "policy/poddisruptionbudgets create",
        "policy/poddisruptionbudgets delete",
        "events.k8s.io/events create",
        "events.k8s.io/events patch",
    ];
    assert_eq!(rules("rbac-controller.yaml", "ClusterRole"), set(&wanted));
    let leases = [
        "coordination.k8s.io/leases get",
        "coordination.k8s.io/leases create",
        "coordination.k8s.io/leases update",
    ];
    assert_eq!(rules("rbac-controller.yaml", "Role"), set(&leases));
}
