//! What differs between a manifest and what is there.

use std::collections::BTreeMap;

use proto::v1::{self, create_disk_request::Source, set_rate_limit_request::Target};
use serde_json::Value as Json;

use crate::{
    failure::{Code, Failure, Result},
    manifest::{self, disk, emit},
};

/// Most differences that are spelled out.
const MAX_DIFFERENCES: usize = 5;

/// Says how a VM differs from its manifest, and what helps.
pub fn of_vm(name: &str, differences: &[String]) -> Failure {
    let message = format!("vm/{name} exists and differs from the manifest in what can't be changed yet");
    let hint = if differences.iter().all(|text| text.starts_with("spec.disks: ")) {
        format!(
            "`vmmctl detach {name} DISK` takes a disk away, or delete the VM (its disks stay) and apply again"
        )
    } else {
        format!("delete it (`vmmctl delete {name}`; its disks stay) and apply again")
    };
    failure(message, differences).hint(hint)
}

/// Says how a disk differs from its manifest in what can't be changed.
pub fn of_disk(name: &str, differences: &[String]) -> Failure {
    let message = format!("disk/{name} exists and differs from the manifest in what can't be changed");
    failure(message, differences).hint("give the new disk another name")
}

fn failure(message: String, differences: &[String]) -> Failure {
    let more = differences.len().saturating_sub(MAX_DIFFERENCES);
    let mut details: Vec<_> = differences.iter().take(MAX_DIFFERENCES).cloned().collect();
    if more > 0 {
        details.push(format!("and {more} more"));
    }
    Failure {
        details,
        ..Failure::new(Code::Conflict, message)
    }
}

/// What makes the VM that is there the one that is wanted.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// Disks that only the manifest has, each with its place there.
    pub attach: Vec<(usize, v1::DiskSpec)>,
    /// Limits that are others now.
    pub limits: Vec<(Target, v1::RateLimit)>,
    /// What can't be changed, as `path: there -> wanted`.
    pub others: Vec<String>,
}

/// How the VM that is wanted differs from the one that is there.
pub fn vm_changes(wanted: &v1::Vm, there: &v1::Vm) -> Result<Changes> {
    let mut there = there.clone();
    let mut changes = Changes::default();
    if let (Some(wanted), Some(there)) = (&wanted.spec, &mut there.spec) {
        plan(wanted, there, &mut changes);
    }
    changes.others = vm_differences(wanted, there)?;
    Ok(changes)
}

/// Notes what can be changed, and changes it in `there`.
fn plan(wanted: &v1::VmSpec, there: &mut v1::VmSpec, changes: &mut Changes) {
    for (index, disk) in wanted.disks.iter().enumerate() {
        match there.disks.iter_mut().find(|other| other.name == disk.name) {
            None => {
                changes.attach.push((index, disk.clone()));
                there.disks.push(disk.clone());
            }
            Some(other) if disk.rate_group.is_empty() && other.rate_group.is_empty() => {
                let (old, new) = (
                    other.rate_limit.unwrap_or_default(),
                    disk.rate_limit.unwrap_or_default(),
                );
                if old != new {
                    changes.limits.push((Target::Disk(disk.name.clone()), new));
                    other.rate_limit = disk.rate_limit;
                }
            }
            Some(_) => {}
        }
    }
    // Disks keep the order in which they were attached.
    let place = |name: &str| wanted.disks.iter().position(|disk| disk.name == name);
    there
        .disks
        .sort_by_key(|disk| place(&disk.name).unwrap_or(usize::MAX));
    for group in &wanted.rate_groups {
        let same = there
            .rate_groups
            .iter_mut()
            .find(|other| other.name == group.name);
        if let Some(other) = same {
            let (old, new) = (other.limit.unwrap_or_default(), group.limit.unwrap_or_default());
            if old != new {
                changes.limits.push((Target::Group(group.name.clone()), new));
            }
            other.limit = group.limit;
        }
    }
}

/// What differs between the VM that is wanted and the one that is there, as `path: there -> wanted`.
fn vm_differences(wanted: &v1::Vm, mut there: v1::Vm) -> Result<Vec<String>> {
    let mut wanted = wanted.clone();
    manifest::strip(&mut there);
    // What the daemon fills in when the manifest leaves it open.
    if let (Some(wanted), Some(there)) = (&mut wanted.spec, &there.spec) {
        adopt(wanted, there);
    }
    for vm in [&mut wanted, &mut there] {
        for nic in vm.spec.iter_mut().flat_map(|spec| &mut spec.nics) {
            nic.mac.make_ascii_lowercase();
        }
    }
    let mut found = Vec::new();
    compare("", &emit::json(&there)?, &emit::json(&wanted)?, &mut found);
    Ok(found)
}

