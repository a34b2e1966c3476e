//! Differences between a manifest and an existing object.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};
use vmmd_api::v1::{self, volume_spec::Source};

use crate::{
    failure::{Code, Failure, Result},
    manifest::{self, disk, emit, network, schema},
    output::value::{json, shown},
};

/// Most differences that are spelled out.
const MAX_DIFFERENCES: usize = 5;

/// Returns the failure for an object that differs from its manifest in immutable fields.
fn of_fixed(kind: &str, name: &str, differences: &[String]) -> Failure {
    let message = format!("{kind}/{name} exists and differs from the manifest in immutable fields");
    let more = differences.len().saturating_sub(MAX_DIFFERENCES);
    let mut details: Vec<_> = differences.iter().take(MAX_DIFFERENCES).cloned().collect();
    if more > 0 {
        details.push(format!("and {more} more"));
    }
    Failure {
        details,
        ..Failure::new(Code::Conflict, message)
    }
    .hint(format!("give the new {kind} another name"))
}

/// Returns the differences in labels and spec between the VM `there` and the VM `now`, as
/// `path: there -> now`. Paths contain the names of list items.
pub fn of_vms(there: &v1::Vm, now: &v1::Vm) -> Result<Vec<String>> {
    let mut sides = [there.clone(), now.clone()];
    sides.iter_mut().for_each(manifest::strip);
    let [there, now] = sides;
    let mut found = Vec::new();
    compare("", &emit::json(&there)?, &emit::json(&now)?, &mut found);
    Ok(found)
}

/// A change that waits for the next start, in the same form.
pub fn of_pending(change: &v1::PendingChange) -> String {
    let (there, now) = (json(change.current.as_ref()), json(change.desired.as_ref()));
    let item = change.path.ends_with(']');
    match (&there, &now) {
        (Json::Null, Json::Object(_)) if item => format!("{}: added", change.path),
        (Json::Object(_), Json::Null) if item => format!("{}: removed", change.path),
        _ => format!("{}: {} -> {}", change.path, shown(&there), shown(&now)),
    }
}

/// Differences between two objects, as `path: there -> wanted`.
#[derive(Debug, Default)]
pub struct Differences {
    /// In immutable fields.
    fixed: Vec<String>,
    /// In the other fields.
    changeable: Vec<String>,
}

impl Differences {
    /// Returns the differences that the daemon can remove; an error for an object with others.
    pub fn of(self, kind: &str, name: &str) -> Result<Vec<String>> {
        match self.fixed.is_empty() {
            true => Ok(self.changeable),
            false => Err(of_fixed(kind, name, &self.fixed)),
        }
    }
}

/// Returns the differences between an existing disk and the wanted one, without a larger size.
pub fn disk_differences(wanted: &v1::Disk, there: &v1::Disk) -> Result<Differences> {
    let (mut wanted, mut there) = (wanted.clone(), there.clone());
    disk::strip(&mut there);
    let (new, old) = (
        wanted.spec.get_or_insert_default(),
        there.spec.get_or_insert_default(),
    );
    if new.size_bytes == 0 || new.size_bytes > old.size_bytes {
        new.size_bytes = old.size_bytes;
    }
    if new.format() == v1::DiskFormat::Unspecified {
        new.format = old.format;
    }
    if new.preallocation() == v1::DiskPreallocation::Unspecified {
        new.preallocation = old.preallocation;
    }
    // Disks of older daemons have no recorded source, except overlays.
    let remembered = matches!(old.source, Some(Source::RawFile(_) | Source::Adopt(_)));
    if !remembered && matches!(new.source, Some(Source::RawFile(_) | Source::Adopt(_))) {
        (new.source, new.any_content) = (old.source.clone(), old.any_content);
    }
    let mut found = Vec::new();
    compare("", &emit::json(&there)?, &emit::json(&wanted)?, &mut found);
    let (changeable, fixed) = found
        .into_iter()
        .partition(|difference: &String| difference.starts_with("metadata."));
    Ok(Differences { fixed, changeable })
}

/// Fields of a network that the daemon does not change.
const FIXED: [&str; 4] = [
    "spec.ipv4Cidr:",
    "spec.ipv4Gateway:",
    "spec.ipv6Cidr:",
    "spec.mtu:",
];

/// Returns the differences between an existing network and the wanted one. Fields that the wanted one leaves to the
/// daemon do not differ.
pub fn network_differences(wanted: &v1::Network, there: &v1::Network) -> Result<Differences> {
    let (mut wanted, mut there) = (wanted.clone(), there.clone());
    network::strip(&mut there);
    let (new, old) = (
        wanted.spec.get_or_insert_default(),
        there.spec.get_or_insert_default(),
    );
    for spec in [&mut *new, &mut *old] {
        if spec.mode() == v1::NetworkMode::Unspecified {
            spec.set_mode(v1::NetworkMode::Nat);
        }
    }
    if new.mtu == 0 {
        new.mtu = old.mtu;
    }
    if new.ipv4_gateway.is_empty() {
        new.ipv4_gateway.clone_from(&old.ipv4_gateway);
    }
    let mut found = Vec::new();
    compare("", &emit::json(&there)?, &emit::json(&wanted)?, &mut found);
    let (fixed, changeable) = found
        .into_iter()
        .partition(|difference: &String| FIXED.iter().any(|field| difference.starts_with(field)));
    Ok(Differences { fixed, changeable })
}

