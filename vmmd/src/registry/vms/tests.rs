use vmmd_store::MAX_TOMBSTONES;

use super::*;

fn vm(name: &str, phase: i32) -> Arc<v1::Vm> {
    let metadata = v1::ObjectMetadata {
        name: name.to_owned(),
        ..Default::default()
    };
    let status = v1::VmStatus {
        phase,
        ..Default::default()
    };
    Arc::new(v1::Vm {
        metadata: Some(metadata),
        status: Some(status),
        ..Default::default()
    })
}

fn add(vms: &Vms, name: &str) -> watch::Sender<Arc<v1::Vm>> {
    let (publisher, state) = watch::channel(vm(name, 1));
    let entry = Entry {
        uid: Uuid::new_v4(),
        mailbox: Mailbox::new().0,
        state,
    };
    vms.insert(name, entry, vms.now());
    publisher
}

fn delete(vms: &Vms, name: &str) {
    let metadata = vm(name, 1).metadata.clone().unwrap();
    let tombstone = vms.bury(metadata, 0);
    vms.remove(name, tombstone);
}

fn name(vm: &v1::Vm) -> String {
    vm.metadata.clone().unwrap_or_default().name
}

async fn waits(future: &mut (impl Future + Unpin)) -> bool {
    tokio::select! {
        biased;
        _ = future => false,
        () = std::future::ready(()) => true,
    }
}

#[tokio::test]
async fn a_name_is_given_once() {
    let vms = Vms::default();
    let reservation = vms.reserve("a").await.unwrap();
    let (mut second, mut third) = (Box::pin(vms.reserve("a")), Box::pin(vms.reserve("a")));
    assert!(waits(&mut second).await && waits(&mut third).await);
    // The first made none.
    drop(reservation);
    let reservation = second.await.unwrap();
    assert!(waits(&mut third).await);
    let _publisher = add(&vms, "a");
    drop(reservation);
    assert!(third.await.is_none());
    assert!(vms.reserve("a").await.is_none());
}

#[test]
fn a_watcher_sees_what_is_there_and_then_every_change_in_order() {
    let vms = Vms::default();
    let publisher = add(&vms, "a");
    let (there, mut changes) = vms.subscribe();
    assert_eq!(there.vms.len(), 1);
    for phase in [2, 3] {
        vms.publish(&publisher, vm("a", phase));
    }
    delete(&vms, "a");
    let mut seen = Vec::new();
    let mut revisions = vec![there.at.revision];
    while let Ok(change) = changes.try_recv() {
        seen.push((change.kind, change.vm.status.as_ref().unwrap().phase));
        revisions.push(change.at.revision);
    }
    use ChangeKind::{Deleted, Modified};
    assert_eq!(seen, [(Modified, 2), (Modified, 3), (Deleted, 3)]);
    assert!(revisions.is_sorted_by(|a, b| a < b), "{revisions:?}");
    assert!(vms.get("a").is_none() && vms.list().is_empty());
}

#[test]
fn a_page_goes_on_after_a_name_whatever_came_and_went() {
    let vms = Vms::default();
    let _publishers: Vec<_> = ["a", "b", "c", "d"].iter().map(|name| add(&vms, name)).collect();
    let page = |after: Option<&str>, limit| {
        let (vms, more, _) = vms.page(after, limit, |vm| name(vm) != "c");
        (vms.iter().map(|vm| name(vm)).collect::<Vec<_>>().concat(), more)
    };
    assert_eq!(page(None, 2), ("ab".to_owned(), true));
    assert_eq!(page(Some("b"), 2), ("d".to_owned(), false));
    delete(&vms, "b");
    assert_eq!(page(Some("b"), 2), ("d".to_owned(), false));
    assert_eq!(page(None, 10), ("ad".to_owned(), false));
}

#[test]
fn who_resumes_is_told_of_deletions_since() {
    let vms = Vms::default();
    let _publishers: Vec<_> = ["a", "b"].iter().map(|name| add(&vms, name)).collect();
    delete(&vms, "a");
    let at = vms.subscribe().0.at;
    delete(&vms, "b");
    let gone = |position| {
        let (gone, ..) = vms.resume(position)?;
        Ok(gone
            .iter()
            .map(|buried| buried.metadata.name.clone())
            .collect::<Vec<_>>()
            .concat())
    };
    assert_eq!(gone(at), Ok("b".to_owned()));
    assert_eq!(gone(Position { revision: 0, ..at }), Ok("ab".to_owned()));
    assert_eq!(gone(vms.subscribe().0.at), Ok(String::new()));
    let revision = vms.now().1 + 1;
    assert_eq!(
        gone(Position { revision, ..at }),
        Err(Expired),
        "of a copy of the store that is gone"
    );
}

#[test]
fn what_was_forgotten_makes_older_positions_expire() {
    let vms = Vms::default();
    let before = vms.subscribe().0.at;
    for _ in 0..=MAX_TOMBSTONES {
        let _publisher = add(&vms, "a");
        delete(&vms, "a");
    }
    assert!(matches!(vms.resume(before), Err(Expired)));
    let first = Position {
        revision: 3,
        ..before
    };
    assert_eq!(
        vms.resume(first).unwrap().0.len(),
        usize::try_from(MAX_TOMBSTONES).unwrap()
    );
}

/// A watcher has seen a later change, but not the deletion, when the daemon is killed.
#[test]
fn a_deletion_that_was_written_and_not_told_is_told_by_the_next_daemon() {
    let vms = Vms::default();
    let _publisher = add(&vms, "a");
    let metadata = v1::ObjectMetadata {
        name: "a".to_owned(),
        ..Default::default()
    };
    let tombstone = vms.bury(metadata, 0);
    let (_, mut changes) = vms.subscribe();
    let _other = add(&vms, "b");
    let seen = changes.try_recv().unwrap().at;
    assert!(seen.revision > tombstone.revision);
    let history = DeletionRecords {
        tombstones: vec![tombstone],
        ..DeletionRecords::default()
    };
    let next = Vms::new(2, BTreeMap::new(), history);
    let (gone, ..) = next.resume(seen).unwrap();
    assert_eq!(
        gone.iter()
            .map(|buried| buried.metadata.name.clone())
            .collect::<Vec<_>>(),
        ["a"]
    );
}
