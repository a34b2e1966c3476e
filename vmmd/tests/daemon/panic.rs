//! A guest whose kernel panics and stays where it is: what follows by `spec.onPanic`.

use std::{fs, time::Duration};

use rstest::rstest;
use tonic::Code;
use vmmd_api::v1::{self, ConditionStatus, ExitReason, PanicPolicy, RunPolicy, VmPhase, VmStatus};

use crate::{
    console::Client,
    harness::{Daemon, assert_refused, status, vm_pid},
    migration::pair,
    policies::{self, LONG, waits},
    verbs::condition,
};

/// A VM that runs, and whose guest's kernel panics.
async fn panicking(daemon: &Daemon, policy: RunPolicy, rule: PanicPolicy, options: &str) -> v1::Vm {
    let mut vm = daemon.manifest("web", options);
    let spec = vm.spec.as_mut().unwrap();
    (spec.run_policy, spec.on_panic) = (policy.into(), rule.into());
    let running = daemon.run_vm(vm).await;
    policies::end(daemon, &running, "halt");
    running
}

fn ready(status: &VmStatus) -> (ConditionStatus, &str) {
    let ready = condition(status, "Ready");
    (ready.status(), ready.reason.as_str())
}

#[rstest]
#[case::by_policy(RunPolicy::AlwaysOnUnlessStopped, PanicPolicy::Unspecified, true)]
#[case::by_failure(RunPolicy::RerunOnFailure, PanicPolicy::Unspecified, true)]
#[case::manual(RunPolicy::Manual, PanicPolicy::Unspecified, false)]
#[case::restart(RunPolicy::Manual, PanicPolicy::Restart, true)]
#[case::stop(RunPolicy::AlwaysOnUnlessStopped, PanicPolicy::Stop, false)]
#[tokio::test]
async fn panicked_guest_is_ended_and_started_as_the_spec_says(
    #[case] policy: RunPolicy,
    #[case] rule: PanicPolicy,
    #[case] again: bool,
) {
    let mut daemon = Daemon::configured(LONG).await;
    panicking(&daemon, policy, rule, "mock.power=ignore").await;
    let ended = daemon.wait_phase("web", VmPhase::Failed).await;
    assert_eq!(ended.last_exit.as_ref().unwrap().reason(), ExitReason::GuestPanic);
    assert_eq!(ended.counts.unwrap().guest_panics, 1);
    assert_eq!(waits(&ended), again, "{ended:?}");
    daemon.told_exactly("GuestPanicked", 1).await;
    daemon.kill_and_restart().await;
    assert_eq!(waits(status(&daemon.get("web").await.unwrap())), again);
}

#[tokio::test]
async fn panicked_guest_is_paused_where_the_spec_says_so() {
    let daemon = Daemon::start().await;
    let before = panicking(&daemon, RunPolicy::AlwaysOnUnlessStopped, PanicPolicy::Pause, "").await;
    let paused = daemon.wait_phase("web", VmPhase::Paused).await;
    assert_eq!(paused.reason, "GuestPanicked");
    let resumed = daemon.resume("web").await.unwrap();
    let told = status(&resumed);
    assert_eq!(
        (told.phase(), told.reason.as_str()),
        (VmPhase::Running, "GuestPanicked")
    );
    assert_eq!(ready(told), (ConditionStatus::False, "GuestPanicked"));
    assert_eq!(vm_pid(&resumed), vm_pid(&before));
}

#[tokio::test]
async fn ignored_panic_makes_vm_unready_and_a_stop_kills_at_once() {
    let mut daemon = Daemon::start().await;
    panicking(
        &daemon,
        RunPolicy::AlwaysOnUnlessStopped,
        PanicPolicy::Ignore,
        "mock.power=ignore",
    )
    .await;
    let unready = |status: &VmStatus| ready(status) == (ConditionStatus::False, "GuestPanicked");
    let told = daemon.wait("web", unready).await;
    assert_eq!(
        (told.phase(), told.reason.as_str()),
        (VmPhase::Running, "GuestPanicked")
    );
    daemon.kill_and_restart().await;
    daemon.wait("web", unready).await;
    // The guest has an hour, and is not waited for.
    let stopped = daemon.stop("web", Some(Duration::from_secs(3600))).await.unwrap();
    let exit = status(&stopped).last_exit.clone().unwrap();
    assert_eq!(exit.reason(), ExitReason::GuestPanic);
    assert!(exit.message.contains("panicked"), "{exit:?}");
    assert!(!waits(status(&stopped)));
}

#[tokio::test]
async fn stop_under_way_ends_when_the_guest_panics() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "mock.power=ignore");
    vm.spec.as_mut().unwrap().set_on_panic(PanicPolicy::Ignore);
    daemon.run_vm(vm).await;
    let mut console = Client::open(&daemon, "web").await;
    let (stopped, ()) = tokio::join!(daemon.stop("web", Some(Duration::from_secs(3600))), async {
        daemon.wait_phase("web", VmPhase::Stopping).await;
        console.type_in("halt\n").await;
    });
    let exit = status(&stopped.unwrap()).last_exit.clone().unwrap();
    assert_eq!(exit.reason(), ExitReason::GuestPanic);
}

#[tokio::test]
async fn reset_of_a_panicked_guest_makes_vm_ready_again() {
    let daemon = Daemon::start().await;
    panicking(&daemon, RunPolicy::Manual, PanicPolicy::Ignore, "").await;
    daemon
        .wait("web", |status| status.reason == "GuestPanicked")
        .await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("reset\n").await;
    let is_ready = |status: &VmStatus| ready(status) == (ConditionStatus::True, "Running");
    let told = daemon.wait("web", is_ready).await;
    assert_eq!(told.reason, "Running");
}