/// The same for a disk, but for a larger size, which it can be given.
pub fn disk_differences(wanted: &v1::CreateDiskRequest, there: &v1::Disk) -> Result<Vec<String>> {
    let mut disk = wanted.disk.clone().unwrap_or_default();
    let state = there.state.clone().unwrap_or_default();
    if disk.size_bytes == 0 || disk.size_bytes > there.size_bytes {
        disk.size_bytes = there.size_bytes;
    }
    let below = match &wanted.source {
        Some(Source::OverlayOf(below)) => below.as_str(),
        // An overlay whose manifest does not say so is none; what was copied into a disk is not known later.
        Some(Source::RawFile(_)) | None => "",
    };
    if disk.format() == v1::DiskFormat::Unspecified {
        disk.format = there.format;
    }
    if disk.preallocation() == v1::DiskPreallocation::Unspecified {
        disk.preallocation = there.preallocation;
    }
    disk.state = Some(v1::DiskState {
        backing_disk: below.to_owned(),
        ..v1::DiskState::default()
    });
    let mut there = there.clone();
    there.uid.clear();
    there.state = Some(v1::DiskState {
        backing_disk: state.backing_disk,
        ..v1::DiskState::default()
    });
    let mut found = Vec::new();
    compare("", &disk::manifest(&there)?, &disk::manifest(&disk)?, &mut found);
    found.retain(|difference| !difference.starts_with("status."));
    Ok(found)
}

fn adopt(wanted: &mut v1::VmSpec, there: &v1::VmSpec) {
    for nic in wanted.nics.iter_mut().filter(|nic| nic.mac.is_empty()) {
        if let Some(same) = there.nics.iter().find(|other| other.name == nic.name) {
            nic.mac.clone_from(&same.mac);
        }
    }
    for disk in &mut wanted.disks {
        if let Some(same) = there.disks.iter().find(|other| other.name == disk.name) {
            adopt_disk(disk, same);
        }
    }
    if let (Some(wanted), Some(there)) = (&mut wanted.memory, &there.memory)
        && wanted.backing() == v1::MemoryBacking::Unspecified
    {
        wanted.backing = there.backing;
    }
}

fn adopt_disk(wanted: &mut v1::DiskSpec, there: &v1::DiskSpec) {
    if wanted.serial.is_empty() {
        wanted.serial.clone_from(&there.serial);
    }
    // Of a disk that the node keeps it knows the format; an ISO image is read-only in any case.
    if wanted.format() == v1::DiskFormat::Unspecified {
        wanted.format = there.format;
    }
    if wanted.format() == v1::DiskFormat::Iso {
        wanted.read_only = there.read_only;
    }
    for (wanted, there) in [
        (&mut wanted.cache, there.cache),
        (&mut wanted.on_error, there.on_error),
    ] {
        if *wanted == 0 {
            *wanted = there;
        }
    }
    for (wanted, there) in [
        (&mut wanted.queues, there.queues),
        (&mut wanted.logical_block_bytes, there.logical_block_bytes),
    ] {
        if *wanted == 0 {
            *wanted = there;
        }
    }
    let none = v1::RateLimit::default();
    if wanted.rate_limit.unwrap_or(none) == there.rate_limit.unwrap_or(none) {
        wanted.rate_limit = there.rate_limit;
    }
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
        (Json::Array(a), Json::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                compare(&format!("{path}[{index}]"), a, b, found);
            }
        }
        (Json::Null, Json::Array(_)) => compare(path, &Json::Array(Vec::new()), wanted, found),
        (Json::Array(_), Json::Null) => compare(path, there, &Json::Array(Vec::new()), found),
        (Json::Array(a), Json::Array(b)) => match (by_name(a), by_name(b)) {
            (Some(a), Some(b)) => {
                for name in a.keys().filter(|name| !b.contains_key(*name)) {
                    found.push(format!("{path}: {name} is not in the manifest"));
                }
                for name in b.keys().filter(|name| !a.contains_key(*name)) {
                    found.push(format!("{path}: {name} is only in the manifest"));
                }
            }
            _ => found.push(format!("{path}: {} items -> {} items", a.len(), b.len())),
        },
        (a, b) if a == b => {}
        (a, b) => found.push(format!("{path}: {} -> {}", shown(a), shown(b))),
    }
}

