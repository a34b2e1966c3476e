use tempfile::TempDir;
use vmmd_api::v1::OperationPhase as P;
use vmmd_store::Key;

use super::*;
use crate::context::Initiator;

/// Operations over a store of their own.
fn operations() -> (TempDir, Operations) {
    let folder = tempfile::tempdir().unwrap();
    let (store, records) = Store::open(folder.path(), &Key::of(&[7; 32])).unwrap();
    (folder, Operations::new(store, records.operations))
}

/// Opens a copy of the store, as the next daemon would.
async fn next(folder: &TempDir, operations: &Operations) -> (TempDir, Operations) {
    operations.recorded().await;
    // The file as it is when the daemon is killed.
    let next = tempfile::tempdir().unwrap();
    std::fs::copy(Store::file(folder.path()), Store::file(next.path())).unwrap();
    let (store, records) = Store::open(next.path(), &Key::of(&[7; 32])).unwrap();
    (next, Operations::new(store, records.operations))
}

fn web() -> Object {
    Object::Vm("web".into(), Uuid::from_u128(7))
}

fn begin(operations: &Operations, deadline: Option<Duration>) -> Handle {
    let context = Context {
        request_id: "r".into(),
        initiator: Initiator::User(7),
        ..Context::default()
    };
    operations.begin(Type::VmStart, &web(), &context, deadline)
}

fn list(operations: &Operations) -> Vec<Arc<v1::Operation>> {
    let mut list = Vec::new();
    operations.each(None, |operation| {
        list.push(Arc::clone(operation));
        true
    });
    list
}

fn reason(operation: &v1::Operation) -> String {
    operation
        .error
        .as_ref()
        .map_or_else(String::new, rpc::Status::reason)
}

#[test]
fn an_operation_says_who_began_it_and_how_far_it_is() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    let seen = operations.get(handle.id()).unwrap();
    let target = seen.target.clone().unwrap();
    assert_eq!(
        (
            seen.phase(),
            seen.r#type.as_str(),
            target.name.as_str(),
            target.kind.as_str()
        ),
        (P::Pending, "vm.start", "web", "Vm")
    );
    assert_eq!(
        (seen.initiator.as_str(), seen.request_id.as_str()),
        ("uid 7", "r")
    );
    handle.progress(Progress::steps(2, 5), "booting");
    let seen = operations.get(handle.id()).unwrap();
    assert_eq!(
        (
            seen.phase(),
            seen.progress.unwrap().percent,
            seen.message.as_str()
        ),
        (P::InProgress, 40, "booting")
    );
    handle.advance(Progress::bytes(60, 100));
    let seen = operations.get(handle.id()).unwrap();
    assert_eq!(
        (seen.progress.unwrap().done, seen.message.as_str()),
        (60, "booting")
    );
    let id = handle.id().to_owned();
    handle.complete("running");
    let seen = operations.get(&id).unwrap();
    assert_eq!(
        (seen.phase(), seen.progress.unwrap().percent),
        (P::Completed, 100)
    );
    assert!(seen.end_time.is_some() && seen.error.is_none());
}

#[tokio::test]
async fn a_watcher_sees_the_end_and_the_end_is_one() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    let mut watch = operations.watch(handle.id()).unwrap();
    handle.fail(&Failure::precondition("DISK_IN_USE", "no"));
    let seen = watch
        .wait_for(|operation| has_ended(operation))
        .await
        .unwrap()
        .clone();
    assert_eq!((seen.phase(), reason(&seen).as_str()), (P::Failed, "DISK_IN_USE"));
    let error = seen.error.clone().unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (tonic::Code::FailedPrecondition as i32, "no")
    );
    // Dropping the handle said nothing more.
    assert_eq!(list(&operations).len(), 1);
    assert_eq!(list(&operations)[0].message, "no");
}

#[test]
fn an_operation_that_nobody_carries_out_any_more_has_failed() {
    let (_folder, operations) = operations();
    let id = begin(&operations, None).id().to_owned();
    let seen = operations.get(&id).unwrap();
    assert_eq!((seen.phase(), reason(&seen).as_str()), (P::Failed, "INTERNAL"));
}

