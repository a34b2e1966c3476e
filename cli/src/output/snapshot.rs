//! Snapshots for people.

use vmmd_api::v1;

use super::{
    Show, age,
    describe::{Lines, bytes, when},
};
use crate::manifest::{quantity, schema};

impl Show for v1::Snapshot {
    const SCHEMA: &'static str = schema::SNAPSHOT;
    const HAS_EVENTS: bool = false;

    fn columns(_: bool) -> Vec<&'static str> {
        vec!["NAME", "VM", "KIND", "SIZE", "PAUSE", "AGE"]
    }

    fn row(&self, _: bool, now: jiff::Timestamp) -> Vec<String> {
        let metadata = self.metadata.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        vec![
            metadata.name,
            self.spec.clone().unwrap_or_default().vm,
            kind(self).to_owned(),
            // A snapshot of disks alone has no memory file.
            quantity::show(status.size_bytes.max(status.allocated_bytes)),
            pause(&status),
            age::since(metadata.create_time.as_ref(), now),
        ]
    }

    fn describe(&self, now: jiff::Timestamp) -> String {
        let status = self.status.clone().unwrap_or_default();
        let mut text = Lines::default();
        text.metadata(self.metadata.as_ref(), false, now);
        text.put("Completed", &when(status.complete_time.as_ref(), now));
        text.put("VM", &self.spec.clone().unwrap_or_default().vm);
        text.put("VM UID", &status.vm_uid);
        text.put("Kind", kind(self));
        text.put("Consistency", &consistency(&status));
        let memory = status.vm_spec.clone().unwrap_or_default().memory;
        text.put("Memory", &bytes(memory.unwrap_or_default().size_bytes));
        text.put("Disks", &status.disks.join(", "));
        text.put("Size", &bytes(status.size_bytes));
        text.put("Room", &bytes(status.allocated_bytes));
        text.put("Retention", &retention(&status));
        text.put("Written", &bytes(status.written_bytes));
        text.put("VM paused for", &pause(&status));
        text.0
    }
}

/// What it has.
fn kind(snapshot: &v1::Snapshot) -> &'static str {
    match snapshot.spec.clone().unwrap_or_default().kind() {
        v1::SnapshotKind::Disks => "disks",
        v1::SnapshotKind::Full | v1::SnapshotKind::Unspecified => "full",
    }
}

/// `agent`, or `crash (the VM does not run)`.
fn consistency(status: &v1::SnapshotStatus) -> String {
    let word = match status.consistency() {
        v1::SnapshotConsistency::Unspecified => "",
        v1::SnapshotConsistency::Crash => "crash",
        v1::SnapshotConsistency::Agent | v1::SnapshotConsistency::RequireAgent => "agent",
    };
    match status.consistency_message.as_str() {
        "" => word.to_owned(),
        message => format!("{word} ({message})"),
    }
}

/// `256Mi written, VM paused for 3.2 ms`; of disks alone `2 disks, VM paused for 3.2 ms`.
pub fn cost(snapshot: &v1::Snapshot) -> String {
    let status = snapshot.status.clone().unwrap_or_default();
    if kind(snapshot) == "disks" {
        let disks = match status.disks.as_slice() {
            [disk] => format!("disk {disk}"),
            disks => format!("{} disks", disks.len()),
        };
        return format!("{disks}, VM paused for {}", pause(&status));
    }
    let written = quantity::show(status.written_bytes);
    format!("{written} written, VM paused for {}", pause(&status))
}

/// `the last 7, at most 14d old, group daily`; empty for a snapshot without retention.
fn retention(status: &v1::SnapshotStatus) -> String {
    let Some(retention) = &status.retention else {
        return String::new();
    };
    let mut words = Vec::new();
    if retention.keep_last != 0 {
        words.push(format!("the last {}", retention.keep_last));
    }
    if let Some(age) = &retention.max_age {
        let seconds = age.seconds;
        words.push(match seconds % 86_400 {
            0 => format!("at most {}d old", seconds / 86_400),
            _ => format!("at most {seconds}s old"),
        });
    }
    if !retention.group.is_empty() {
        words.push(format!("group {}", retention.group));
    }
    words.join(", ")
}

/// Milliseconds.
fn pause(status: &v1::SnapshotStatus) -> String {
    let pause = status.pause_duration.unwrap_or_default();
    let microseconds = pause
        .seconds
        .saturating_mul(1_000_000)
        .saturating_add(i64::from(pause.nanos) / 1000);
    format!("{}.{} ms", microseconds / 1000, microseconds % 1000 / 100)
}
