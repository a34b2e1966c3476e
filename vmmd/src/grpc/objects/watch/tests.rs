use vmmd_api::v1::{self, ObjectMetadata};
use vmmd_objects::feed::Expired;

use super::*;
use crate::grpc::objects::shared::after;

/// An object with a revision and a name.
#[derive(Clone, Debug)]
struct Thing(u32, u64);

impl Kept for Thing {
    fn uid(&self) -> &[u8] {
        let bytes: &'static [[u8; 4]] = UIDS.as_slice();
        &bytes[self.0 as usize]
    }

    fn metadata(&self) -> ObjectMetadata {
        ObjectMetadata {
            name: format!("thing{}", self.0),
            ..Default::default()
        }
    }

    fn made(&self) -> (u64, u64) {
        (1, 0)
    }

    fn revision(&self) -> u64 {
        self.1
    }
}

const COUNT: u32 = 2000;
static UIDS: std::sync::LazyLock<Vec<[u8; 4]>> =
    std::sync::LazyLock::new(|| (0..COUNT).map(u32::to_be_bytes).collect());

#[derive(Debug)]
enum Things {}

impl Kind for Things {
    const NAME: &'static str = "thing";
    type Seen = Thing;
    type Object = v1::Disk;
    type Event = ();

    fn after(_: &Host, _: Option<&str>) -> Snapshot<Thing> {
        unreachable!("there is no daemon")
    }

    fn since(_: &Host, _: Position) -> Result<(Vec<Buried>, Snapshot<Thing>), Expired> {
        unreachable!("there is no daemon")
    }

    fn position(_: &Host) -> Position {
        unreachable!("there is no daemon")
    }

    fn news(_: &Host) -> tokio::sync::watch::Receiver<u64> {
        unreachable!("there is no daemon")
    }

    fn nonce(_: &Host, _: u64) -> Option<u64> {
        None
    }

    async fn look_at(_: &Arc<Host>, _: Vec<Arc<Thing>>) -> Result<Vec<v1::Disk>, Failure> {
        Ok(Vec::new())
    }

    fn known(seen: &Thing) -> v1::Disk {
        Self::buried(seen.metadata())
    }

    fn buried(metadata: ObjectMetadata) -> v1::Disk {
        v1::Disk {
            metadata: Some(metadata),
            ..Default::default()
        }
    }

    fn event(_: WatchEventType, _: Option<v1::Disk>, _: String) {}
}

fn snapshot(objects: Vec<Thing>) -> Snapshot<Thing> {
    let revision = objects.iter().map(Kept::revision).max().unwrap_or_default();
    let at = Position {
        run: 1,
        revision,
        buried: revision,
    };
    Snapshot::of(objects, at)
}

fn told() -> Told<Thing> {
    Told {
        known: BTreeMap::new(),
        until: None,
        removals: None,
    }
}

fn events(told: &mut Told<Thing>, latest: &Latest<Thing>) -> Vec<(WatchEventType, u32)> {
    let filter = Filter::of_objects("thing", None).unwrap();
    let events = difference::<Things>(told, latest, Position::default(), &filter);
    let name = |event: &Event<Things>| match &event.what {
        What::There(seen) => seen.0,
        What::Gone(object) => {
            let name = &object.metadata.as_ref().unwrap().name;
            name.trim_start_matches("thing").parse().unwrap()
        }
    };
    events.iter().map(|event| (event.kind, name(event))).collect()
}

#[test]
fn watchers_of_2000_objects_share_them_and_get_what_changed() {
    let all: Vec<_> = (0..COUNT).map(|number| Thing(number, number.into())).collect();
    let first = after(None, snapshot(all.clone()));
    let mut watchers: Vec<_> = (0..4).map(|_| told()).collect();
    for watcher in &mut watchers {
        assert_eq!(events(watcher, &first).len(), 2000);
        assert_eq!(events(watcher, &first), []);
    }
    let mut all = all;
    all[5].1 = 3000;
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