#[tokio::test]
async fn panic_rule_changes_while_the_vm_runs() {
    let daemon = Daemon::start().await;
    panicking(&daemon, RunPolicy::Manual, PanicPolicy::Ignore, "").await;
    daemon
        .wait("web", |status| status.reason == "GuestPanicked")
        .await;
    let always = daemon
        .change("web", |spec| {
            spec.set_run_policy(RunPolicy::AlwaysOn);
            spec.set_on_panic(PanicPolicy::Stop);
        })
        .await
        .unwrap_err();
    assert_refused(&always, Code::InvalidArgument, "INVALID_FIELDS");
    daemon
        .change("web", |spec| spec.set_on_panic(PanicPolicy::Stop))
        .await
        .unwrap();
    daemon.wait_phase("web", VmPhase::Failed).await;
}

#[tokio::test]
async fn restart_after_a_panic_is_tried_again_when_a_start_fails() {
    let mut daemon = Daemon::configured("[restart]\nfirst_ms = 1\nmax_ms = 2\n").await;
    let mut vm = daemon.manifest("web", "mock.power=ignore");
    let spec = vm.spec.as_mut().unwrap();
    (spec.run_policy, spec.on_panic) = (RunPolicy::Manual.into(), PanicPolicy::Restart.into());
    let running = daemon.run_vm(vm).await;
    let (kernel, away) = (daemon.path("kernel"), daemon.path("away"));
    fs::rename(&kernel, &away).unwrap();
    policies::end(&daemon, &running, "halt");
    let failed = |status: &VmStatus, more: u64| status.counts.unwrap_or_default().failed_starts >= more;
    daemon.wait("web", |status| failed(status, 3)).await;
    daemon.kill_and_restart().await;
    let now = daemon.get("web").await.unwrap();
    let before = status(&now).counts.unwrap().failed_starts;
    daemon.wait("web", |status| failed(status, before + 2)).await;
    fs::rename(&away, &kernel).unwrap();
    daemon.wait_phase("web", VmPhase::Running).await;
}

#[tokio::test]
async fn change_to_manual_ends_restarts_that_no_panic_began() {
    let daemon = Daemon::configured(LONG).await;
    let mut vm = daemon.manifest("web", "");
    let spec = vm.spec.as_mut().unwrap();
    (spec.run_policy, spec.on_panic) = (RunPolicy::RerunOnFailure.into(), PanicPolicy::Restart.into());
    daemon.create(vm).await.unwrap();
    fs::remove_file(daemon.path("kernel")).unwrap();
    daemon.start_vm("web").await.unwrap_err();
    daemon.wait("web", waits).await;
    daemon
        .change("web", |spec| spec.set_run_policy(RunPolicy::Manual))
        .await
        .unwrap();
    assert!(!waits(status(&daemon.get("web").await.unwrap())));
}

#[tokio::test]
async fn panic_goes_along_with_a_migration() {
    let (first, second) = pair().await;
    panicking(&first, RunPolicy::Manual, PanicPolicy::Ignore, "").await;
    let unready = |status: &VmStatus| ready(status) == (ConditionStatus::False, "GuestPanicked");
    first.wait("web", unready).await;
    let operation = first.migrate("web", &second).await.unwrap();
    first.completes(&operation).await;
    let told = second
        .wait("web", |status| {
            status.phase() == VmPhase::Running && unready(status)
        })
        .await;
    assert_eq!(told.reason, "GuestPanicked");
}

#[tokio::test]
async fn panic_that_pauses_ends_a_migration_and_the_vm_is_paused() {
    let (first, second) = pair().await;
    let locks = first.path("locks");
    let options = format!("mock.send=hang mock.locks={}", locks.display());
    let mut vm = first.manifest("web", &options);
    vm.spec.as_mut().unwrap().set_on_panic(PanicPolicy::Pause);
    let running = first.run_vm(vm).await;
    let operation = first.migrate("web", &second).await.unwrap();
    first.wait("web", |status| status.reason == "Migrating").await;
    policies::end(&first, &running, "halt");
    let ended = first.fails(&operation).await;
    assert!(ended.message.contains("panicked"), "{ended:?}");
    // The machine is asked to run after the migration, which fails until now.
    fs::write(locks, "").unwrap();
    let paused = first.wait_phase("web", VmPhase::Paused).await;
    assert_eq!(paused.reason, "GuestPanicked");
    first.resume("web").await.unwrap();
    first.wait_phase("web", VmPhase::Running).await;
}

#[tokio::test]
async fn panic_in_a_pause_for_a_disk_is_acted_on_when_the_pause_ends() {
    let daemon = Daemon::start().await;
    let mut vm = daemon.manifest("web", "");
    vm.spec.as_mut().unwrap().set_on_panic(PanicPolicy::Pause);
    daemon.run_vm(vm).await;
    let mut console = Client::open(&daemon, "web").await;
    console.type_in("stall root\nhalt\n").await;
    daemon.told_exactly("GuestPanicked", 1).await;
    daemon.wait("web", |status| status.reason == "DiskError").await;
    daemon.resume("web").await.unwrap();
    let paused = |status: &VmStatus| status.phase() == VmPhase::Paused && status.reason == "GuestPanicked";
    daemon.wait("web", paused).await;
    daemon.resume("web").await.unwrap();
    let told = daemon.wait_phase("web", VmPhase::Running).await;
    assert_eq!(told.reason, "GuestPanicked");
}
