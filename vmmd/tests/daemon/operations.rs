//! Operations: what takes long, seen from beside, not waited for, and cancelled.

use std::time::Duration;

use tokio_stream::StreamExt;
use tonic::Code;
use vmmd_api::{
    v1::{
        self, ExitReason, OperationPhase as P, VmPhase,
        operation::{Metadata, Result as Detail},
    },
    well_known,
};

use crate::{
    harness::{Daemon, assert_refused, status, vm_pid},
    verbs::exit_reason,
};

/// Until its end; all that was seen.
async fn watch(daemon: &Daemon, id: &str) -> Vec<v1::Operation> {
    let request = v1::WatchOperationRequest { id: id.into() };
    let response = daemon.operations().await.watch_operation(request).await;
    let stream = response.unwrap().into_inner();
    stream
        .map(|seen| seen.unwrap().operation.unwrap())
        .collect()
        .await
}

fn start(name: &str) -> v1::StartVmRequest {
    v1::StartVmRequest {
        name: name.into(),
        ..Default::default()
    }
}

fn stop(name: &str) -> v1::StopVmRequest {
    v1::StopVmRequest {
        name: name.into(),
        ..Default::default()
    }
}

fn soon() -> Option<well_known::Duration> {
    Some(Duration::from_millis(50).into())
}

fn reason(operation: &v1::Operation) -> String {
    operation
        .error
        .as_ref()
        .map_or_else(String::new, |error| error.reason())
}

fn of_vm(name: &str) -> Option<v1::ObjectReference> {
    Some(v1::ObjectReference {
        kind: "Vm".into(),
        name: name.into(),
        uid: String::new(),
    })
}

async fn list(daemon: &Daemon, filter: v1::OperationFilter) -> Vec<v1::Operation> {
    let request = v1::ListOperationsRequest {
        filter: Some(filter),
        ..Default::default()
    };
    let response = daemon.operations().await.list_operations(request).await;
    response.unwrap().into_inner().operations
}

