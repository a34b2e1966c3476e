//! Deletion of earlier snapshots after the completion of a new one.
//!
//! Invariant: this module only deletes snapshots that were created with a retention, and only for a
//! new snapshot of the same VM and the same group. Ages are relative to the new snapshot and not to
//! the present time. The rule therefore has the same result at any time. Snapshots that a killed
//! daemon had not deleted yet, or that were in use, are deleted the next time, and no others.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc, time::Duration};

use vmmd_api::v1;
use vmmd_host::text;
use vmmd_spec::{Violations, name::Name};
use vmmd_store::{RetentionRecord, SnapshotRecord};

use super::retire;
use crate::host::Host;

/// Longest `max_age`: a hundred years.
const MAX_AGE: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// Parses the retention of a request. Adds problems to `found`.
pub fn parse(found: &mut Violations, given: Option<&v1::SnapshotRetention>) -> Option<RetentionRecord> {
    let given = given?;
    if given.keep_last == 0 && given.max_age.is_none() {
        found.add("retention", "says nothing: give keep_last, max_age or both");
    }
    let max_age = given
        .max_age
        .map(|age| Duration::try_from(age).unwrap_or_default());
    if max_age.is_some_and(|age| age < Duration::from_secs(1) || age > MAX_AGE) {
        found.add("retention.max_age", "must be at least 1 s and at most 100 years");
    }
    if !given.group.is_empty()
        && let Err(error) = Name::try_from(given.group.as_str())
    {
        let group = text::brief(&given.group);
        found.add("retention.group", format_args!("{error}, is \"{group}\""));
    }
    let milliseconds = max_age.unwrap_or_default().as_millis();
    Some(RetentionRecord {
        keep_last: given.keep_last,
        max_age_ms: u64::try_from(milliseconds).unwrap_or(u64::MAX),
        group: given.group.clone(),
    })
}

/// A retention as the API shows it.
pub fn describe(record: &RetentionRecord) -> v1::SnapshotRetention {
    let max_age = Duration::from_millis(record.max_age_ms);
    v1::SnapshotRetention {
        keep_last: record.keep_last,
        max_age: (!max_age.is_zero()).then(|| max_age.into()),
        group: record.group.clone(),
    }
}

/// Deletes the snapshots that the retention of the snapshot with this UUID does not keep, if it has
/// one. A snapshot that cannot be deleted stays until the next time.
pub async fn apply(host: &Arc<Host>, newest: &[u8]) {
    let all = host.snapshots.list();
    let Some(newest) = all.iter().find(|record| record.uid == newest) else {
        return;
    };
    for record in expired(&all, newest) {
        // It is in use, or gone.
        let Ok(record) = host.snapshots.begin_delete(&record.name) else {
            continue;
        };
        let name = record.name.clone();
        let message = format!(
            "the snapshot was deleted by the retention of snapshot \"{}\"",
            newest.name
        );
        if let Err(failure) = retire(host, record, None, ("SnapshotExpired", &message)).await {
            tracing::error!(snapshot = name, %failure, "delete a snapshot by a retention");
        }
    }
}

/// Deletes what earlier retentions have left, of one VM or of all.
pub async fn converge(host: &Arc<Host>, vm: Option<&[u8]>) {
    for newest in newest(&host.snapshots.list(), vm, text::now_ms()) {
        apply(host, &newest).await;
    }
}

/// UUID of the newest snapshot of each group, of one VM or of all. One from the future was taken with another clock: by it, others would be too old.
fn newest(all: &[SnapshotRecord], vm: Option<&[u8]>, now_ms: u64) -> Vec<Vec<u8>> {
    let mut groups = BTreeMap::new();
    for record in all {
        let Some(retention) = &record.retention else {
            continue;
        };
        if vm.is_some_and(|vm| vm != record.vm_uid) || record.completed_ms > now_ms {
            continue;
        }
        let newest = groups.entry((&record.vm_uid, &retention.group)).or_insert(record);
        if newest.completed_ms < record.completed_ms {
            *newest = record;
        }
    }
    groups.into_values().map(|record| record.uid.clone()).collect()
}

