//! Run policies: what follows the end of a run, of each kind, and a restart of the daemon.

use std::{io::Write, os::unix::net::UnixStream};

use rustix::process::{Signal, kill_process};
use tonic::{Code, Status};
use vmmd_api::v1::{self, ExitReason, RunPolicy, VmPhase, VmStatus};

use crate::harness::{self, Daemon, assert_refused, refusal, status, uid, vm_pid};

/// So short a back-off that the next start comes at once.
const SHORT: &str = "[restart]\nfirst_ms = 1\nmax_ms = 2\n";
/// Back-off that is long enough for a test to see the VM wait.
pub const LONG: &str = "[restart]\nfirst_ms = 100000\n";

const POLICIES: [RunPolicy; 3] = [
    RunPolicy::AlwaysOnUnlessStopped,
    RunPolicy::AlwaysOn,
    RunPolicy::RerunOnFailure,
];

fn manifest(daemon: &Daemon, name: &str, policy: RunPolicy) -> v1::Vm {
    daemon.manifest_with(name, "", |spec| spec.run_policy = policy.into())
}

/// Makes one and sees it run.
async fn running(daemon: &Daemon, name: &str, policy: RunPolicy) -> v1::Vm {
    running_with(daemon, name, "", policy).await
}

/// The same with options of the mock.
pub async fn running_with(daemon: &Daemon, name: &str, options: &str, policy: RunPolicy) -> v1::Vm {
    let vm = daemon.manifest_with(name, options, |spec| spec.run_policy = policy.into());
    daemon.create(vm).await.unwrap();
    if policy != RunPolicy::AlwaysOn {
        daemon.start_vm(name).await.unwrap();
    }
    daemon.wait_phase(name, VmPhase::Running).await;
    daemon.get(name).await.unwrap()
}

/// Makes the guest, or the process, end.
pub fn end(daemon: &Daemon, vm: &v1::Vm, how: &str) {
    if how == "kill" {
        return kill_process(vm_pid(vm), Signal::KILL).unwrap();
    }
    let socket = daemon.path(&format!("run/vms/{}/console.sock", uid(vm)));
    let mut console = UnixStream::connect(socket).unwrap();
    console.write_all(format!("{how}\n").as_bytes()).unwrap();
}

fn exit(status: &VmStatus) -> ExitReason {
    status
        .last_exit
        .as_ref()
        .map_or(ExitReason::Unspecified, v1::ExitStatus::reason)
}

pub fn waits(status: &VmStatus) -> bool {
    status
        .restart
        .as_ref()
        .is_some_and(|restart| restart.next_start_time.is_some())
}

#[tokio::test]
async fn the_end_of_a_run_is_followed_by_what_the_policy_says() {
    let daemon = Daemon::configured(LONG).await;
    let ends = [
        ("poweroff", ExitReason::GuestShutdown, VmPhase::Stopped),
        ("panic", ExitReason::GuestPanic, VmPhase::Failed),
        ("crash", ExitReason::GuestCrash, VmPhase::Failed),
        ("error", ExitReason::VmmError, VmPhase::Failed),
        ("kill", ExitReason::Lost, VmPhase::Failed),
    ];
    for policy in [POLICIES.as_slice(), &[RunPolicy::Manual]].concat() {
        for (how, reason, phase) in ends {
            let name = format!("{how}-{}", i32::from(policy));
            let vm = running(&daemon, &name, policy).await;
            end(&daemon, &vm, how);
            let status = daemon.wait_phase(&name, phase).await;
            assert_eq!(exit(&status), reason, "{policy:?} {how}");
            let again = match policy {
                RunPolicy::Manual => false,
                RunPolicy::RerunOnFailure => phase == VmPhase::Failed,
                _ => true,
            };
            assert_eq!(waits(&status), again, "{policy:?} {how}: {status:?}");
            let counts = status.counts.unwrap();
            let counted = [
                counts.guest_shutdowns,
                counts.guest_panics,
                counts.guest_crashes,
                counts.vmm_errors,
                counts.lost,
            ];
            let expected = ends.map(|(_, other, _)| u64::from(other == reason));
            assert_eq!(counted, expected, "{policy:?} {how}");
            daemon.delete(&name, false).await.unwrap();
        }
    }
}