#[tokio::test]
async fn what_takes_long_is_an_operation_that_the_answer_names() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let mut client = daemon.client();
    let request = v1::StartVmRequest {
        request_id: "first".into(),
        ..start("web")
    };
    let started = client.start_vm(request).await.unwrap().into_inner();
    let vm = started.vm.unwrap();
    assert_eq!(status(&vm).operation, "", "it is over");
    let operation = started.operation.unwrap();
    assert_eq!(
        (operation.r#type.as_str(), operation.phase()),
        ("vm.start", P::Completed)
    );
    let target = operation.target.clone().unwrap();
    assert_eq!(
        (target.name.as_str(), operation.progress.unwrap().percent),
        ("web", 100)
    );
    assert_eq!(
        (operation.request_id.as_str(), &target.uid),
        ("first", &vm.metadata.unwrap().uid)
    );
    assert!(operation.create_time.is_some() && operation.end_time.is_some());
    assert_eq!(daemon.operation(&operation.id).await, operation);

    let request = v1::RestartVmRequest {
        name: "web".into(),
        ..Default::default()
    };
    let restarted = client.restart_vm(request).await.unwrap().into_inner();
    assert_eq!(restarted.operation.unwrap().r#type, "vm.restart");
    let stopped = client.stop_vm(stop("web")).await.unwrap().into_inner();
    let stopped = stopped.operation.unwrap();
    let Some(Detail::Stopped(result)) = stopped.result.clone() else {
        panic!("{stopped:?}");
    };
    assert_eq!(
        (stopped.phase(), result.exit.unwrap().reason()),
        (P::Completed, ExitReason::Stopped)
    );
    // A stop of a stopped VM creates no operation.
    assert_eq!(
        client.stop_vm(stop("web")).await.unwrap().into_inner().operation,
        None
    );
    let request = v1::DeleteVmRequest {
        name: "web".into(),
        ..Default::default()
    };
    let deleted = client.delete_vm(request).await.unwrap().into_inner();
    assert_eq!(deleted.operation.unwrap().phase(), P::Completed);

    let all = list(&daemon, v1::OperationFilter::default()).await;
    let types: Vec<_> = all.iter().map(|operation| operation.r#type.as_str()).collect();
    assert_eq!(types, ["vm.delete", "vm.stop", "vm.restart", "vm.start"]);
    let only = v1::OperationFilter {
        types: vec!["vm.stop".into(), "vm.restart".into()],
        target: of_vm("web"),
        ..Default::default()
    };
    assert_eq!(list(&daemon, only).await, all[1..3]);
    let only = v1::OperationFilter {
        request_id: "first".into(),
        ..Default::default()
    };
    assert_eq!(list(&daemon, only).await, all[3..]);
    let refused = daemon.cancel("nonsense").await.unwrap_err();
    assert_refused(&refused, Code::NotFound, "OPERATION_NOT_FOUND");
}

#[tokio::test]
async fn call_without_wait_returns_a_watchable_operation() {
    let daemon = Daemon::start().await;
    daemon.run("deaf", "mock.power=ignore").await;
    let request = v1::StopVmRequest {
        no_wait: true,
        ..stop("deaf")
    };
    let begun = daemon.client().stop_vm(request).await.unwrap().into_inner();
    let operation = begun.operation.unwrap();
    assert_eq!(
        (operation.r#type.as_str(), operation.phase()),
        ("vm.stop", P::InProgress)
    );
    let Some(Metadata::Stop(stop_of)) = &operation.metadata else {
        panic!("{operation:?}");
    };
    assert_eq!(stop_of.stage(), v1::StopStage::Asked);
    assert!(stop_of.kill_time.is_some());
    let vm = begun.vm.unwrap();
    assert_eq!(
        (status(&vm).phase(), &status(&vm).operation),
        (VmPhase::Stopping, &operation.id)
    );
    let active = v1::OperationFilter {
        target: of_vm("deaf"),
        active: true,
        ..Default::default()
    };
    let active = list(&daemon, active).await;
    assert_eq!(
        active.iter().map(|active| &active.id).collect::<Vec<_>>(),
        [&operation.id]
    );
    // The same again is the same operation; by force it is over at once.
    let forced = v1::StopVmRequest {
        force: true,
        ..stop("deaf")
    };
    let (seen, forced) = tokio::join!(watch(&daemon, &operation.id), async {
        daemon.client().stop_vm(forced).await.unwrap().into_inner()
    });
    assert_eq!(forced.operation.unwrap().id, operation.id);
    let last = seen.last().unwrap();
    let Some(Detail::Stopped(result)) = last.result.clone() else {
        panic!("{last:?}");
    };
    assert_eq!(
        (last.phase(), result.exit.unwrap().reason()),
        (P::Completed, ExitReason::Killed)
    );
}

#[tokio::test]
async fn a_cancelled_start_leaves_the_vm_stopped() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let id = daemon.start_without_wait("web").await.id;
    let cancelled = daemon.cancel(&id).await.unwrap();
    assert_eq!(
        (cancelled.phase(), reason(&cancelled).as_str()),
        (P::Cancelled, "CANCELLED")
    );
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(
        (
            status(&vm).phase(),
            status(&vm).reason.as_str(),
            status(&vm).operation.as_str()
        ),
        (VmPhase::Stopped, "StartCancelled", "")
    );
    assert_eq!(daemon.vmm_processes(), []);
    assert_eq!(
        daemon.cancel(&id).await.unwrap(),
        cancelled,
        "cancelling what has ended is no error"
    );
}

#[tokio::test]
async fn a_start_that_is_not_complete_at_its_deadline_is_cancelled() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let request = v1::StartVmRequest {
        timeout: soon(),
        ..start("web")
    };
    let refused = daemon.client().start_vm(request).await.unwrap_err();
    assert_refused(&refused, Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
    assert_eq!(daemon.phase("web").await, VmPhase::Stopped);
    assert_eq!(daemon.vmm_processes(), []);
    let request = v1::StartVmRequest {
        timeout: Some(well_known::Duration::default()),
        ..start("web")
    };
    let refused = daemon.client().start_vm(request).await.unwrap_err();
    assert_refused(&refused, Code::InvalidArgument, "INVALID_FIELDS");
}

#[tokio::test]
async fn a_cancelled_stop_leaves_the_guest_running() {
    let daemon = Daemon::start().await;
    let running = daemon.run("deaf", "mock.power=ignore").await;
    let id = daemon.begin_stop("deaf", false).await.id;
    let cancelled = daemon.cancel(&id).await.unwrap();
    assert_eq!(
        (cancelled.phase(), reason(&cancelled).as_str()),
        (P::Cancelled, "CANCELLED")
    );
    assert!(cancelled.message.contains("power button"), "{cancelled:?}");
    let vm = daemon.get("deaf").await.unwrap();
    assert_eq!(
        (status(&vm).phase(), vm_pid(&vm)),
        (VmPhase::Running, vm_pid(&running))
    );
    // It can be stopped as before, also with a deadline that cancels.
    let request = v1::StopVmRequest {
        timeout: soon(),
        ..stop("deaf")
    };
    let refused = daemon.client().stop_vm(request).await.unwrap_err();
    assert_refused(&refused, Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
    let stopped = daemon.kill_vm("deaf").await.unwrap();
    assert_eq!(status(&stopped).phase(), VmPhase::Stopped);
}

#[tokio::test]
async fn what_ends_by_force_can_not_be_cancelled() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("stuck", "").await;
    crate::harness::stop_process(vm_pid(&vm));
    let id = daemon.begin_stop("stuck", true).await.id;
    let refused = daemon.cancel(&id).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_CANCELLABLE");
    assert_eq!(watch(&daemon, &id).await.last().unwrap().phase(), P::Completed);
}

#[tokio::test]
async fn a_restart_whose_start_is_cancelled_leaves_the_vm_stopped() {
    let daemon = Daemon::start().await;
    daemon.run("deaf", "mock.power=ignore").await;
    let id = daemon.begin_restart("deaf").await.id;
    // A plain stop takes it back: that is another operation.
    let request = v1::StopVmRequest {
        force: true,
        ..stop("deaf")
    };
    let stopped = daemon.client().stop_vm(request).await.unwrap().into_inner();
    assert_eq!(status(&stopped.vm.unwrap()).phase(), VmPhase::Stopped);
    assert_ne!(stopped.operation.unwrap().id, id);
    let given_up = daemon.operation(&id).await;
    assert_eq!(
        (given_up.phase(), reason(&given_up).as_str()),
        (P::Cancelled, "SUPERSEDED")
    );
}

#[tokio::test]
async fn a_start_that_fails_says_why_in_its_operation() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=image").await;
    daemon.start_vm("web").await.unwrap_err();
    let failed = &list(&daemon, v1::OperationFilter::default()).await[0];
    assert_eq!(
        (failed.phase(), reason(failed).as_str()),
        (P::Failed, "IMAGE_UNUSABLE")
    );
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(status(&vm).counts.unwrap().failed_starts, 1);
    assert_eq!(exit_reason(&vm), ExitReason::StartFailed);
}

#[tokio::test]
async fn a_create_with_start_names_the_start() {
    let daemon = Daemon::start().await;
    let created = daemon
        .create_as(daemon.manifest("web", ""), true, false)
        .await
        .unwrap();
    assert_eq!(status(created.vm.as_ref().unwrap()).phase(), VmPhase::Pending);
    let id = created.operation.unwrap().id;
    assert_eq!(watch(&daemon, &id).await.last().unwrap().phase(), P::Completed);
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
}

#[tokio::test]
async fn requested_reset_keeps_the_process_and_is_no_guest_reset() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let mut console = crate::console::Client::open(&daemon, "web").await;
    let request = v1::ResetVmRequest {
        name: "web".into(),
        ..Default::default()
    };
    let answer = daemon.client().reset_vm(request.clone()).await.unwrap();
    let reset = answer.into_inner().vm.unwrap();
    assert_eq!(
        (vm_pid(&reset), status(&reset).phase()),
        (vm_pid(&vm), VmPhase::Running)
    );
    assert_eq!(status(&reset).counts.unwrap().guest_resets, 0);
    console.expect("reset by the host").await;
    let nmi = v1::InjectNmiRequest {
        name: "web".into(),
        ..Default::default()
    };
    daemon.client().inject_nmi(nmi.clone()).await.unwrap();
    console.expect("an NMI").await;
    daemon.stop("web", None).await.unwrap();
    let refused = daemon.client().inject_nmi(nmi).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    let refused = daemon.client().reset_vm(request).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
}
