//! Create, start, stop, restart, pause, resume, delete.

use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tonic::Code;
use vmmd_api::v1::{self, ConditionStatus, ExitReason, VmPhase};

use crate::{
    harness::{Daemon, assert_refused, assert_says, status, vm_pid},
    verbs::exit_reason,
};

#[tokio::test]
async fn a_vm_goes_through_its_whole_life() {
    let daemon = Daemon::start().await;
    let created = daemon.create(daemon.manifest("web", "")).await.unwrap();
    assert_eq!(status(&created).phase(), VmPhase::Stopped);

    let running = daemon.start_vm("web").await.unwrap();
    assert_eq!(status(&running).phase(), VmPhase::Running);
    let instance = status(&running).instance.clone().unwrap();
    assert!(daemon.uids.contains(&instance.uid) && instance.vmm_version == "mock");
    let ready = &status(&running).conditions[0];
    assert_eq!(
        (ready.r#type.as_str(), ready.status()),
        ("Ready", ConditionStatus::True)
    );

    for case in ["runs", "is paused already"] {
        let paused = daemon.pause("web").await.unwrap();
        assert_eq!(status(&paused).phase(), VmPhase::Paused, "{case}");
    }
    let resumed = daemon.resume("web").await.unwrap();
    assert_eq!(
        (status(&resumed).phase(), vm_pid(&resumed)),
        (VmPhase::Running, vm_pid(&running))
    );

    let restarted = daemon.restart("web", false).await.unwrap();
    assert_eq!(status(&restarted).phase(), VmPhase::Running);
    assert_ne!(vm_pid(&restarted), vm_pid(&running));

    let stopped = daemon.stop("web", None).await.unwrap();
    assert_eq!(status(&stopped).phase(), VmPhase::Stopped);
    assert_eq!(exit_reason(&stopped), ExitReason::Stopped);
    assert_eq!(status(&stopped).instance, None);

    daemon.delete("web", false).await.unwrap();
    assert_refused(
        &daemon.get("web").await.unwrap_err(),
        Code::NotFound,
        "VM_NOT_FOUND",
    );
    assert!(daemon.list().await.is_empty());
}

#[tokio::test]
async fn guest_that_ignores_the_power_button_is_killed_after_grace() {
    let daemon = Daemon::start().await;
    daemon.run("deaf", "mock.power=ignore").await;
    let stopped = daemon
        .stop("deaf", Some(Duration::from_millis(200)))
        .await
        .unwrap();
    assert_eq!(exit_reason(&stopped), ExitReason::Killed);
    assert_eq!(status(&stopped).phase(), VmPhase::Stopped);
    assert!(
        status(&stopped).message.contains("grace period"),
        "{:?}",
        stopped.status
    );
    // A client that only reads the operation sees the kill too.
    daemon.start_vm("deaf").await.unwrap();
    let request = v1::StopVmRequest {
        name: "deaf".into(),
        grace_period: Some(vmmd_api::well_known::Duration {
            seconds: 0,
            nanos: 1_000_000,
        }),
        ..Default::default()
    };
    let answer = daemon.client().stop_vm(request).await.unwrap().into_inner();
    let message = answer.operation.unwrap().message;
    assert!(
        message.contains("killed") && message.contains("grace period"),
        "{message}"
    );
}

#[tokio::test]
async fn a_pause_that_the_vmm_does_not_answer_says_whose_fault_it_is() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "mock.pause=hang").await;
    let refused = daemon.pause("web").await.unwrap_err();
    assert_refused(&refused, Code::Unavailable, "VMM_UNRESPONSIVE");
    let pid = vm_pid(&vm).as_raw_nonzero();
    assert_says(&refused, &format!("(pid {pid})"));
}

#[tokio::test]
async fn a_paused_vm_can_be_stopped_gracefully() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.pause("web").await.unwrap();
    let stopped = daemon.stop("web", None).await.unwrap();
    assert_eq!(exit_reason(&stopped), ExitReason::Stopped);
}

#[tokio::test]
async fn a_stop_gets_through_while_a_pause_hangs() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.pause=hang").await;
    let mut client = daemon.client();
    let pause = tokio::spawn(async move {
        client
            .pause_vm(v1::PauseVmRequest {
                name: "web".into(),
                ..Default::default()
            })
            .await
    });
    let stopped = daemon.kill_vm("web").await.unwrap();
    assert_eq!(status(&stopped).phase(), VmPhase::Stopped);
    assert!(pause.await.unwrap().is_err());
}

#[tokio::test]
async fn a_stop_ends_a_start_that_hangs() {
    let daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let start = daemon.begin_start("web");
    daemon.wait_phase("web", VmPhase::Starting).await;
    let stopped = daemon.stop("web", None).await.unwrap();
    assert_eq!(
        (status(&stopped).phase(), status(&stopped).reason.as_str()),
        (VmPhase::Stopped, "StartCancelled")
    );
    let refused = start.await.unwrap().unwrap_err();
    assert_refused(&refused, Code::Aborted, "START_CANCELLED");
    assert_eq!(daemon.vmm_processes(), []);
}

#[tokio::test]
async fn start_of_a_running_vm_is_a_no_op_its_deletion_needs_force() {
    let daemon = Daemon::start().await;
    let running = daemon.run("web", "").await;
    let again = daemon.start_vm("web").await.unwrap();
    assert_eq!(vm_pid(&again), vm_pid(&running));
    let refused = daemon.delete("web", false).await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "STILL_RUNNING");
    assert_says(&refused, "force");
    assert_eq!(vm_pid(&daemon.get("web").await.unwrap()), vm_pid(&running));
    daemon.delete("web", true).await.unwrap();
    assert_eq!(daemon.vmm_processes(), []);
}