/// Returns the update mask of differences: the fields of the metadata, and those of the spec, a message with the name `spec`.
pub fn mask(differences: &[String], spec: &str) -> Vec<String> {
    let message = schema::message(spec);
    let path = |difference: &String| {
        let path = difference.split([':', '[']).next()?;
        let mut steps = path.split('.');
        let (part, field) = (steps.next()?, steps.next()?);
        let known = message.as_ref().and_then(|message| message.field(field));
        let field = match (part, known) {
            ("spec", Some(known)) => known.proto_name,
            _ => field,
        };
        Some(format!("{part}.{field}"))
    };
    let paths: BTreeSet<_> = differences.iter().filter_map(path).collect();
    paths.into_iter().collect()
}

/// A list whose items have names, by these.
fn by_name(items: &[Json]) -> Option<BTreeMap<&str, &Json>> {
    let named: Option<BTreeMap<_, _>> = items
        .iter()
        .map(|item| Some((item.get("name")?.as_str()?, item)))
        .collect();
    named.filter(|named| named.len() == items.len())
}

fn compare(path: &str, there: &Json, wanted: &Json, found: &mut Vec<String>) {
    match (there, wanted) {
        (Json::Object(a), Json::Object(b)) => {
            let mut keys: Vec<_> = a
                .keys()
                .chain(b.keys().filter(|key| !a.contains_key(*key)))
                .collect();
            keys.sort_unstable();
            for key in keys {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let none = &Json::Null;
                compare(
                    &path,
                    a.get(key).unwrap_or(none),
                    b.get(key).unwrap_or(none),
                    found,
                );
            }
        }
        (Json::Null, Json::Array(_)) => compare(path, &Json::Array(Vec::new()), wanted, found),
        (Json::Array(_), Json::Null) => compare(path, there, &Json::Array(Vec::new()), found),
        (Json::Null, Json::Object(_)) => compare(path, &Json::Object(Map::new()), wanted, found),
        (Json::Object(_), Json::Null) => compare(path, there, &Json::Object(Map::new()), found),
        (Json::Array(a), Json::Array(b)) => match (by_name(a), by_name(b)) {
            (Some(a), Some(b)) => {
                let names: BTreeSet<_> = a.keys().chain(b.keys()).collect();
                for name in names {
                    let path = format!("{path}[{name}]");
                    match (a.get(name), b.get(name)) {
                        (Some(a), Some(b)) => compare(&path, a, b, found),
                        (Some(_), None) => found.push(format!("{path}: removed")),
                        (None, _) => found.push(format!("{path}: added")),
                    }
                }
            }
            _ if a == b => {}
            _ => found.push(format!("{path}: {} items -> {} items", a.len(), b.len())),
        },
        (a, b) if a == b => {}
        (a, b) => found.push(format!("{path}: {} -> {}", shown(a), shown(b))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Object;

    fn vm(spec: &str) -> v1::Vm {
        let text = format!(
            "apiVersion: vmmd/v1\nkind: Vm\nmetadata: {{name: a}}\nspec: {{cpu: {{cores: 1}}, \
             memory: {{sizeBytes: 256Mi}}, boot: {{linux: {{kernel: /k}}}}{spec}}}"
        );
        match manifest::parse(&text, "test").unwrap().remove(0).object {
            Object::Vm(vm) => *vm,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_difference_is_named_with_both_values() {
        let there = vm(
            ", nics: [{name: eth0, bridge: br0}], disks: [{name: a, path: /a, format: raw}, \
             {name: b, path: /b, format: raw, queues: 2}]",
        );
        let mut now = vm(
            ", nics: [{name: eth0, bridge: br1}], disks: [{name: b, path: /b, format: raw, rateLimit: \
             {bytesPerSecond: 1Mi}}, {name: c, path: /c, format: raw}]",
        );
        let metadata = now.metadata.as_mut().unwrap();
        (metadata.uid, metadata.generation) = ("u".into(), 3);
        metadata.labels.insert("tier".into(), "front".into());
        now.status = Some(v1::VmStatus::default());
        let expected = [
            "metadata.labels.tier: not set -> front",
            "spec.disks[a]: removed",
            "spec.disks[b].queues: 2 -> not set",
            "spec.disks[b].rateLimit.bytesPerSecond: not set -> 1048576",
            "spec.disks[c]: added",
            "spec.nics[eth0].bridge: br0 -> br1",
        ];
        assert_eq!(of_vms(&there, &now).unwrap(), expected);
        assert_eq!(of_vms(&now, &now).unwrap(), [""; 0]);
    }

    #[test]
    fn pending_change_has_the_same_form() {
        let change = |path: &str, current: &str, desired: &str| v1::PendingChange {
            path: path.into(),
            current: serde_json::from_str(current).ok(),
            desired: serde_json::from_str(desired).ok(),
            ..Default::default()
        };
        for (change, expected) in [
            (change("spec.cpu.cores", "2", "4"), "spec.cpu.cores: 2 -> 4"),
            (
                change("spec.boot.linux.initrd", "", "\"/i\""),
                "spec.boot.linux.initrd: not set -> /i",
            ),
            (
                change("spec.disks[a]", "{\"name\":\"a\"}", ""),
                "spec.disks[a]: removed",
            ),
            (
                change("spec.disks[a]", "", "{\"name\":\"a\"}"),
                "spec.disks[a]: added",
            ),
        ] {
            assert_eq!(of_pending(&change), expected);
        }
    }
}