#[tokio::test]
async fn failing_vm_is_restarted_and_each_start_is_counted() {
    let daemon = Daemon::configured(SHORT).await;
    for policy in POLICIES {
        let name = format!("vm{}", i32::from(policy));
        let mut vm = running(&daemon, &name, policy).await;
        let first = status(&vm).counts.unwrap();
        for round in 1..=3 {
            let before = status(&vm).instance.as_ref().unwrap().pid;
            end(&daemon, &vm, "crash");
            let status = daemon
                .wait(&name, |status| {
                    let pid = status.instance.as_ref().map(|instance| instance.pid);
                    status.phase() == VmPhase::Running && pid.is_some_and(|pid| pid != before)
                })
                .await;
            let counts = status.counts.unwrap();
            assert_eq!(
                (counts.starts, counts.automatic_starts, counts.guest_crashes),
                (first.starts + round, first.automatic_starts + round, round),
                "{policy:?}"
            );
            let attempts = status.restart.as_ref().unwrap().attempts;
            assert_eq!(u64::from(attempts), first.automatic_starts + round);
            vm = daemon.get(&name).await.unwrap();
        }
    }
}

#[tokio::test]
async fn stop_ends_the_back_off_and_a_start_does_not_wait_for_it() {
    let daemon = Daemon::configured(LONG).await;
    let vm = running(&daemon, "web", RunPolicy::AlwaysOnUnlessStopped).await;
    end(&daemon, &vm, "kill");
    let waiting = daemon.wait("web", waits).await;
    assert_eq!(waiting.restart.unwrap().back_off.unwrap().seconds, 100);
    daemon.start_vm("web").await.expect("it starts at once");
    end(&daemon, &daemon.get("web").await.unwrap(), "poweroff");
    daemon.wait("web", waits).await;
    let stopped = daemon.stop("web", None).await.unwrap();
    assert!(!waits(status(&stopped)), "{stopped:?}");
}

#[tokio::test]
async fn a_stop_by_request_is_final_unless_the_policy_forbids_it() {
    let daemon = Daemon::configured(SHORT).await;
    for policy in [RunPolicy::AlwaysOnUnlessStopped, RunPolicy::RerunOnFailure] {
        let name = format!("vm{}", i32::from(policy));
        running(&daemon, &name, policy).await;
        let stopped = daemon.kill_vm(&name).await.unwrap();
        assert!(!waits(status(&stopped)), "{stopped:?}");
    }
    running(&daemon, "on", RunPolicy::AlwaysOn).await;
    let refused = |result: Result<v1::Vm, Status>| refusal(&result.unwrap_err());
    let expected = (Code::FailedPrecondition, "RUN_POLICY".to_owned());
    assert_eq!(refused(daemon.stop("on", None).await), expected);
    assert_eq!(refused(daemon.kill_vm("on").await), expected);
    // The refusal must not suggest a stop, which would be refused too.
    let deletion = daemon.delete("on", false).await.unwrap_err();
    assert_eq!(refusal(&deletion).1, "STILL_RUNNING");
    assert!(!deletion.message().contains("stop it first"), "{deletion}");
    daemon.delete("on", true).await.unwrap();

    daemon
        .create(manifest(&daemon, "off", RunPolicy::AlwaysOff))
        .await
        .unwrap();
    assert_eq!(refused(daemon.start_vm("off").await), expected);
    let request = v1::CreateVmRequest {
        vm: Some(manifest(&daemon, "other", RunPolicy::AlwaysOff)),
        start: true,
        ..Default::default()
    };
    assert_eq!(
        refusal(&daemon.client().create_vm(request).await.unwrap_err()),
        expected
    );
    assert!(daemon.get("other").await.is_err());
}

#[tokio::test]
async fn a_start_that_fails_is_tried_again() {
    let daemon = Daemon::configured(SHORT).await;
    let mut vm = manifest(&daemon, "web", RunPolicy::AlwaysOnUnlessStopped);
    let boot = vm.spec.as_mut().unwrap().boot.as_mut().unwrap();
    let Some(v1::boot_spec::Source::Linux(linux)) = &mut boot.source else {
        panic!("no kernel")
    };
    linux.kernel = daemon.path("later").to_str().unwrap().into();
    daemon.create(vm).await.unwrap();
    daemon.start_vm("web").await.unwrap_err();
    daemon
        .wait("web", |status| status.counts.unwrap().failed_starts > 2)
        .await;
    std::fs::copy(daemon.path("kernel"), daemon.path("later")).unwrap();
    let status = daemon.wait_phase("web", VmPhase::Running).await;
    let counts = status.counts.unwrap();
    assert_eq!(counts.starts, counts.automatic_starts + 1);
    assert_eq!(counts.failed_starts, counts.automatic_starts);
}

#[tokio::test]
async fn a_back_off_and_the_counts_survive_the_daemon() {
    let mut daemon = Daemon::configured(LONG).await;
    let vm = running(&daemon, "web", RunPolicy::AlwaysOnUnlessStopped).await;
    end(&daemon, &vm, "panic");
    let before = daemon.wait("web", waits).await;
    daemon.kill_and_restart().await;
    let after = daemon.get("web").await.unwrap();
    assert_eq!(
        (&status(&after).restart, status(&after).counts),
        (&before.restart, before.counts)
    );
    assert_eq!(status(&after).phase(), VmPhase::Failed);
}