#[tokio::test]
async fn requests_to_a_stopped_vm_are_answered_by_what_it_is() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    daemon
        .stop("web", None)
        .await
        .expect("a stop of a stopped VM is done already");
    let refused = daemon.pause("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
}

#[tokio::test]
async fn a_killed_process_is_noticed_by_event() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    kill_process(vm_pid(&vm), Signal::KILL).unwrap();
    let status = daemon.wait_phase("web", VmPhase::Failed).await;
    assert_eq!(
        (status.reason.as_str(), status.last_exit.unwrap().reason()),
        ("Lost", ExitReason::Lost)
    );
    assert!(status.message.contains("signal 9"), "{}", status.message);
    assert_eq!(status.instance, None);
    daemon
        .start_vm("web")
        .await
        .expect("a failed VM can be started again");
}

#[tokio::test]
async fn request_during_the_end_of_a_vmm_finds_it_ended() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = crate::console::Client::open(&daemon, "web").await;
    console.type_in("fade\n").await;
    console.expect("fading").await;
    let refused = daemon.pause("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    daemon.wait_phase("web", VmPhase::Failed).await;
}

#[tokio::test]
async fn a_vmm_that_ends_while_it_is_asked_is_said_to_have_ended() {
    let daemon = Daemon::start().await;
    daemon.run("web", "mock.pause=fade").await;
    let refused = daemon.pause("web").await.unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "NOT_RUNNING");
    assert_says(&refused, "ended meanwhile");
    daemon.wait_phase("web", VmPhase::Failed).await;
}

#[tokio::test]
async fn a_pause_that_the_guest_side_begins_shows_in_the_phase() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let mut console = crate::console::Client::open(&daemon, "web").await;
    console.type_in("pause\n").await;
    daemon.wait_phase("web", VmPhase::Paused).await;
}

#[tokio::test]
async fn two_starts_at_once_make_one_process() {
    let daemon = Daemon::start().await;
    daemon.create(daemon.manifest("web", "")).await.unwrap();
    let (first, second) = tokio::join!(daemon.start_vm("web"), daemon.start_vm("web"));
    let pids: Vec<_> = [first, second].iter().flatten().map(vm_pid).collect();
    assert!(
        !pids.is_empty() && pids.iter().all(|pid| *pid == pids[0]),
        "{pids:?}"
    );
    assert_eq!(daemon.vmm_processes(), [pids[0]]);
}

#[tokio::test]
async fn a_deletion_by_force_continues_after_a_restart_of_the_daemon() {
    let mut daemon = Daemon::start().await;
    let vm = daemon.manifest_with("web", "", |spec| spec.run_policy = v1::RunPolicy::AlwaysOn.into());
    daemon.create(vm).await.unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
    daemon.fault("delete");
    let request = v1::DeleteVmRequest {
        name: "web".into(),
        force: true,
        no_wait: true,
        ..Default::default()
    };
    let begun = daemon.client().delete_vm(request).await.unwrap().into_inner();
    daemon.reached("delete").await;
    assert!(daemon.vmm_processes().is_empty());
    daemon.kill();
    std::fs::remove_file(daemon.path("run/fault/delete.reached")).unwrap();
    daemon.relaunch().await;
    daemon.reached("delete").await;
    assert_eq!(daemon.phase("web").await, VmPhase::Terminating);
    daemon.release("delete");
    daemon.forgets("web").await;
    assert!(
        daemon.vmm_processes().is_empty(),
        "the run policy does not start it"
    );
    let ended = daemon.ended(&begun.operation.unwrap()).await;
    assert_eq!(ended.phase(), v1::OperationPhase::Completed, "{ended:?}");
}

#[tokio::test]
async fn a_deletion_that_can_not_be_noted_leaves_the_vm_running() {
    let daemon = Daemon::start().await;
    daemon.run("web", "").await;
    let full = daemon.path("state/fault/store-full");
    std::fs::create_dir_all(full.parent().unwrap()).unwrap();
    std::fs::write(&full, "").unwrap();
    let refused = daemon.delete("web", true).await.unwrap_err();
    assert_refused(&refused, Code::ResourceExhausted, "STORE_FULL");
    std::fs::remove_file(&full).unwrap();
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
    daemon.delete("web", true).await.unwrap();
}

#[tokio::test]
async fn a_deletion_reported_as_failed_is_not_continued() {
    let mut daemon = Daemon::start().await;
    daemon.run("web", "").await;
    daemon.arm_in("state", "store-unsure");
    daemon.fault("rewritten");
    let refused = daemon.delete("web", true).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused}");
    assert_eq!(daemon.phase("web").await, VmPhase::Running);
    let pid = vm_pid(&daemon.get("web").await.unwrap());
    std::fs::remove_file(daemon.path("state/fault/store-unsure")).unwrap();
    daemon.reached("rewritten").await;
    daemon.kill();
    daemon.relaunch().await;
    daemon.wait_phase("web", VmPhase::Running).await;
    let vm = daemon.get("web").await.unwrap();
    assert_eq!(vm_pid(&vm), pid, "it was neither ended nor deleted");
}