#[test]
fn cancel_reaches_the_owner_and_is_no_error_after_the_end() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    let id = handle.id().to_owned();
    operations.cancel(&id).unwrap();
    assert!(handle.token().is_cancelled());
    assert_eq!(handle.cause(), Some(Cause::Request));
    assert!(!handle.commit(), "the cancel came first");
    handle.cancelled("it is stopped");
    let seen = operations.cancel(&id).unwrap().borrow().clone();
    assert_eq!(
        (seen.phase(), reason(&seen).as_str()),
        (P::Cancelled, "CANCELLED")
    );
    for unknown in ["x", "00000000-0000-0000-0000-000000000000"] {
        assert_eq!(
            operations.cancel(unknown).unwrap_err().reason,
            "OPERATION_NOT_FOUND"
        );
    }
}

#[test]
fn after_a_commit_a_cancel_is_refused() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    assert!(handle.commit());
    assert_eq!(
        operations.cancel(handle.id()).unwrap_err().reason,
        "NOT_CANCELLABLE"
    );
    assert!(!handle.token().is_cancelled());
}

#[tokio::test]
async fn a_deadline_cancels() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, Some(Duration::from_millis(1)));
    assert!(operations.get(handle.id()).unwrap().deadline.is_some());
    handle.token().cancelled().await;
    assert_eq!(handle.cause(), Some(Cause::Deadline));
    let id = handle.id().to_owned();
    handle.cancelled("too late");
    let seen = operations.get(&id).unwrap();
    assert_eq!(reason(&seen), "DEADLINE_EXCEEDED");
}

#[test]
fn lists_have_the_newest_first_and_go_on_before_any_of_them() {
    let (_folder, operations) = operations();
    let first = begin(&operations, None);
    let node = operations.begin(Type::NodeDrain, &Object::Node, &Context::daemon(), None);
    let types: Vec<_> = list(&operations).iter().map(|seen| seen.r#type.clone()).collect();
    assert_eq!(types, ["node.drain", "vm.start"]);
    let mut before = Vec::new();
    operations.each(node.id().parse().ok(), |operation| {
        before.push(operation.id.clone());
        true
    });
    assert_eq!(before, [first.id()]);
}

#[test]
fn changes_since_a_place_are_told_once_and_in_order() {
    let (_folder, operations) = operations();
    let (first, second) = (begin(&operations, None), begin(&operations, None));
    let (all, place) = operations.since(None);
    assert_eq!(all.len(), 2);
    assert_eq!(operations.since(Some(place)).0, []);
    second.progress(Progress::steps(1, 2), "a");
    first.progress(Progress::steps(1, 2), "a");
    second.progress(Progress::steps(1, 2), "b");
    let (changed, _) = operations.since(Some(place));
    let ids: Vec<_> = changed
        .iter()
        .map(|change| change.operation.id.as_str())
        .collect();
    assert_eq!(ids, [first.id(), second.id()]);
    assert_eq!(changed[0].operation.message, "a");
    assert_eq!(operations.since(Some(changed[0].at)).0.len(), 1);
    let third = begin(&operations, None);
    third.progress(Progress::steps(1, 2), "a");
    let (changed, _) = operations.since(Some(place));
    let new: Vec<_> = changed.iter().map(|change| change.new).collect();
    assert_eq!(new, [false, false, true]);
    // A place of another daemon says nothing.
    let other = Position {
        nonce: place.nonce ^ 1,
        ..place
    };
    assert_eq!(operations.since(Some(other)).0.len(), 3);
}

#[test]
fn only_ended_operations_are_forgotten_by_number_and_age() {
    let (_folder, operations) = operations();
    let kept = begin(&operations, None);
    let mut ids = Vec::new();
    for _ in 0..=registry::HISTORY {
        let handle = begin(&operations, None);
        ids.push(handle.id().to_owned());
        handle.complete("");
    }
    assert!(operations.get(&ids[0]).is_err());
    assert!(operations.get(&ids[1]).is_ok());
    assert_eq!(list(&operations).len(), registry::HISTORY + 1);
    assert_eq!(operations.since(None).0.len(), registry::HISTORY + 1);
    let later = text::now_ms() + registry::KEPT_MS;
    let mut left = Vec::new();
    operations.shared.each(None, later, |operation| {
        left.push(operation.id.clone());
        true
    });
    assert_eq!(left, [kept.id()]);
    assert!(operations.get(kept.id()).is_ok());
}

#[tokio::test]
async fn who_waits_is_told_what_came_of_it() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    let pending = handle.pending();
    handle.complete_with("", Arc::default(), None);
    assert_eq!(pending.ended().await.unwrap(), Some(Arc::default()));
    let handle = begin(&operations, None);
    let pending = handle.pending();
    handle.fail(&Failure::precondition("DISK_IN_USE", "no"));
    assert_eq!(pending.ended().await.unwrap_err().reason, "DISK_IN_USE");
    let handle = begin(&operations, None);
    let pending = handle.pending();
    drop(handle);
    assert_eq!(pending.ended().await.unwrap_err().reason, "OPERATION_GIVEN_UP");
}

