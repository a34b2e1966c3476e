//! Draining the node.

use tonic::{Code, Status};
use vmmd_api::{
    v1::{
        self, OperationPhase, RunPolicy, VmPhase,
        operation::{Metadata, Result as Detail},
    },
    well_known,
};

use crate::{
    harness::{Daemon, assert_refused, connect, status, vm_pid},
    migration,
    policies::{LONG, running_with, waits},
    verbs::exit_reason,
};

async fn drain(daemon: &Daemon, grace_seconds: i64, no_wait: bool) -> Result<v1::DrainNodeResponse, Status> {
    let request = v1::DrainNodeRequest {
        reason: "new kernel".into(),
        grace_period: Some(well_known::Duration {
            seconds: grace_seconds,
            nanos: 0,
        }),
        no_wait,
        ..Default::default()
    };
    Ok(daemon.nodes().await.drain_node(request).await?.into_inner())
}

async fn cordoned(daemon: &Daemon) -> bool {
    daemon.node().await.spec.unwrap().cordoned
}

#[tokio::test]
async fn drained_node_runs_nothing_until_uncordon_restores_policies() {
    // They come back at once: that they were stopped is no failure of theirs.
    let daemon = Daemon::configured(LONG).await;
    running_with(&daemon, "always", "", RunPolicy::AlwaysOn).await;
    running_with(&daemon, "unless", "", RunPolicy::AlwaysOnUnlessStopped).await;
    running_with(&daemon, "manual", "", RunPolicy::Manual).await;
    // Does nothing when it is asked to power off.
    running_with(&daemon, "deaf", "mock.power=ignore", RunPolicy::Manual).await;
    let drained = drain(&daemon, 1, false).await.unwrap();
    let operation = drained.operation.unwrap();
    assert_eq!(
        (operation.r#type.as_str(), operation.phase()),
        ("node.drain", OperationPhase::Completed)
    );
    let progress = operation.progress.unwrap();
    assert_eq!(
        (progress.percent, progress.done, progress.total, progress.unit()),
        (100, 4, 4, v1::ProgressUnit::Vms)
    );
    let Some(Detail::Drained(result)) = operation.result else {
        panic!("{operation:?}");
    };
    assert_eq!(result.stopped, ["always", "deaf", "manual", "unless"]);
    assert_eq!(result.killed, ["deaf"]);
    assert_eq!(daemon.vmm_processes(), []);
    assert!(cordoned(&daemon).await);
    let deaf = daemon.get("deaf").await.unwrap();
    assert_eq!(exit_reason(&deaf), v1::ExitReason::Killed);
    daemon.uncordon().await.unwrap();
    daemon.wait_phase("always", VmPhase::Running).await;
    daemon.wait_phase("unless", VmPhase::Running).await;
    for name in ["manual", "deaf"] {
        assert_eq!(daemon.phase(name).await, VmPhase::Stopped, "{name}");
    }
}

#[tokio::test]
async fn cancelled_drain_keeps_running_vms_and_the_cordon() {
    let daemon = Daemon::start().await;
    running_with(&daemon, "deaf", "mock.power=ignore", RunPolicy::Manual).await;
    let begun = drain(&daemon, 3600, true).await.unwrap();
    daemon.wait_phase("deaf", VmPhase::Stopping).await;
    let second = drain(&daemon, 3600, true).await.unwrap_err();
    assert_refused(&second, Code::FailedPrecondition, "NODE_DRAINING");
    let early = daemon.uncordon().await.unwrap_err();
    assert_refused(&early, Code::FailedPrecondition, "NODE_DRAINING");
    let mut operations = daemon.operations().await;
    let id = begun.operation.unwrap().id;
    let Some(Metadata::Drain(drain_of)) = daemon.operation(&id).await.metadata else {
        panic!("a drain says what remains");
    };
    assert_eq!(drain_of.remaining, ["deaf"]);
    let ended = operations
        .cancel_operation(v1::CancelOperationRequest { id })
        .await
        .unwrap();
    let operation = ended.into_inner().operation.unwrap();
    assert_eq!(operation.phase(), OperationPhase::Cancelled);
    assert!(operation.message.contains("deaf"), "{}", operation.message);
    daemon.wait_phase("deaf", VmPhase::Running).await;
    assert!(cordoned(&daemon).await);
    daemon.uncordon().await.unwrap();
}

#[tokio::test]
async fn a_drain_does_not_outlive_the_daemon_and_the_cordon_does() {
    let mut daemon = Daemon::start().await;
    running_with(&daemon, "deaf", "mock.power=ignore", RunPolicy::Manual).await;
    let begun = drain(&daemon, 3600, true).await.unwrap();
    daemon.wait_phase("deaf", VmPhase::Stopping).await;
    daemon.kill_and_restart().await;
    let operation = daemon.operation(&begun.operation.unwrap().id).await;
    assert_eq!(
        (operation.phase(), operation.error.unwrap().reason().as_str()),
        (OperationPhase::Cancelled, "DAEMON_RESTARTED")
    );
    assert!(cordoned(&daemon).await);
    assert_eq!(daemon.vmm_processes().len(), 1);
    let mut events = v1::event_service_client::EventServiceClient::new(connect(daemon.folder.path()).await);
    let request = v1::ListEventsRequest {
        filter: Some(v1::EventFilter {
            reasons: vec!["DrainCancelled".into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    let told = events.list_events(request).await.unwrap().into_inner().events;
    assert_eq!(told.len(), 1);
    daemon.uncordon().await.expect("no drain is under way any more");
}

#[tokio::test]
async fn drain_waits_for_a_vm_that_is_being_migrated() {
    let (first, second) = migration::pair().await;
    first.run("web", "").await;
    first.run("other", "").await;
    second.fault("received-Prepare");
    let moving = first.migrate("web", &second).await.unwrap();
    second.reached("received-Prepare").await;
    let begun = drain(&first, 60, true).await.unwrap().operation.unwrap();
    // The other one is stopped meanwhile.
    first.wait_phase("other", VmPhase::Stopped).await;
    let under_way = first.operation(&begun.id).await;
    assert_eq!(under_way.phase(), OperationPhase::InProgress, "{under_way:?}");
    second.release("received-Prepare");
    assert_eq!(first.ended(&moving).await.phase(), OperationPhase::Completed);
    let drained = first.completes(&begun).await;
    let Some(Detail::Drained(result)) = drained.result else {
        panic!("{:?}", drained.result);
    };
    assert_eq!(result.stopped, ["other"]);
    second.wait_phase("web", VmPhase::Running).await;
}

#[tokio::test]
async fn drain_keeps_vms_down_that_wait_for_their_run_policy() {
    let daemon = Daemon::configured("[restart]\nfirst_ms = 60000\n").await;
    running_with(&daemon, "web", "", RunPolicy::AlwaysOnUnlessStopped).await;
    let vm = daemon.get("web").await.unwrap();
    rustix::process::kill_process(vm_pid(&vm), rustix::process::Signal::KILL).unwrap();
    daemon.wait("web", waits).await;
    drain(&daemon, 60, false).await.unwrap();
    let held = daemon.get("web").await.unwrap();
    assert!(!waits(status(&held)), "{held:?}");
    daemon.uncordon().await.unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
}
