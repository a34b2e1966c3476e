use std::collections::BTreeSet;

use vmmd_api::v1::ObjectFilter;
use vmmd_objects::registry::Registry;
use vmmd_store::{DeletionRecords, DiskRecord};

use super::*;
use crate::registry::disks::DiskKind;

type Disks = Registry<DiskKind>;

fn record(id: u16, label: &str) -> DiskRecord {
    DiskRecord {
        uid: id.to_be_bytes().to_vec(),
        name: id.to_string(),
        labels: [(label.to_owned(), String::new())].into(),
        ..DiskRecord::default()
    }
}

fn delete(disks: &Disks, id: u16) {
    let record = record(id, "");
    let tombstone = disks.bury(&record);
    disks.forget(&record.uid, tombstone);
}

fn told() -> Told<DiskKind> {
    Told {
        known: BTreeMap::new(),
        until: None,
        removals: 0,
    }
}

fn filter(label: Option<&str>) -> Filter {
    let filter = ObjectFilter {
        labels: label.map(str::to_owned).into_iter().collect(),
        ..ObjectFilter::default()
    };
    Filter::of_objects("disk", Some(&filter)).unwrap()
}

fn kinds(events: &[Event<DiskKind>]) -> Vec<(WatchEventType, u16)> {
    let name = |event: &Event<DiskKind>| match &event.what {
        What::There(seen) | What::Gone(seen) => seen.record.name.clone(),
        What::Deletion(metadata) => metadata.name.clone(),
    };
    let kinds = events
        .iter()
        .map(|event| (event.kind, name(event).parse().unwrap()));
    kinds.collect()
}

fn read(told: &mut Told<DiskKind>, disks: &Disks, filter: &Filter) -> Vec<(WatchEventType, u16)> {
    kinds(&difference(told, &disks.lock(), Position::default(), filter))
}

#[test]
fn watchers_share_2000_objects_and_get_the_changes() {
    use WatchEventType::{Deleted, Modified};
    let (disks, all) = (Disks::default(), filter(None));
    for id in 0..2000 {
        disks.restore(record(id, ""));
    }
    let mut watchers: Vec<_> = (0..4).map(|_| told()).collect();
    for watcher in &mut watchers {
        assert_eq!(read(watcher, &disks, &all).len(), 2000);
        assert_eq!(read(watcher, &disks, &all), []);
    }
    let [first, others @ ..] = watchers.as_slice() else {
        unreachable!()
    };
    for other in others {
        assert!(
            first
                .known
                .iter()
                .zip(&other.known)
                .all(|((_, a), (_, b))| Arc::ptr_eq(a, b))
        );
    }
    disks.lock().touch("5");
    delete(&disks, 7);
    let (late, others) = watchers.split_last_mut().unwrap();
    for watcher in others {
        assert_eq!(read(watcher, &disks, &all), [(Deleted, 7), (Modified, 5)]);
    }
    // Another object is removed before the last watcher reads.
    delete(&disks, 0);
    assert_eq!(
        read(late, &disks, &all),
        [(Deleted, 0), (Deleted, 7), (Modified, 5)]
    );
}

#[test]
fn watcher_of_a_label_sees_objects_enter_and_leave() {
    use WatchEventType::{Added, Deleted, Modified};
    let (disks, only, mut told) = (Disks::default(), filter(Some("on")), told());
    for (label, expected) in [
        ("off", None),
        ("on", Some(Added)),
        ("on", Some(Modified)),
        ("off", Some(Deleted)),
        ("off", None),
        ("on", Some(Added)),
    ] {
        disks.restore(record(1, label));
        let expected: Vec<_> = expected.map(|kind| (kind, 1)).into_iter().collect();
        assert_eq!(read(&mut told, &disks, &only), expected, "{label}");
    }
    delete(&disks, 1);
    assert_eq!(read(&mut told, &disks, &only), [(Deleted, 1)]);
    assert_eq!(read(&mut told, &disks, &only), []);
}

#[test]
fn holder_of_a_cursor_gets_the_changes_since() {
    use WatchEventType::{Added, Deleted, Modified};
    let disks = Disks::new(2, BTreeMap::new(), DeletionRecords::default());
    // Objects of an earlier run, with the revisions of their creation.
    for (id, made_revision) in [(1, 7), (2, 7), (4, 9)] {
        disks.restore(DiskRecord {
            made_run: 1,
            made_revision,
            ..record(id, "")
        });
    }
    let from = disks.lock().feed().position();
    disks.lock().add(record(3, "on"));
    disks.lock().touch("1");
    delete(&disks, 2);
    let since = |from, filter: &Filter| {
        let objects = disks.lock();
        let deletions = objects.feed().deletions_since(from).unwrap();
        kinds(&since::<DiskKind>(from, &deletions, &objects, filter))
    };
    let all = filter(None);
    assert_eq!(since(from, &all), [(Added, 3), (Modified, 1), (Deleted, 2)]);
    let now = disks.lock().feed().position();
    assert_eq!(since(now, &all), []);
    // Since an earlier run, everything may have changed.
    let earlier = Position {
        run: 1,
        revision: 8,
        buried: 8,
    };
    let expected = [(Added, 4), (Added, 3), (Modified, 1), (Deleted, 2)];
    assert_eq!(since(earlier, &all), expected);
    // A changed object that does not match may have matched.
    let expected = [(Added, 3), (Deleted, 1), (Deleted, 2)];
    assert_eq!(since(from, &filter(Some("on"))), expected);
}

proptest::proptest! {
    /// Applying the events leads to the objects that there are, whenever the watcher reads.
    #[test]
    fn events_lead_to_the_objects_that_there_are(
        steps in proptest::collection::vec((0..4_u8, 0..6_u16), 0..60),
    ) {
        let (disks, only, mut told) = (Disks::default(), filter(Some("on")), told());
        let mut view = BTreeSet::new();
        for (step, id) in steps {
            match step {
                0 => disks.restore(record(id, "on")),
                1 => disks.restore(record(id, "off")),
                2 => delete(&disks, id),
                _ => {
                    for (kind, id) in read(&mut told, &disks, &only) {
                        let fits = match kind {
                            WatchEventType::Added => view.insert(id),
                            WatchEventType::Deleted => view.remove(&id),
                            _ => view.contains(&id),
                        };
                        proptest::prop_assert!(fits, "{kind:?} {id}");
                    }
                    let disks = disks.lock();
                    let there = disks.records().filter(|record| record.labels.contains_key("on"));
                    let there: BTreeSet<u16> = there.map(|record| record.name.parse().unwrap()).collect();
                    proptest::prop_assert_eq!(&view, &there);
                }
            }
        }
    }
}
