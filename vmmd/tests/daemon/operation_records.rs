//! Operations over the end of the daemon, and seen all together.

use tokio_stream::StreamExt;
use tonic::{Code, Streaming};
use vmmd_api::v1::{self, OperationPhase as P, WatchEventType as W, operation::Result as Detail};

use crate::harness::{Daemon, assert_refused};

async fn begin_stop(daemon: &Daemon, name: &str, evacuate: bool) -> String {
    let request = v1::StopVmRequest {
        name: name.into(),
        evacuate,
        no_wait: true,
        request_id: format!("stop {name}"),
        ..Default::default()
    };
    let begun = daemon.client().stop_vm(request).await.unwrap().into_inner();
    begun.operation.unwrap().id
}

/// Waits for its end.
pub async fn ended(daemon: &Daemon, id: &str) -> v1::Operation {
    let request = v1::WatchOperationRequest { id: id.into() };
    let response = daemon.operations().await.watch_operation(request).await;
    let mut stream = response.unwrap().into_inner();
    let mut last = None;
    while let Some(seen) = stream.next().await {
        last = seen.unwrap().operation;
    }
    last.unwrap()
}

fn reason(operation: &v1::Operation) -> String {
    operation
        .error
        .as_ref()
        .map_or_else(String::new, |error| error.reason())
}

#[tokio::test]
async fn continued_stop_keeps_its_operation_in_the_next_daemon() {
    let mut daemon = Daemon::start().await;
    daemon.run("deaf", "mock.power=ignore").await;
    let id = begin_stop(&daemon, "deaf", false).await;
    daemon.kill_and_restart().await;
    let goes_on = daemon.operation(&id).await;
    assert_eq!(
        (goes_on.phase(), goes_on.request_id.as_str()),
        (P::InProgress, "stop deaf")
    );
    let (end, killed) = tokio::join!(ended(&daemon, &id), daemon.kill_vm("deaf"));
    killed.unwrap();
    let Some(Detail::Stopped(result)) = end.result.clone() else {
        panic!("{end:?}");
    };
    let exit = result.exit.unwrap();
    assert_eq!(
        (end.phase(), exit.reason()),
        (P::Completed, v1::ExitReason::Killed)
    );
    // The end is known to a daemon after that, also when this one was killed in the moment in which it told.
    daemon.kill_and_restart().await;
    assert_eq!(daemon.operation(&id).await.phase(), P::Completed);
}