#[test]
fn what_was_committed_can_be_opened_again() {
    let (_folder, operations) = operations();
    let handle = begin(&operations, None);
    assert!(handle.commit());
    handle.reopen();
    operations.cancel(handle.id()).unwrap();
    assert!(handle.token().is_cancelled());
}

#[tokio::test]
async fn the_next_daemon_knows_what_has_ended_and_ends_what_was_left() {
    let (folder, operations) = operations();
    let ended = begin(&operations, None);
    let ended_id = ended.id().to_owned();
    let exit = v1::StopResult::default();
    ended.complete_as("done", Detail::Stopped(exit));
    let before = operations.get(&ended_id).unwrap();
    let goes_on = begin(&operations, Some(Duration::from_millis(1)));
    let goes_on_id = goes_on.id().to_owned();
    let lost = operations.begin(Type::NodeDrain, &Object::Node, &Context::daemon(), None);
    let lost_id = lost.id().to_owned();
    let deleted = operations.begin(
        Type::VmDelete,
        &Object::Vm("gone".into(), Uuid::nil()),
        &Context::daemon(),
        None,
    );
    let deleted_id = deleted.id().to_owned();
    let (_next, operations) = next(&folder, &operations).await;
    assert_eq!(operations.get(&ended_id).unwrap(), before);
    let [handle] = <[Handle; 1]>::try_from(operations.left(&web())).unwrap();
    assert_eq!(
        (handle.id(), handle.kind(), handle.context().request_id.as_str()),
        (goes_on_id.as_str(), Some(Type::VmStart), "r")
    );
    assert!(operations.left(&web()).is_empty());
    // Its deadline has passed meanwhile.
    handle.token().cancelled().await;
    handle.cancelled("too late");
    operations.give_up_left(|kind, uid| {
        (kind == Type::VmDelete && uid == Uuid::nil().to_string()).then_some("the VM is deleted")
    });
    let phase = |id: &str| {
        let operation = operations.get(id).unwrap();
        (operation.phase(), reason(&operation))
    };
    assert_eq!(phase(&goes_on_id), (P::Cancelled, "DEADLINE_EXCEEDED".into()));
    assert_eq!(phase(&lost_id), (P::Failed, "DAEMON_RESTARTED".into()));
    assert_eq!(phase(&deleted_id), (P::Completed, String::new()));
    let types: Vec<_> = list(&operations).iter().map(|seen| seen.id.clone()).collect();
    assert_eq!(types, [deleted_id, lost_id, goes_on_id, ended_id]);
}

#[tokio::test]
async fn a_clock_set_back_gives_an_operation_no_more_time() {
    const YEARS: u64 = 14 * 365 * 24 * 3600 * 1000;
    let (folder, operations) = operations();
    let _handle = begin(&operations, Some(Duration::from_millis(1)));
    operations.recorded().await;
    let next = tempfile::tempdir().unwrap();
    std::fs::copy(Store::file(folder.path()), Store::file(next.path())).unwrap();
    let (store, mut records) = Store::open(next.path(), &Key::of(&[7; 32])).unwrap();
    for record in &mut records.operations {
        record.began_ms += YEARS;
        let mut operation = record.decoded().unwrap();
        let deadline = operation.deadline.as_ref().map(text::unix_ms).unwrap();
        operation.deadline = text::timestamp(deadline + YEARS);
        record.operation = prost::Message::encode_to_vec(&operation);
    }
    let operations = Operations::new(store, records.operations);
    let [handle] = <[Handle; 1]>::try_from(operations.left(&web())).unwrap();
    handle.token().cancelled().await;
}

#[tokio::test]
async fn what_is_forgotten_is_forgotten_in_the_store_too() {
    let (folder, operations) = operations();
    for _ in 0..=registry::HISTORY {
        begin(&operations, None).complete("");
    }
    let (_next, operations) = next(&folder, &operations).await;
    assert_eq!(list(&operations).len(), registry::HISTORY);
    // The times at which they ended are kept: an hour later all are gone.
    let later = text::now_ms() + registry::KEPT_MS;
    operations
        .shared
        .each(None, later, |operation| panic!("{operation:?}"));
}
