//! Whether a snapshot is within the limits of the configuration.

use vmmd_host::failure::{Failure, Kind};
use vmmd_store::SnapshotRecord;

use super::is_ready;
use crate::config::SnapshotLimits;

/// Refused when the VM has as many snapshots as it may. One that is being made counts, one that is being deleted does not.
pub fn check_count<'a>(
    all: impl Iterator<Item = &'a SnapshotRecord>,
    new: &SnapshotRecord,
    limits: &SnapshotLimits,
) -> Result<(), Failure> {
    let Some(max) = limits.max_count_per_vm else {
        return Ok(());
    };
    let is_deleted = |it: &SnapshotRecord| !is_ready(it) && it.completed_ms != 0;
    let count = all
        .filter(|it| it.vm_uid == new.vm_uid && !is_deleted(it))
        .count();
    if u32::try_from(count).is_ok_and(|count| count < max) {
        return Ok(());
    }
    Err(refuse(format!(
        "VM \"{}\" has {count} snapshots, and {max} are allowed: delete one (vmmctl snapshot rm), or raise max_count_per_vm of [snapshots] in the \
         configuration of vmmd",
        new.vm_name
    )))
}

/// Refuses a snapshot if all snapshots would exceed the size limit. A snapshot under way counts
/// with its maximum size, a snapshot that is being deleted counts until it is gone.
pub fn check_room<'a>(
    all: impl Iterator<Item = &'a SnapshotRecord>,
    new: &SnapshotRecord,
    limits: &SnapshotLimits,
) -> Result<(), Failure> {
    let Some(max) = limits.max_bytes else {
        return Ok(());
    };
    let others = all.filter(|it| it.uid != new.uid);
    let used = others.fold(0, |used: u64, it| used.saturating_add(it.allocated_bytes));
    if used.saturating_add(new.allocated_bytes) <= max {
        return Ok(());
    }
    Err(refuse(format!(
        "the snapshots of this node take {} MiB, {} MiB are allowed, and this one may take {} MiB: delete some (vmmctl snapshot rm), or raise max_bytes of \
         [snapshots] in the configuration of vmmd",
        used.div_ceil(1 << 20),
        max >> 20,
        new.allocated_bytes.div_ceil(1 << 20)
    )))
}

fn refuse(message: String) -> Failure {
    Failure::new(Kind::Exhausted, "SNAPSHOT_QUOTA", message)
}

#[cfg(test)]
mod tests {
    use vmmd_store::SnapshotStage;

    use super::*;

    fn record(
        uid: u8,
        vm: u8,
        stage: SnapshotStage,
        completed_ms: u64,
        allocated_bytes: u64,
    ) -> SnapshotRecord {
        SnapshotRecord {
            uid: vec![uid],
            vm_uid: vec![vm],
            stage: stage.into(),
            completed_ms,
            allocated_bytes,
            ..SnapshotRecord::default()
        }
    }

    #[test]
    fn snapshots_count_as_long_as_they_take_room() {
        let all = [
            record(1, 1, SnapshotStage::Ready, 5, 40),
            record(2, 1, SnapshotStage::Partial, 5, 20),
            record(3, 2, SnapshotStage::Partial, 0, 10),
        ];
        for (max, uid, bytes, fits) in [
            (Some(100), 4, 30, true),
            (Some(100), 4, 31, false),
            // Its own room is not counted twice.
            (Some(100), 3, 40, true),
            (Some(100), 3, 41, false),
            (Some(100), 4, u64::MAX, false),
            (None, 4, u64::MAX, true),
        ] {
            let limits = SnapshotLimits {
                max_bytes: max,
                max_count_per_vm: None,
            };
            let new = record(uid, 1, SnapshotStage::Partial, 0, bytes);
            let checked = check_room(all.iter(), &new, &limits);
            assert_eq!(checked.is_ok(), fits, "{max:?} {uid} {bytes}");
        }
        for (max, vm, fits) in [(1, 1, false), (2, 1, true), (1, 2, false), (1, 3, true)] {
            let limits = SnapshotLimits {
                max_bytes: None,
                max_count_per_vm: Some(max),
            };
            let new = record(4, vm, SnapshotStage::Partial, 0, 0);
            let checked = check_count(all.iter(), &new, &limits);
            assert_eq!(checked.is_ok(), fits, "{max} {vm}");
        }
    }
}