#[tokio::test]
async fn an_end_while_no_daemon_was_there_is_followed_by_a_start() {
    let mut daemon = Daemon::configured(SHORT).await;
    let mut pids = Vec::new();
    for policy in [POLICIES.as_slice(), &[RunPolicy::Manual]].concat() {
        let vm = running(&daemon, &format!("vm{}", i32::from(policy)), policy).await;
        pids.push(vm_pid(&vm));
    }
    daemon.kill();
    for pid in pids {
        harness::end(pid);
    }
    daemon.relaunch().await;
    for policy in POLICIES {
        let name = format!("vm{}", i32::from(policy));
        let status = daemon.wait_phase(&name, VmPhase::Running).await;
        assert_eq!(
            (exit(&status), status.counts.unwrap().lost),
            (ExitReason::Lost, 1),
            "{policy:?}"
        );
    }
    let manual = daemon
        .get(&format!("vm{}", i32::from(RunPolicy::Manual)))
        .await
        .unwrap();
    assert_eq!(status(&manual).phase(), VmPhase::Failed);
}

#[tokio::test]
async fn resets_of_a_guest_are_counted_over_all_runs() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    end(&daemon, &vm, "reset\nreset");
    let resets =
        |count| move |status: &VmStatus| status.counts.is_some_and(|counts| counts.guest_resets == count);
    let reset = daemon.wait("web", resets(2)).await;
    let run = reset.instance.as_ref().unwrap();
    let pid = vm_pid(&vm).as_raw_nonzero().get().cast_unsigned();
    assert_eq!((run.guest_resets, run.pid), (2, pid));
    daemon.stop("web", None).await.unwrap();
    let vm = daemon.start_vm("web").await.unwrap();
    assert_eq!(status(&vm).counts.unwrap().guest_resets, 2);
    end(&daemon, &vm, "reset");
    daemon.wait("web", resets(3)).await;
}

#[tokio::test]
async fn a_vm_that_makes_room_for_the_nodes_shutdown_stays_wanted() {
    let mut daemon = Daemon::configured(SHORT).await;
    running(&daemon, "on", RunPolicy::AlwaysOn).await;
    running(&daemon, "web", RunPolicy::AlwaysOnUnlessStopped).await;
    running(&daemon, "manual", RunPolicy::Manual).await;
    running(&daemon, "rerun", RunPolicy::RerunOnFailure).await;
    for name in ["on", "web", "manual", "rerun"] {
        let stopped = evacuate(&daemon, name).await;
        // Unless the node shuts down or is cordoned, the run policy acts again after a while.
        let starts = name != "manual";
        assert_eq!(
            (status(&stopped).phase(), waits(status(&stopped))),
            (VmPhase::Stopped, starts),
            "{name}"
        );
    }
    daemon.kill_and_restart().await;
    for name in ["on", "web", "rerun"] {
        daemon.wait_phase(name, VmPhase::Running).await;
    }
    assert_eq!(daemon.phase("manual").await, VmPhase::Stopped);
    // That it was evacuated once is forgotten: the guest decides again.
    let vm = daemon.get("rerun").await.unwrap();
    end(&daemon, &vm, "poweroff");
    daemon.wait_phase("rerun", VmPhase::Stopped).await;
    daemon.kill_and_restart().await;
    let status = status(&daemon.get("rerun").await.unwrap()).clone();
    assert_eq!((status.phase(), waits(&status)), (VmPhase::Stopped, false));
}

#[tokio::test]
async fn evacuated_vm_on_a_node_that_stays_up_is_restarted() {
    let daemon = Daemon::configured("[restart]\nroom_ms = 300\n").await;
    running(&daemon, "on", RunPolicy::AlwaysOn).await;
    running(&daemon, "manual", RunPolicy::Manual).await;
    for name in ["on", "manual"] {
        evacuate(&daemon, name).await;
    }
    daemon.wait_phase("on", VmPhase::Running).await;
    let manual = daemon.get("manual").await.unwrap();
    assert_eq!(
        (status(&manual).phase(), waits(status(&manual))),
        (VmPhase::Stopped, false)
    );
    let counts = status(&daemon.get("on").await.unwrap()).counts.unwrap();
    assert_eq!(counts.automatic_starts, 2, "its creation and this");
}

