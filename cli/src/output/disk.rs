//! Disks for people: those of the node, and those of a VM.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use vmmd_api::v1::{self, volume_spec::Source};

use super::{
    Show, age,
    describe::{Lines, bytes},
    vm::camel,
};
use crate::{
    failure::Result,
    manifest::{emit, quantity, schema},
};

impl Show for v1::Disk {
    const SCHEMA: &'static str = schema::DISK;

    fn columns(wide: bool) -> Vec<&'static str> {
        let mut headers = vec!["NAME", "PHASE", "FORMAT", "SIZE", "ALLOCATED", "USED BY", "AGE"];
        if wide {
            headers.extend(["OVERLAY OF", "LABELS", "PATH"]);
        }
        headers
    }

    fn row(&self, wide: bool, now: jiff::Timestamp) -> Vec<String> {
        let metadata = self.metadata.clone().unwrap_or_default();
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let mut row = vec![
            metadata.name,
            camel(status.phase().as_str_name(), "DISK_PHASE_"),
            format(spec.format()),
            quantity::show(spec.size_bytes),
            quantity::show(status.allocated_bytes),
            status.used_by.join(","),
            age::since(metadata.create_time.as_ref(), now),
        ];
        if wide {
            row.extend([status.backing_disk, pairs(&metadata.labels, ","), status.path]);
        }
        row
    }

    fn describe(&self, now: jiff::Timestamp) -> String {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let mut text = Lines::default();
        text.metadata(self.metadata.as_ref(), true, now);
        text.put("Phase", &camel(status.phase().as_str_name(), "DISK_PHASE_"));
        text.put("Operation", &status.operation);
        text.messages(&status.conditions);
        text.put("Format", &format(spec.format()));
        text.put("Size", &bytes(spec.size_bytes));
        text.put("Allocated", &bytes(status.allocated_bytes));
        if status.logical_block_bytes > 512 {
            text.put("Logical block", &bytes(status.logical_block_bytes.into()));
        }
        if spec.preallocation() != v1::DiskPreallocation::Unspecified {
            let name = camel(spec.preallocation().as_str_name(), "DISK_PREALLOCATION_");
            text.put("Preallocation", &name.to_lowercase());
        }
        text.put("Overlay of", &status.backing_disk);
        text.put("Overlays", &status.overlays.join(", "));
        match spec.source {
            Some(Source::RawFile(path)) => text.put("Copy of", &path),
            Some(Source::Adopt(path)) => text.put("Adopted from", &path),
            Some(Source::Image(image)) if image.clone() == v1::DiskClone::Overlay => {
                text.put("Overlay of image", &image.name);
            }
            Some(Source::Image(image)) => text.put("Copy of image", &image.name),
            Some(Source::OverlayOf(_)) | None => {}
        }
        text.put("Path", &status.path);
        let users = match status.used_by.as_slice() {
            [] => "no VM".to_owned(),
            users => users.join(", "),
        };
        text.put("Used by", &users);
        text.0
    }

    fn json(&self) -> Result<Json> {
        emit::manifest(self)
    }
}

/// The disks and rate groups of a VM.
pub fn of_vm(text: &mut Lines, spec: &v1::VmSpec, status: &v1::VmStatus) {
    let gone = status.disks.iter().filter(|now| {
        // Is out of the spec and not yet out of the guest.
        spec.disks.iter().all(|disk| disk.name != now.name)
    });
    let gone = gone.map(|now| v1::DiskSpec {
        name: now.name.clone(),
        source: Some(v1::disk_spec::Source::Path(now.path.clone())),
        ..v1::DiskSpec::default()
    });
    let disks: Vec<_> = spec.disks.iter().cloned().chain(gone).collect();
    let find = |name: &str| status.disks.iter().find(|now| now.name == name);
    let rows: Vec<_> = disks.iter().map(|disk| vm_row(disk, find(&disk.name))).collect();
    let headers = [
        "NAME", "PHASE", "FORMAT", "MODE", "CAPACITY", "SLOT", "SERIAL", "SOURCE",
    ];
    text.list("Disks", headers.to_vec(), &rows);
    let rows: Vec<_> = disks
        .iter()
        .map(|disk| vec![disk.name.clone(), options(disk), limit_of(disk)])
        .filter(|row| row.iter().skip(1).any(|cell| !cell.is_empty()))
        .collect();
    if !rows.is_empty() {
        text.list("Disk options", vec!["NAME", "OPTIONS", "LIMIT"], &rows);
    }
    let failed = status.disks.iter().filter(|now| !now.message.is_empty());
    let rows: Vec<_> = failed
        .map(|now| vec![now.name.clone(), now.message.clone()])
        .collect();
    if !rows.is_empty() {
        text.list("Disk problems", vec!["NAME", "MESSAGE"], &rows);
    }
    if !spec.rate_groups.is_empty() {
        let members = |group: &v1::RateGroup| {
            let members = spec.disks.iter().filter(|disk| disk.rate_group == group.name);
            members
                .map(|disk| disk.name.as_str())
                .collect::<Vec<_>>()
                .join(",")
        };
        let groups: Vec<_> = spec
            .rate_groups
            .iter()
            .map(|group| {
                let limit = group.limit.as_ref().map(limit).unwrap_or_default();
                vec![group.name.clone(), limit, members(group)]
            })
            .collect();
        text.list("Rate groups", vec!["NAME", "LIMIT", "DISKS"], &groups);
    }
}

