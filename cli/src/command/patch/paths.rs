//! Fields that a patch changes, as paths of an update mask. All other fields stay unchanged,
//! including fields unknown to this vmmctl.

use serde_json::Value as Json;

use crate::args::patch::Step;

/// Manifest fields that only the daemon sets; a patch ignores them, as a manifest does.
const IGNORED: [&str; 6] = [
    "apiVersion",
    "kind",
    "status",
    "metadata.uid",
    "metadata.generation",
    "metadata.createTime",
];
/// Maps, whose keys are named in brackets.
const MAPS: [&str; 2] = ["metadata.labels", "metadata.annotations"];

/// Returns the paths of a merge patch: a list, a value and a null are each one change.
pub(super) fn of_merge(patch: &Json) -> Vec<String> {
    let mut paths = Vec::new();
    walk(patch, String::new(), &mut paths);
    paths
}

fn walk(patch: &Json, path: String, paths: &mut Vec<String>) {
    match patch {
        Json::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                walk(value, field(&path, key), paths);
            }
        }
        _ if path.is_empty() || is_ignored(&path) => {}
        _ => paths.push(path),
    }
}

/// Returns the path of the steps to a field of the VM `json`; list items appear by name. `value` is
/// the new value of the field.
pub(super) fn of_steps(json: &Json, steps: &[Step], value: &Json) -> Option<String> {
    let (mut path, mut at) = (String::new(), Some(json));
    for (index, step) in steps.iter().enumerate() {
        match step {
            Step::Field(key) => {
                path = field(&path, key);
                at = at.and_then(|at| at.get(key));
            }
            Step::Item(item) => {
                let items = at.and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
                let named = |other: &&Json| name_of(other) == Some(item.as_str());
                let numbered = || item.parse::<usize>().ok().and_then(|number| items.get(number));
                let found = items.iter().find(named).or_else(numbered);
                let Some(name) = found.and_then(name_of) else {
                    break;
                };
                // A renamed item is another item.
                let renamed = name_of(value).is_some_and(|new| new != name);
                if index + 1 == steps.len() && renamed {
                    break;
                }
                path = format!("{path}[{name}]");
                at = found;
            }
        }
    }
    (!is_ignored(&path)).then_some(path)
}

fn field(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path if MAPS.contains(&path) => format!("{path}[{key}]"),
        path => format!("{path}.{key}"),
    }
}

fn name_of(item: &Json) -> Option<&str> {
    item.get("name")?.as_str()
}

fn is_ignored(path: &str) -> bool {
    let below = |whole: &str| {
        path.strip_prefix(whole)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    IGNORED.iter().any(|whole| below(whole))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::args::patch::Set;

    #[test]
    fn merge_patch_changes_its_leaves() {
        let patch = json!({
            "apiVersion": "vmmd/v1", "status": {"phase": "RUNNING"},
            "metadata": {"uid": "u", "labels": {"a.b/c": "1", "old": null}, "owner": "me"},
            "spec": {"cpu": {"cores": 4}, "disks": [{"name": "root"}], "balloon": null, "clock": {}},
        });
        let expected = [
            "metadata.labels[a.b/c]",
            "metadata.labels[old]",
            "metadata.owner",
            "spec.balloon",
            "spec.clock",
            "spec.cpu.cores",
            "spec.disks",
        ];
        assert_eq!(of_merge(&patch), expected);
        assert!(of_merge(&json!({})).is_empty());
    }

    #[test]
    fn set_field_is_one_change_with_item_names() {
        let there = json!({"spec": {"disks": [{"name": "root"}, {"name": "data"}]}});
        for (set, path) in [
            ("spec.cpu.cores=4", "spec.cpu.cores"),
            ("spec.disks[data].readOnly=true", "spec.disks[data].readOnly"),
            ("spec.disks[0].queues=2", "spec.disks[root].queues"),
            ("spec.disks[1]=null", "spec.disks[data]"),
            ("spec.disks[data]={name: other}", "spec.disks"),
            ("spec.disks[data]={name: data, path: /d}", "spec.disks[data]"),
            (r"metadata.labels.a\.b=1", "metadata.labels[a.b]"),
            ("metadata.labels=null", "metadata.labels"),
        ] {
            let parsed: Set = set.parse().unwrap();
            assert_eq!(
                of_steps(&there, &parsed.path, &parsed.value).as_deref(),
                Some(path),
                "{set}"
            );
        }
        let parsed: Set = "metadata.uid=x".parse().unwrap();
        assert_eq!(of_steps(&there, &parsed.path, &parsed.value), None);
    }
}