async fn evacuate(daemon: &Daemon, name: &str) -> v1::Vm {
    let request = v1::StopVmRequest {
        name: name.into(),
        evacuate: true,
        ..Default::default()
    };
    let answer = daemon.client().stop_vm(request).await.unwrap();
    answer.into_inner().vm.unwrap()
}

#[tokio::test]
async fn who_stops_a_vm_that_makes_room_does_not_want_it_back() {
    let mut daemon = Daemon::configured(SHORT).await;
    daemon
        .run_with("web", "mock.power=ignore", |spec| {
            spec.run_policy = RunPolicy::AlwaysOnUnlessStopped.into();
        })
        .await;
    let (evacuated, killed) = tokio::join!(evacuate(&daemon, "web"), async {
        daemon.wait_phase("web", VmPhase::Stopping).await;
        daemon.kill_vm("web").await
    });
    assert_eq!(status(&evacuated).phase(), VmPhase::Stopped);
    assert!(!waits(status(&killed.unwrap())));
    daemon.kill_and_restart().await;
    let status = status(&daemon.get("web").await.unwrap()).clone();
    assert_eq!((status.phase(), waits(&status)), (VmPhase::Stopped, false));
}

#[tokio::test]
async fn crash_resets_the_machine_and_has_its_own_counter() {
    let mut daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    end(&daemon, &vm, "triple\ntriple\nreset");
    let counted = |crashes, resets| {
        move |status: &VmStatus| {
            let counts = status.counts.unwrap_or_default();
            (counts.crash_resets, counts.guest_resets) == (crashes, resets)
        }
    };
    let status = daemon.wait("web", counted(2, 1)).await;
    assert_eq!(status.phase(), VmPhase::Running);
    assert_eq!(status.instance.as_ref().unwrap().crash_resets, 2);
    assert_eq!(status.counts.unwrap().guest_crashes, 0);
    daemon.kill_and_restart().await;
    daemon.wait("web", counted(2, 1)).await;
    daemon.stop("web", None).await.unwrap();
    daemon.wait("web", counted(2, 1)).await;
    let vm = daemon.start_vm("web").await.unwrap();
    end(&daemon, &vm, "triple");
    daemon.wait("web", counted(3, 1)).await;
}

#[tokio::test]
async fn a_crash_ends_the_run_of_a_vm_that_is_to_stop() {
    let daemon = Daemon::configured(LONG).await;
    let mut vm = manifest(&daemon, "web", RunPolicy::Manual);
    vm.spec.as_mut().unwrap().on_crash = v1::CrashPolicy::Stop.into();
    let vm = daemon.run_vm(vm).await;
    end(&daemon, &vm, "triple");
    let status = daemon.wait_phase("web", VmPhase::Failed).await;
    assert_eq!(exit(&status), ExitReason::GuestCrash);
    let counts = status.counts.unwrap();
    assert_eq!((counts.crash_resets, counts.guest_crashes), (0, 1));
}

#[tokio::test]
async fn restart_ends_with_the_stop_after_a_change_to_always_off() {
    let daemon = Daemon::configured(LONG).await;
    daemon.run("web", "mock.power=ignore").await;
    let mut client = daemon.client();
    let restart = tokio::spawn(async move {
        let request = v1::RestartVmRequest {
            name: "web".into(),
            grace_period: Some(vmmd_api::well_known::Duration { seconds: 1, nanos: 0 }),
            ..Default::default()
        };
        client.restart_vm(request).await
    });
    daemon.wait_phase("web", VmPhase::Stopping).await;
    let vm = daemon.manifest_with("web", "mock.power=ignore", |spec| {
        spec.run_policy = RunPolicy::AlwaysOff.into();
    });
    daemon.replace(vm).await.unwrap();
    let refused = restart.await.unwrap().unwrap_err();
    assert_refused(&refused, Code::FailedPrecondition, "RUN_POLICY");
    assert_eq!(daemon.phase("web").await, VmPhase::Stopped);
    assert_eq!(daemon.vmm_processes(), []);
}

#[tokio::test]
async fn always_off_cancels_a_pending_automatic_start() {
    let mut daemon = Daemon::configured(LONG).await;
    let vm = running(&daemon, "web", RunPolicy::AlwaysOnUnlessStopped).await;
    end(&daemon, &vm, "kill");
    daemon.wait("web", waits).await;
    for policy in [RunPolicy::AlwaysOff, RunPolicy::AlwaysOnUnlessStopped] {
        daemon.replace(manifest(&daemon, "web", policy)).await.unwrap();
        assert!(!waits(status(&daemon.get("web").await.unwrap())), "{policy:?}");
    }
    daemon.kill_and_restart().await;
    let after = daemon.get("web").await.unwrap();
    assert!(!waits(status(&after)), "{after:?}");
}