fn shown(json: &Json) -> String {
    match json {
        Json::Null => "not set".into(),
        Json::String(text) => text.clone(),
        json => json.to_string(),
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
            Object::Disk(_) => panic!("a disk"),
        }
    }

    #[test]
    fn what_the_daemon_filled_in_is_no_difference() {
        let wanted = vm(", nics: [{name: eth0, bridge: br0}]");
        let mut there = wanted.clone();
        there.metadata.as_mut().unwrap().uid = "u".into();
        there.metadata.as_mut().unwrap().generation = 3;
        there.status = Some(v1::VmStatus::default());
        there.spec.as_mut().unwrap().nics[0].mac = "52:54:00:00:00:01".into();
        there.spec.as_mut().unwrap().memory.as_mut().unwrap().backing = 1;
        assert_eq!(vm_changes(&wanted, &there), Ok(Changes::default()));
    }

    #[test]
    fn every_difference_is_named_with_both_values() {
        let there = vm(", nics: [{name: eth0, bridge: br0, mac: '52:54:00:00:00:01'}]");
        let wanted = vm(", nics: [{name: eth0, bridge: br1, mac: '52:54:00:00:00:0a'}]");
        let expected = [
            "spec.nics[0].bridge: br0 -> br1",
            "spec.nics[0].mac: 52:54:00:00:00:01 -> 52:54:00:00:00:0a",
        ];
        assert_eq!(vm_changes(&wanted, &there).unwrap().others, expected);
    }

    const DATA: &str = "{name: data, disk: data, onError: pause}";

    #[test]
    fn disks_are_added_and_limits_changed() {
        let there = vm(
            ", disks: [{name: b, path: /b, format: raw, rateLimit: {bytesPerSecond: 1Mi}}, \
                        {name: c, path: /c, format: raw}], rateGroups: [{name: g, limit: {burstBytes: 0}}]",
        );
        let wanted = vm(&format!(
            ", disks: [{DATA}, {{name: c, path: /c, format: raw, rateLimit: {{}}}}, \
             {{name: b, path: /b, format: raw, rateLimit: {{bytesPerSecond: 2Mi}}}}], \
             rateGroups: [{{name: g, limit: {{operationsPerSecond: 5}}}}]"
        ));
        let data = wanted.spec.as_ref().unwrap().disks[0].clone();
        let limit = |bytes_per_second, operations_per_second| v1::RateLimit {
            bytes_per_second,
            operations_per_second,
            ..v1::RateLimit::default()
        };
        let expected = Changes {
            attach: vec![(0, data)],
            limits: vec![
                (Target::Disk("b".into()), limit(2 << 20, 0)),
                (Target::Group("g".into()), limit(0, 5)),
            ],
            others: vec![],
        };
        assert_eq!(vm_changes(&wanted, &there), Ok(expected));
    }

    #[test]
    fn what_the_daemon_chose_for_a_disk_is_no_difference() {
        let wanted = vm(&format!(
            ", disks: [{DATA}, {{name: cd, path: /a.iso, format: iso}}]"
        ));
        let mut there = wanted.clone();
        let disks = &mut there.spec.as_mut().unwrap().disks;
        disks[0].format = v1::DiskFormat::Qcow2.into();
        disks[0].cache = v1::DiskCache::None.into();
        disks[0].queues = 2;
        disks[0].logical_block_bytes = 512;
        disks[0].serial = "data".into();
        disks[0].rate_limit = Some(v1::RateLimit::default());
        disks[1].read_only = true;
        assert_eq!(vm_changes(&wanted, &there), Ok(Changes::default()));
    }

    #[test]
    fn disks_are_never_taken_away_or_exchanged() {
        let wanted = vm(", disks: [{name: b, path: /b, format: raw}]");
        let there = vm(&format!(
            ", disks: [{{name: b, path: /other, format: raw}}, {DATA}]"
        ));
        let changes = vm_changes(&wanted, &there).unwrap();
        assert_eq!(changes.others, ["spec.disks: data is not in the manifest"]);
        let there = vm(", disks: [{name: b, path: /other, format: raw}]");
        let changes = vm_changes(&wanted, &there).unwrap();
        assert_eq!(changes.others, ["spec.disks[0].path: /other -> /b"]);
    }
}
