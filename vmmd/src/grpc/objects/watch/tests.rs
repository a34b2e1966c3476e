use vmmd_objects::registry::{Objects, Record, Snapshot};

use super::*;
use crate::grpc::objects::shared::after;

/// The record of an object, which has a number.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Thing(u32);

impl Record for Thing {
    fn uid(&self) -> &[u8] {
        &UIDS[self.0 as usize]
    }

    fn name(&self) -> &str {
        "thing"
    }

    fn metadata(&self) -> ObjectMetadata {
        ObjectMetadata::default()
    }

    fn made(&self) -> (u64, u64) {
        (1, 0)
    }

    fn begin(&mut self, _: u64, _: (u64, u64)) {}
}

const COUNT: u32 = 2000;
static UIDS: std::sync::LazyLock<Vec<[u8; 4]>> =
    std::sync::LazyLock::new(|| (0..COUNT).map(u32::to_be_bytes).collect());

#[derive(Clone, Debug, PartialEq)]
enum Things {}

impl Kind for Things {
    const NAME: &'static str = "thing";
    const A: &'static str = "a thing";
    const EXISTS: &'static str = "THING_EXISTS";
    const NOT_FOUND: &'static str = "THING_NOT_FOUND";
    type Record = Thing;
    type State = ();
    type Index = ();
    type View = ();

    fn view(_: &Objects<Self>, _: &Thing, (): &()) {}
}

fn snapshot(objects: Vec<Seen<Things>>) -> Snapshot<Things> {
    let revision = objects.iter().map(|seen| seen.revision).max().unwrap_or_default();
    let at = Position {
        run: 1,
        revision,
        buried: revision,
    };
    Snapshot {
        objects: objects.into_iter().map(Arc::new).collect(),
        at,
    }
}

fn told() -> Told<Things> {
    Told {
        known: BTreeMap::new(),
        until: None,
        removals: None,
    }
}

fn events(told: &mut Told<Things>, latest: &Latest<Things>) -> Vec<(WatchEventType, u32)> {
    let filter = Filter::of_objects("thing", None).unwrap();
    let events = difference::<Things>(told, latest, Position::default(), &filter);
    let name = |event: &Event<Things>| match &event.what {
        What::There(seen) | What::Gone(seen) => seen.record.0,
        What::Deletion(_) => COUNT,
    };
    events.iter().map(|event| (event.kind, name(event))).collect()
}

#[test]
fn watchers_of_2000_objects_share_them_and_get_what_changed() {
    let all: Vec<_> = (0..COUNT)
        .map(|number| Seen {
            record: Thing(number),
            view: (),
            revision: number.into(),
        })
        .collect();
    let first = after(None, snapshot(all.clone()));
    let mut watchers: Vec<_> = (0..4).map(|_| told()).collect();
    for watcher in &mut watchers {
        assert_eq!(events(watcher, &first).len(), 2000);
        assert_eq!(events(watcher, &first), []);
    }
    let mut all = all;
    all[5].revision = 3000;
    all.remove(7);
    let second = after(Some(&first), snapshot(all.clone()));
    let kept = first.snapshot.objects.iter().zip(&second.snapshot.objects);
    assert_eq!(kept.take(7).filter(|(old, new)| Arc::ptr_eq(old, new)).count(), 6);
    let (late, others) = watchers.split_last_mut().unwrap();
    for watcher in others {
        let expected = [(WatchEventType::Deleted, 7), (WatchEventType::Modified, 5)];
        assert_eq!(events(watcher, &second), expected);
        let mut known = watcher.known.values().zip(&second.snapshot.objects);
        assert!(known.all(|(known, shared)| Arc::ptr_eq(known, shared)));
    }
    // Another object is removed before the last watcher looks.
    all.remove(0);
    let third = after(Some(&second), snapshot(all));
    let expected = [
        (WatchEventType::Deleted, 0),
        (WatchEventType::Deleted, 7),
        (WatchEventType::Modified, 5),
    ];
    assert_eq!(events(late, &third), expected);
}
