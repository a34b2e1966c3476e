use proto::v1::{OperationKind as K, OperationPhase as P};

use super::*;
use crate::context::Initiator;

fn begin(operations: &Operations, deadline: Option<Duration>) -> Handle {
    let context = Context {
        request_id: "r".into(),
        initiator: Initiator::User(7),
        ..Context::default()
    };
    operations.begin(K::Start, Some(("web", Uuid::nil())), &context, deadline)
}

#[test]
fn an_operation_says_who_began_it_and_how_far_it_is() {
    let operations = Operations::default();
    let handle = begin(&operations, None);
    let seen = operations.get(handle.id()).unwrap();
    assert_eq!(
        (seen.phase(), seen.kind(), seen.vm.as_str()),
        (P::Pending, K::Start, "web")
    );
    assert_eq!(
        (seen.initiator.as_str(), seen.request_id.as_str()),
        ("uid 7", "r")
    );
    handle.progress(40, "booting");
    let seen = operations.get(handle.id()).unwrap();
    assert_eq!(
        (seen.phase(), seen.progress_percent, seen.message.as_str()),
        (P::InProgress, 40, "booting")
    );
    let id = handle.id().to_owned();
    handle.complete("running");
    let seen = operations.get(&id).unwrap();
    assert_eq!((seen.phase(), seen.progress_percent), (P::Completed, 100));
    assert!(seen.end_time.is_some() && seen.error.is_none());
}

#[tokio::test]
async fn a_watcher_sees_the_end_and_the_end_is_one() {
    let operations = Operations::default();
    let handle = begin(&operations, None);
    let mut watch = operations.watch(handle.id()).unwrap();
    handle.fail(&Failure::precondition("DISK_IN_USE", "no"));
    let seen = watch.wait_for(has_ended).await.unwrap().clone();
    assert_eq!(
        (seen.phase(), seen.error.unwrap().reason.as_str()),
        (P::Failed, "DISK_IN_USE")
    );
    // Dropping the handle said nothing more.
    assert_eq!(operations.list("", false).len(), 1);
    assert_eq!(operations.list("", false)[0].message, "no");
}

#[test]
fn an_operation_that_nobody_carries_out_any_more_has_failed() {
    let operations = Operations::default();
    let id = begin(&operations, None).id().to_owned();
    let seen = operations.get(&id).unwrap();
    assert_eq!(
        (seen.phase(), seen.error.unwrap().reason.as_str()),
        (P::Failed, "INTERNAL")
    );
}

#[test]
fn a_cancel_is_heard_by_the_owner_and_one_of_what_has_ended_is_no_error() {
    let operations = Operations::default();
    let handle = begin(&operations, None);
    let id = handle.id().to_owned();
    operations.cancel(&id).unwrap();
    assert!(handle.token().is_cancelled());
    assert_eq!(handle.cause(), Some(Cause::Request));
    assert!(!handle.commit(), "the wish came first");
    handle.cancelled("it is stopped");
    let seen = operations.cancel(&id).unwrap().borrow().clone();
    assert_eq!(
        (seen.phase(), seen.error.unwrap().reason.as_str()),
        (P::Cancelled, "CANCELLED")
    );
    assert_eq!(operations.cancel("x").unwrap_err().reason, "OPERATION_NOT_FOUND");
}

#[test]
fn after_a_commit_a_cancel_is_refused() {
    let operations = Operations::default();
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
    let operations = Operations::default();
    let handle = begin(&operations, Some(Duration::from_millis(1)));
    assert!(operations.get(handle.id()).unwrap().deadline.is_some());
    handle.token().cancelled().await;
    assert_eq!(handle.cause(), Some(Cause::Deadline));
    let id = handle.id().to_owned();
    handle.cancelled("too late");
    assert_eq!(
        operations.get(&id).unwrap().error.unwrap().reason,
        "DEADLINE_EXCEEDED"
    );
}

#[test]
fn lists_have_the_newest_first_and_can_be_of_one_vm_or_of_what_is_under_way() {
    let operations = Operations::default();
    let first = begin(&operations, None);
    let node = operations.begin(K::Drain, None, &Context::daemon(), None);
    let kinds = |list: Vec<v1::Operation>| list.iter().map(v1::Operation::kind).collect::<Vec<_>>();
    assert_eq!(kinds(operations.list("", false)), [K::Drain, K::Start]);
    assert_eq!(kinds(operations.list("web", false)), [K::Start]);
    first.complete("");
    assert_eq!(kinds(operations.list("", true)), [K::Drain]);
    drop(node);
    assert!(operations.list("", true).is_empty());
}

#[test]
fn what_has_ended_is_forgotten_by_number_and_by_age_and_what_is_under_way_is_not() {
    let operations = Operations::default();
    let kept = begin(&operations, None);
    let mut ids = Vec::new();
    for _ in 0..=registry::HISTORY {
        let handle = begin(&operations, None);
        ids.push(handle.id().to_owned());
        handle.complete("");
    }
    assert!(operations.get(&ids[0]).is_err());
    assert!(operations.get(&ids[1]).is_ok());
    assert_eq!(operations.list("", false).len(), registry::HISTORY + 1);
    let later = Instant::now() + registry::KEPT;
    let left = operations.shared.list(later);
    assert_eq!(
        left.iter().map(|left| left.id.as_str()).collect::<Vec<_>>(),
        [kept.id()]
    );
    assert!(operations.get(kept.id()).is_ok());
}

#[tokio::test]
async fn who_waits_is_told_what_came_of_it() {
    let operations = Operations::default();
    let handle = begin(&operations, None);
    let pending = handle.pending();
    handle.complete_with("", Arc::default());
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
    let operations = Operations::default();
    let handle = begin(&operations, None);
    assert!(handle.commit());
    handle.reopen();
    operations.cancel(handle.id()).unwrap();
    assert!(handle.token().is_cancelled());
}