/// The snapshots that the retention of the newest one does not keep, the oldest first.
fn expired<'a>(all: &'a [SnapshotRecord], newest: &SnapshotRecord) -> Vec<&'a SnapshotRecord> {
    let Some(retention) = &newest.retention else {
        return Vec::new();
    };
    let is_concerned = |it: &&SnapshotRecord| {
        let group = it.retention.as_ref().map(|retention| &retention.group);
        it.uid != newest.uid && it.vm_uid == newest.vm_uid && group == Some(&retention.group)
    };
    let mut others: Vec<_> = all.iter().filter(is_concerned).collect();
    others.sort_by_key(|it| Reverse(it.completed_ms));
    let kept = match retention.keep_last.checked_sub(1) {
        Some(others) => usize::try_from(others).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    let is_old = |it: &SnapshotRecord| {
        let age = newest.completed_ms.saturating_sub(it.completed_ms);
        retention.max_age_ms != 0 && age > retention.max_age_ms
    };
    let gone = others
        .into_iter()
        .enumerate()
        .filter(|(number, it)| *number >= kept || is_old(it));
    let mut gone: Vec<_> = gone.map(|(_, it)| it).collect();
    gone.reverse();
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: u8, vm: u8, completed_ms: u64, retention: Option<(u32, u64, &str)>) -> SnapshotRecord {
        SnapshotRecord {
            uid: vec![uid],
            vm_uid: vec![vm],
            completed_ms,
            retention: retention.map(|(keep_last, max_age_ms, group)| RetentionRecord {
                keep_last,
                max_age_ms,
                group: group.to_owned(),
            }),
            ..SnapshotRecord::default()
        }
    }

    fn all() -> Vec<SnapshotRecord> {
        vec![
            record(1, 1, 100, Some((9, 0, ""))),
            record(2, 1, 200, None),
            record(3, 1, 300, Some((9, 0, ""))),
            record(4, 1, 400, Some((9, 0, "monthly"))),
            record(5, 2, 500, Some((9, 0, ""))),
            record(6, 1, 600, Some((9, 0, ""))),
        ]
    }

    #[test]
    fn only_managed_snapshots_of_the_group_go_oldest_first() {
        for (keep_last, max_age_ms, group, gone) in [
            (1, 0, "", &[1, 3, 6][..]),
            (2, 0, "", &[1, 3]),
            (4, 0, "", &[]),
            (0, 400, "", &[1]),
            (0, 399, "", &[1, 3]),
            (3, 399, "", &[1, 3]),
            (u32::MAX, u64::MAX, "", &[]),
            (1, 0, "monthly", &[4]),
            (1, 1, "yearly", &[]),
        ] {
            let (all, newest) = (all(), record(7, 1, 700, Some((keep_last, max_age_ms, group))));
            let found: Vec<_> = expired(&all, &newest).iter().map(|it| it.uid[0]).collect();
            assert_eq!(found, gone, "{keep_last} {max_age_ms} {group}");
        }
        let without = record(7, 1, 700, None);
        assert!(expired(&all(), &without).is_empty());
    }

    #[test]
    fn newest_of_each_group_and_vm_is_not_from_the_future() {
        let found = |vm, now| newest(&all(), vm, now).concat();
        assert_eq!(found(None, 600), [6, 4, 5]);
        assert_eq!(found(Some([1].as_slice()), 600), [6, 4]);
        assert_eq!(found(None, 599), [3, 4, 5]);
        assert!(found(None, 99).is_empty());
    }

    #[test]
    fn a_retention_that_says_nothing_or_what_can_not_be_is_refused() {
        let age = |seconds| vmmd_api::well_known::Duration { seconds, nanos: 0 };
        for (keep_last, max_age, group, wrong) in [
            (0, None, "", "retention"),
            (1, Some(age(0)), "", "retention.max_age"),
            (1, Some(age(-1)), "", "retention.max_age"),
            (0, Some(age(i64::MAX)), "", "retention.max_age"),
            (1, None, "No Name", "retention.group"),
            (1, Some(age(1)), "daily", ""),
        ] {
            let given = v1::SnapshotRetention {
                keep_last,
                max_age,
                group: group.to_owned(),
            };
            let mut found = Violations::default();
            parse(&mut found, Some(&given));
            let fields: Vec<_> = found.0.iter().map(|it| it.field.as_str()).collect();
            assert_eq!(fields.join(","), wrong, "{given:?}");
        }
    }
}
