use super::*;

/// Networks, with a mark as their state and view. Clients do not see networks that are leaving.
#[derive(Clone, Debug, PartialEq)]
enum Marked {}

impl Kind for Marked {
    const NAME: &'static str = "thing";
    const A: &'static str = "a thing";
    const EXISTS: &'static str = "THING_EXISTS";
    const NOT_FOUND: &'static str = "THING_NOT_FOUND";
    type Record = NetworkRecord;
    type State = u32;
    type Index = ();
    type View = u32;

    fn view(_: &Objects<Self>, _: &NetworkRecord, mark: &u32) -> u32 {
        *mark
    }

    fn is_shown(record: &NetworkRecord) -> bool {
        !record.leaving
    }
}

fn record(uid: u8, name: &str) -> NetworkRecord {
    NetworkRecord {
        uid: vec![uid; 16],
        name: name.to_owned(),
        ..NetworkRecord::default()
    }
}

fn names(snapshot: &Snapshot<Marked>) -> Vec<&str> {
    let objects = snapshot.objects.iter();
    objects.map(|seen| seen.record.name.as_str()).collect()
}

#[test]
fn name_is_taken_until_its_object_is_forgotten() {
    let registry = Registry::<Marked>::default();
    let made = registry.lock().add(record(1, "a"));
    assert_eq!((made.generation, made.made_run), (1, 1));
    let taken = registry.lock().check_free("a").unwrap_err();
    assert_eq!(taken.reason, "THING_EXISTS");
    let position = registry.lock().feed().position();
    let tombstone = registry.bury(&made);
    registry.forget(&made.uid, tombstone);
    registry.lock().check_free("a").unwrap();
    assert_eq!(registry.see("a").unwrap_err().reason, "THING_NOT_FOUND");
    // A forgotten object stays forgotten.
    registry.settle(made);
    assert!(registry.find(&[1; 16]).is_none());
    let deletions = registry.lock().feed().deletions_since(position).unwrap();
    assert_eq!((deletions.len(), names(&registry.after(None)).len()), (1, 0));
}

#[test]
fn change_makes_a_new_view_of_one_object() {
    let registry = Registry::<Marked>::default();
    for (uid, name) in [(1, "a"), (2, "b")] {
        registry.restore(record(uid, name));
    }
    let before = registry.after(None);
    registry.lock().change("b", |_, mark| *mark = 7);
    let now = registry.after(None);
    assert!(Arc::ptr_eq(&before.objects[0], &now.objects[0]));
    assert_eq!((before.objects[1].view, now.objects[1].view), (0, 7));
    assert!(now.objects[1].revision > now.objects[0].revision);
    // A new record keeps the state.
    registry.settle(record(2, "b"));
    assert_eq!(registry.find(&[2; 16]).unwrap().view, 7);
    assert_eq!(names(&registry.after(Some("a"))), ["b"]);
}

#[test]
fn object_that_is_not_shown_keeps_its_name() {
    let registry = Registry::<Marked>::default();
    registry.restore(NetworkRecord {
        leaving: true,
        ..record(1, "a")
    });
    assert!(registry.see("a").is_err() && registry.find(&[1; 16]).is_none());
    assert_eq!(names(&registry.after(None)), [""; 0]);
    assert!(registry.lock().check_free("a").is_err());
}
