use vmmd_api::v1::{ObjectMetadata, VmFilter};

use super::*;

fn vm(name: &str, uid: &str) -> Arc<Vm> {
    let metadata = ObjectMetadata {
        name: name.to_owned(),
        uid: uid.to_owned(),
        ..Default::default()
    };
    Arc::new(Vm {
        metadata: Some(metadata),
        ..Default::default()
    })
}

fn filter(names: &[&str]) -> Filter {
    let filter = VmFilter {
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Default::default()
    };
    Filter::new(Some(&filter), "").unwrap()
}

fn at(run: u64, revision: u64) -> Position {
    Position {
        run,
        revision,
        buried: revision,
    }
}

/// VMs with revisions from 1 in the order given, made then.
fn snapshot(vms: &[Arc<Vm>]) -> Snapshot {
    let seen = vms.iter().zip(1..).map(|(vm, revision)| Seen {
        vm: Arc::clone(vm),
        made: (2, revision),
        revision,
    });
    let vms: Vec<_> = seen.collect();
    Snapshot {
        at: at(2, vms.len() as u64),
        vms,
    }
}

fn told(events: &[Event]) -> Vec<(WatchEventType, String, u64)> {
    let told = events
        .iter()
        .map(|(kind, vm, at)| (*kind, uid(vm).to_owned(), at.revision));
    told.collect()
}

#[test]
fn the_difference_tells_what_came_changed_and_went() {
    use WatchEventType::{Added, Deleted, Modified};
    let mut known = Known::new();
    let (a, b) = (vm("a", "1"), vm("b", "2"));
    let mut step = |vms: &[Arc<Vm>]| told(&difference(&mut known, &snapshot(vms), at(2, 0), &filter(&[])));
    assert_eq!(
        step(&[Arc::clone(&a), b]),
        [(Added, "1".into(), 1), (Added, "2".into(), 2)]
    );
    // b was deleted and made again under the same name meanwhile.
    assert_eq!(
        step(&[a, vm("b", "3")]),
        [(Deleted, "2".into(), 0), (Added, "3".into(), 2)]
    );
    assert_eq!(
        step(&[vm("a", "1"), vm("b", "3")]),
        [(Modified, "1".into(), 1), (Modified, "3".into(), 2)]
    );
}

#[test]
fn who_sees_a_part_is_told_of_what_enters_and_leaves_it() {
    use WatchEventType::{Added, Deleted, Modified};
    let only = Filter::new(
        Some(&VmFilter {
            labels: vec!["on".into()],
            ..Default::default()
        }),
        "",
    )
    .unwrap();
    let labelled = |on: bool| {
        let mut vm = vm("a", "1").as_ref().clone();
        let labels = &mut vm.metadata.as_mut().unwrap().labels;
        labels.extend(on.then(|| ("on".to_owned(), String::new())));
        Arc::new(vm)
    };
    let mut known = Known::new();
    for (kind, on, expected) in [
        (ChangeKind::Added, false, None),
        (ChangeKind::Modified, true, Some(Added)),
        (ChangeKind::Modified, true, Some(Modified)),
        (ChangeKind::Modified, false, Some(Deleted)),
        (ChangeKind::Modified, false, None),
        (ChangeKind::Modified, true, Some(Added)),
        (ChangeKind::Deleted, true, Some(Deleted)),
        (ChangeKind::Deleted, true, None),
    ] {
        let change = Change {
            kind,
            vm: labelled(on),
            at: at(1, 1),
        };
        assert_eq!(note(&mut known, &change, &only), expected, "{kind:?} {on}");
    }
}

#[test]
fn who_comes_back_is_told_what_has_changed_since() {
    use WatchEventType::{Added, Deleted, Modified};
    let mut snapshot = snapshot(&[vm("a", "1"), vm("b", "2"), vm("c", "3")]);
    snapshot.vms[1].made = (1, 7);
    snapshot.vms.reverse();
    let gone = [
        Deletion {
            metadata: vm("old", "8").metadata.clone().unwrap(),
            at: (1, 9),
            owned: 0,
        },
        Deletion {
            metadata: vm("new", "9").metadata.clone().unwrap(),
            at: (2, 2),
            owned: 0,
        },
    ];
    let since = |from, gone: &[Deletion], names: &[&str]| told(&since(from, gone, &snapshot, &filter(names)));
    // In the same run, unchanged VMs are not repeated.
    let expected = [
        (Deleted, "9".into(), 2),
        (Modified, "2".into(), 2),
        (Added, "3".into(), 3),
    ];
    assert_eq!(since(at(2, 1), &gone[1..], &[]), expected);
    // From an earlier run: everything may have changed.
    assert_eq!(since(at(1, 8), &gone, &[]).len(), 5);
    assert_eq!(
        since(at(1, 8), &gone, &["b", "old"]),
        [(Deleted, "8".into(), 9), (Modified, "2".into(), 2),]
    );
}

proptest::proptest! {
    /// From any known state, applying the events yields exactly the current state.
    #[test]
    fn the_difference_leads_from_any_knowledge_to_what_is_there(
        before in proptest::collection::btree_set(0..20_u8, 0..20),
        after in proptest::collection::btree_map(0..20_u8, proptest::bool::ANY, 0..20),
    ) {
        let old: BTreeMap<_, _> = before.iter().map(|id| (*id, vm("x", &id.to_string()))).collect();
        let mut known: Known = old.values().map(|vm| (uid(vm).to_owned(), Arc::clone(vm))).collect();
        let mut view = known.clone();
        let there: Vec<_> = after
            .iter()
            .map(|(id, changed)| match old.get(id) {
                Some(vm) if !changed => Arc::clone(vm),
                _ => vm("x", &id.to_string()),
            })
            .collect();
        for (kind, vm, _) in difference(&mut known, &snapshot(&there), at(1, 0), &filter(&[])) {
            let had = match kind {
                WatchEventType::Deleted => view.remove(uid(&vm)),
                _ => view.insert(uid(&vm).to_owned(), Arc::clone(&vm)),
            };
            proptest::prop_assert_eq!(had.is_some(), kind != WatchEventType::Added);
        }
        let same = view.len() == there.len()
            && there.iter().all(|vm| view.get(uid(vm)).is_some_and(|seen| Arc::ptr_eq(seen, vm)));
        proptest::prop_assert!(same);
    }
}