#[tokio::test]
async fn interrupted_start_has_failed_and_its_watcher_is_notified() {
    let mut daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let request = v1::StartVmRequest {
        name: "web".into(),
        no_wait: true,
        request_id: "start web".into(),
        ..Default::default()
    };
    let begun = daemon.client().start_vm(request).await.unwrap().into_inner();
    let id = begun.operation.unwrap().id;
    daemon.kill_and_restart().await;
    let end = ended(&daemon, &id).await;
    assert_eq!(
        (end.phase(), reason(&end).as_str()),
        (P::Failed, "DAEMON_RESTARTED")
    );
    assert!(end.message.contains("does not run"), "{}", end.message);
    assert!(end.end_time.is_some());
    let request = v1::ListOperationsRequest {
        filter: Some(v1::OperationFilter {
            request_id: "start web".into(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let found = daemon.operations().await.list_operations(request).await;
    assert_eq!(found.unwrap().into_inner().operations, [end]);
}

#[tokio::test]
async fn a_start_is_complete_for_the_next_daemon_when_the_vm_runs() {
    let mut daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let request = v1::StartVmRequest {
        name: "web".into(),
        ..Default::default()
    };
    let started = daemon.client().start_vm(request).await.unwrap().into_inner();
    let operation = started.operation.unwrap();
    // At once: its end may not be in the store yet.
    daemon.kill_and_restart().await;
    let after = daemon.operation(&operation.id).await;
    assert_eq!(
        (after.phase(), &after.target, &after.create_time),
        (P::Completed, &operation.target, &operation.create_time)
    );
    daemon.terminate();
    daemon.relaunch().await;
    assert_eq!(daemon.operation(&operation.id).await, after);
}

#[tokio::test]
async fn what_no_record_tells_how_to_go_on_with_has_failed() {
    let mut daemon = Daemon::start().await;
    daemon.run("moves", "mock.power=ignore").await;
    daemon.run("again", "mock.power=ignore").await;
    let evacuation = begin_stop(&daemon, "moves", true).await;
    let restart = daemon.begin_restart("again").await.id;
    daemon.kill_and_restart().await;
    for id in [evacuation, restart] {
        let end = ended(&daemon, &id).await;
        assert_eq!(
            (end.phase(), reason(&end).as_str()),
            (P::Failed, "DAEMON_RESTARTED")
        );
        assert!(end.message.contains("runs"), "{}", end.message);
    }
}

#[tokio::test]
async fn lists_have_pages() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    for _ in 0..3 {
        daemon.start_vm("web").await.unwrap();
        daemon.kill_vm("web").await.unwrap();
    }
    let mut client = daemon.operations().await;
    let all = client.list_operations(v1::ListOperationsRequest::default()).await;
    let all = all.unwrap().into_inner();
    assert_eq!((all.operations.len(), all.next_page_token.as_str()), (6, ""));
    let mut request = v1::ListOperationsRequest {
        page_size: 4,
        ..Default::default()
    };
    let answer = client.list_operations(request.clone()).await.unwrap();
    let first = answer.into_inner();
    assert_eq!(first.operations, all.operations[..4]);
    // An operation that begins meanwhile is not on a later page.
    daemon.start_vm("web").await.unwrap();
    request.page_token = first.next_page_token;
    let answer = client.list_operations(request.clone()).await.unwrap();
    let second = answer.into_inner();
    assert_eq!(second.operations, all.operations[4..]);
    assert_eq!(
        (second.next_page_token, second.cursor),
        (String::new(), first.cursor)
    );
    request.page_token = "nonsense".into();
    let refused = client.list_operations(request).await.unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "INVALID_FIELDS");
}

async fn watch(daemon: &Daemon, filter: v1::OperationFilter, cursor: &str) -> Watch {
    let request = v1::WatchOperationsRequest {
        filter: Some(filter),
        cursor: cursor.into(),
    };
    let stream = daemon.operations().await.watch_operations(request).await;
    Watch(stream.unwrap().into_inner())
}

struct Watch(Streaming<v1::WatchOperationsResponse>);

impl Watch {
    async fn next(&mut self) -> v1::WatchOperationsResponse {
        self.0.next().await.unwrap().unwrap()
    }

    /// All up to the message that says that this is all; and that one's cursor.
    async fn until_synced(&mut self) -> (Vec<v1::Operation>, String) {
        let mut seen = Vec::new();
        loop {
            let message = self.next().await;
            match message.operation {
                Some(operation) => seen.push(operation),
                None => {
                    assert_eq!(message.r#type(), v1::WatchEventType::Synced);
                    return (seen, message.cursor);
                }
            }
        }
    }
}

#[tokio::test]
async fn a_watch_of_all_sends_what_is_there_and_then_each_change() {
    let daemon = Daemon::start().await;
    daemon.run("deaf", "mock.power=ignore").await;
    let of_deaf = v1::OperationFilter {
        target: Some(v1::ObjectReference {
            name: "deaf".into(),
            ..Default::default()
        }),
        active: true,
        ..Default::default()
    };
    let mut active = watch(&daemon, of_deaf, "").await;
    assert_eq!(active.until_synced().await.0, []);
    let mut all = watch(&daemon, v1::OperationFilter::default(), "").await;
    let (seen, cursor) = all.until_synced().await;
    assert_eq!(seen.len(), 1);
    daemon.run("other", "").await;
    let id = begin_stop(&daemon, "deaf", false).await;
    daemon.kill_vm("deaf").await.unwrap();
    // A watch of active operations reports their end too.
    let mut seen_before = false;
    let last = loop {
        let message = active.next().await;
        let began = std::mem::replace(&mut seen_before, true);
        let kind = if began { W::Modified } else { W::Added };
        let (seen_as, operation) = (message.r#type(), message.operation.unwrap());
        assert_eq!((seen_as, operation.id.as_str()), (kind, id.as_str()));
        if operation.end_time.is_some() {
            break operation;
        }
    };
    assert_eq!(last.phase(), P::Completed);
    // A resumed watch sends each changed operation once, in its present state.
    let mut resumed = watch(&daemon, v1::OperationFilter::default(), &cursor).await;
    let (seen, _) = resumed.until_synced().await;
    let types: Vec<_> = seen
        .iter()
        .map(|seen| (seen.r#type.as_str(), seen.phase()))
        .collect();
    assert_eq!(types, [("vm.start", P::Completed), ("vm.stop", P::Completed)]);
}

#[tokio::test]
async fn a_cursor_of_an_earlier_daemon_is_answered_with_all() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut all = watch(&daemon, v1::OperationFilter::default(), "").await;
    let (seen, cursor) = all.until_synced().await;
    daemon.terminate();
    daemon.relaunch().await;
    let mut resumed = watch(&daemon, v1::OperationFilter::default(), &cursor).await;
    assert_eq!(resumed.until_synced().await.0, seen);
}