fn vm_row(disk: &v1::DiskSpec, now: Option<&v1::DiskStatus>) -> Vec<String> {
    let read_only = disk.read_only || disk.cdrom || disk.format() == v1::DiskFormat::Iso;
    let phase = now.map(v1::DiskStatus::phase);
    let phase = phase.filter(|phase| *phase != v1::AttachmentPhase::Unspecified);
    let source = match (disk.disk(), now) {
        ("", _) => disk.path().to_owned(),
        (disk, Some(now)) if !now.path.is_empty() => format!("disk {disk} ({})", now.path),
        (disk, _) => format!("disk {disk}"),
    };
    let capacity = now.and_then(|now| now.capacity_bytes);
    let slot = now.and_then(|now| match (now.pci_slot, now.sata_port) {
        (Some(slot), _) => Some(slot.to_string()),
        (None, port) => port.map(|port| format!("sata {port}")),
    });
    vec![
        disk.name.clone(),
        phase
            .map(|phase| camel(phase.as_str_name(), "ATTACHMENT_PHASE_"))
            .unwrap_or_default(),
        match disk.format() {
            v1::DiskFormat::Unspecified => String::new(),
            known => format(known),
        },
        if read_only { "ro" } else { "rw" }.into(),
        capacity.map(quantity::show).unwrap_or_default(),
        slot.unwrap_or_default(),
        disk.serial.clone(),
        source,
    ]
}

/// Its own limit, or the group whose limit it shares.
fn limit_of(disk: &v1::DiskSpec) -> String {
    match disk.rate_group.as_str() {
        "" => disk.rate_limit.as_ref().map(limit).unwrap_or_default(),
        group => format!("group {group}"),
    }
}

/// Options that differ from the defaults: `cache=none,queues=4`.
fn options(disk: &v1::DiskSpec) -> String {
    let mut options = Vec::new();
    if disk.cdrom {
        options.push("cdrom".to_owned());
    } else if disk.bus() == v1::DiskBus::Sata {
        options.push("bus=sata".to_owned());
    }
    if disk.cache() != v1::DiskCache::Unspecified {
        options.push(format!(
            "cache={}",
            lower(disk.cache().as_str_name(), "DISK_CACHE_")
        ));
    }
    for (name, value) in [("queues", disk.queues), ("block-size", disk.logical_block_bytes)] {
        if value != 0 {
            options.push(format!("{name}={value}"));
        }
    }
    if disk.on_error() != v1::DiskErrorPolicy::Unspecified {
        let policy = lower(disk.on_error().as_str_name(), "DISK_ERROR_POLICY_");
        options.push(format!("on-error={policy}"));
    }
    if disk.any_content {
        options.push("any-content".to_owned());
    }
    options.join(",")
}

/// A limit in short: `100Mi/s, 500 requests/s`; empty when there is none.
pub fn limit(limit: &v1::RateLimit) -> String {
    let mut parts = Vec::new();
    if limit.bytes_per_second != 0 {
        parts.push(format!("{}/s", quantity::show(limit.bytes_per_second)));
    }
    if limit.operations_per_second != 0 {
        parts.push(format!("{} requests/s", limit.operations_per_second));
    }
    if limit.burst_bytes != 0 {
        parts.push(format!("burst {}", quantity::show(limit.burst_bytes)));
    }
    if limit.burst_operations != 0 {
        parts.push(format!("burst {} requests", limit.burst_operations));
    }
    parts.join(", ")
}

fn format(format: v1::DiskFormat) -> String {
    lower(format.as_str_name(), "DISK_FORMAT_")
}

fn lower(name: &str, prefix: &str) -> String {
    camel(name, prefix).to_lowercase()
}

pub fn pairs(pairs: &BTreeMap<String, String>, separator: &str) -> String {
    let pairs = pairs.iter().map(|(key, value)| format!("{key}={value}"));
    pairs.collect::<Vec<_>>().join(separator)
}
