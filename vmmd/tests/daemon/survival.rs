//! VMs outlive the daemon, however it ends, and come under control again.

use std::{fs, time::Duration};

use rustix::process::{Signal, kill_process};
use vmmd_api::{
    v1::{self, ConditionStatus, ExitReason, VmPhase},
    well_known,
};

use crate::{
    console::Client,
    harness::{self, Daemon, refusal, status, uid, vm_pid},
    verbs::{condition, exit_reason},
};

#[tokio::test]
async fn a_killed_daemon_finds_its_vms_again_with_the_same_processes() {
    let mut daemon = Daemon::start().await;
    let mut pids = Vec::new();
    for index in 0..5 {
        pids.push(vm_pid(&daemon.run(&format!("vm{index}"), "").await));
    }
    daemon.create(daemon.manifest("idle", "")).await.unwrap();
    daemon
        .client()
        .pause_vm(v1::PauseVmRequest {
            name: "vm4".into(),
            ..Default::default()
        })
        .await
        .unwrap();
    for _ in 0..3 {
        daemon.kill_and_restart().await;
        for (index, pid) in pids.iter().enumerate() {
            let vm = daemon.get(&format!("vm{index}")).await.unwrap();
            let phase = if index == 4 {
                VmPhase::Paused
            } else {
                VmPhase::Running
            };
            assert_eq!((vm_pid(&vm), status(&vm).phase()), (*pid, phase));
            assert!(status(&vm).instance.as_ref().unwrap().start_time.is_some());
        }
        assert_eq!(daemon.phase("idle").await, VmPhase::Stopped);
    }
    // Control is back: they can be talked to, are supervised, and stop as usual.
    let mut console = Client::open(&daemon, "vm0").await;
    console.type_in("still here\n").await;
    console.expect("still here").await;
    kill_process(pids[1], Signal::KILL).unwrap();
    daemon.wait_phase("vm1", VmPhase::Failed).await;
    let stopped = daemon.stop("vm2", None).await.unwrap();
    assert_eq!(exit_reason(&stopped), ExitReason::Stopped);
    daemon.delete("vm3", true).await.unwrap();
    assert_eq!(daemon.vmm_processes().len(), 2);
}

#[tokio::test]
async fn a_daemon_that_is_asked_to_end_leaves_its_vms_running() {
    let mut daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    let mut console = Client::open(&daemon, "web").await;
    console.expect("booted").await;
    let _watch = daemon.watch("").await;
    daemon.terminate();
    assert_eq!(daemon.vmm_processes(), [vm_pid(&vm)]);
    daemon.relaunch().await;
    assert_eq!(vm_pid(&daemon.get("web").await.unwrap()), vm_pid(&vm));
}

#[tokio::test]
async fn an_end_while_no_daemon_was_there_is_told_as_it_was() {
    let mut daemon = Daemon::start().await;
    let lost = vm_pid(&daemon.run("lost", "").await);
    let kept = vm_pid(&daemon.run("kept", "").await);
    daemon.run("off", "").await;
    // The guest powers off without the daemon: the command arrives, but no daemon sees the end.
    let socket = daemon.path(&format!(
        "run/vms/{}/console.sock",
        uid(&daemon.get("off").await.unwrap())
    ));
    let before = daemon.vmm_processes().len();
    daemon.kill();
    let mut console = std::os::unix::net::UnixStream::connect(socket).unwrap();
    std::io::Write::write_all(&mut console, b"poweroff\n").unwrap();
    std::io::copy(&mut console, &mut std::io::sink()).unwrap();
    harness::end(lost);
    daemon.relaunch().await;
    let exit = |vm: &v1::Vm| status(vm).last_exit.as_ref().unwrap().reason();
    let off = daemon.get("off").await.unwrap();
    assert_eq!(
        (exit(&off), status(&off).phase()),
        (ExitReason::GuestShutdown, VmPhase::Stopped)
    );
    let lost = daemon.get("lost").await.unwrap();
    assert_eq!(
        (exit(&lost), status(&lost).phase()),
        (ExitReason::Lost, VmPhase::Failed)
    );
    assert_eq!(vm_pid(&daemon.get("kept").await.unwrap()), kept);
    assert_eq!((before, daemon.vmm_processes().len()), (3, 1));
    assert_eq!(fs::read_dir(daemon.path("run/vms")).unwrap().count(), 1);
}

/// A guest that was asked to power off before the daemon was killed may do so at any later moment.
/// The reported state and the real state agree in the end.
pub async fn consistent(daemon: &Daemon) {
    let began = std::time::Instant::now();
    while let Some(difference) = difference(daemon).await {
        assert!(began.elapsed() < Duration::from_secs(20), "{difference}");
        tokio::task::yield_now().await;
    }
}

async fn difference(daemon: &Daemon) -> Option<String> {
    let vms = daemon.list().await;
    let mut told: Vec<_> = vms
        .iter()
        .filter(|vm| status(vm).instance.is_some())
        .map(vm_pid)
        .collect();
    let mut found = daemon.vmm_processes();
    told.sort_by_key(|pid| pid.as_raw_nonzero());
    found.sort_by_key(|pid| pid.as_raw_nonzero());
    if told != found {
        return Some(format!("records have {told:?}, there are {found:?}"));
    }
    let running = told.len();
    let folders = fs::read_dir(daemon.path("run/vms")).unwrap().count();
    let cgroups = daemon.cgroups().len();
    if folders != running || (cgroups != 0 && cgroups != running) {
        return Some(format!(
            "{running} VMs run, {folders} folders and {cgroups} cgroups are there"
        ));
    }
    let settled = [
        VmPhase::Running,
        VmPhase::Paused,
        VmPhase::Stopped,
        VmPhase::Failed,
    ];
    let unsettled = vms.iter().find(|vm| !settled.contains(&status(vm).phase()));
    unsettled.map(|vm| format!("{vm:?}"))
}

#[tokio::test]
async fn a_stop_that_the_daemon_did_not_survive_goes_on() {
    let mut daemon = Daemon::start().await;
    daemon.run("slow", "mock.power=ignore").await;
    daemon.run("paused", "").await;
    daemon.pause("paused").await.unwrap();
    daemon.begin_stop("slow", false).await;
    daemon.kill_and_restart().await;
    let stopping = daemon.wait_phase("slow", VmPhase::Stopping).await;
    assert!(stopping.instance.is_some());
    // A further stop waits for the same end, and can hasten it.
    daemon.kill_vm("slow").await.unwrap();
    // The other was only paused.
    assert_eq!(daemon.phase("paused").await, VmPhase::Paused);
}

#[tokio::test]
async fn silent_vmm_delays_the_daemon_little_and_is_adopted_later() {
    let mut daemon = Daemon::start().await;
    let stuck = vm_pid(&daemon.run("stuck", "").await);
    daemon.run("fine", "").await;
    let began = std::time::Instant::now();
    daemon.kill_and_restart().await;
    let usual = began.elapsed();
    crate::harness::stop_process(stuck);
    let began = std::time::Instant::now();
    daemon.kill_and_restart().await;
    assert!(began.elapsed() < 2 * usual + Duration::from_secs(4));
    assert_eq!(daemon.phase("fine").await, VmPhase::Running);
    let unknown = daemon.get("stuck").await.unwrap();
    assert_eq!(vm_pid(&unknown), stuck);
    assert_eq!(status(&unknown).conditions[0].status(), ConditionStatus::Unknown);
    kill_process(stuck, Signal::CONT).unwrap();
    daemon.wait_ready("stuck").await;
    daemon.stop("stuck", None).await.unwrap();
}

#[tokio::test]
async fn silent_vmm_can_be_killed_after_a_daemon_restart() {
    let mut daemon = Daemon::start().await;
    let stuck = vm_pid(&daemon.run("stuck", "").await);
    crate::harness::stop_process(stuck);
    daemon.kill_and_restart().await;
    let stopped = daemon.kill_vm("stuck").await.unwrap();
    assert_eq!(exit_reason(&stopped), ExitReason::Killed);
}

#[tokio::test]
async fn process_that_was_not_booted_is_ended_by_the_next_daemon() {
    let mut daemon = Daemon::start().await;
    daemon.define("web", "mock.boot=hang").await;
    let start = daemon.begin_start("web");
    daemon.wait_phase("web", VmPhase::Starting).await;
    daemon.wait_process().await;
    daemon.kill_and_restart().await;
    assert!(start.await.unwrap().is_err());
    assert_eq!(daemon.vmm_processes(), []);
    let failed = daemon.get("web").await.unwrap();
    assert_eq!(exit_reason(&failed), ExitReason::StartFailed);
}

#[tokio::test]
async fn what_belongs_to_no_vm_is_removed_at_the_start() {
    let mut daemon = Daemon::start().await;
    daemon.kill();
    let stranger = "0f3a2f64-6c0e-4c57-9e5f-3f4f0e8f7a11";
    for folder in ["run", "log"] {
        fs::create_dir_all(daemon.path(folder).join("vms").join(stranger)).unwrap();
        fs::create_dir_all(daemon.path(folder).join("vms/not-ours")).unwrap();
    }
    daemon.relaunch().await;
    for folder in ["run", "log"] {
        assert!(!daemon.path(folder).join("vms").join(stranger).exists());
        assert!(
            daemon.path(folder).join("vms/not-ours").exists(),
            "foreign things are left alone"
        );
    }
}

#[tokio::test]
async fn a_stop_keeps_its_deadline_and_who_asked_over_a_restart() {
    let mut daemon = Daemon::start().await;
    let before = daemon.run("slow", "mock.power=ignore").await;
    let stop = v1::StopVmRequest {
        name: "slow".into(),
        grace_period: Some(well_known::Duration {
            seconds: 12,
            nanos: 0,
        }),
        no_wait: true,
        request_id: "mine".into(),
        ..Default::default()
    };
    daemon.client().stop_vm(stop).await.unwrap();
    let began = std::time::Instant::now();
    daemon.kill_and_restart().await;
    let stopping = daemon.wait_phase("slow", VmPhase::Stopping).await;
    let operation = daemon.operation(&stopping.operation).await;
    assert_eq!(
        (operation.initiator.as_str(), operation.request_id.as_str()),
        ("uid 0", "mine")
    );
    assert_eq!(daemon.vmm_processes(), [vm_pid(&before)]);
    let stopped = daemon.wait_phase("slow", VmPhase::Stopped).await;
    // Neither after a minute, the default of a stop, nor at once.
    assert!(began.elapsed() < Duration::from_secs(50) && began.elapsed() >= Duration::from_secs(8));
    let exit = stopped.last_exit.unwrap();
    assert!(exit.message.contains("grace period"), "{exit:?}");
}

#[tokio::test]
async fn a_guest_whose_vmm_does_not_answer_has_its_time_all_the_same() {
    let mut daemon = Daemon::start().await;
    let stuck = vm_pid(&daemon.run("stuck", "").await);
    crate::harness::stop_process(stuck);
    daemon.kill_and_restart().await;
    let mut client = daemon.client();
    let stop = tokio::spawn(async move {
        let request = v1::StopVmRequest {
            name: "stuck".into(),
            ..Default::default()
        };
        client.stop_vm(request).await
    });
    daemon.wait_phase("stuck", VmPhase::Stopping).await;
    assert_eq!(daemon.vmm_processes(), [stuck]);
    // It answers again, and is asked then.
    kill_process(stuck, Signal::CONT).unwrap();
    let vm = stop.await.unwrap().unwrap().into_inner().vm.unwrap();
    let exit = status(&vm).last_exit.clone().unwrap();
    assert_eq!(exit.reason(), ExitReason::Stopped, "{exit:?}");
}

#[tokio::test]
async fn vmm_that_does_not_answer_is_unready_until_it_does() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("web", "").await;
    crate::harness::stop_process(vm_pid(&vm));
    let request = v1::GetVmStatsRequest { name: "web".into() };
    let refused = daemon.client().get_vm_stats(request).await.unwrap_err();
    assert_eq!(refusal(&refused).1, "VMM_UNRESPONSIVE");
    let ready = |status: &v1::VmStatus| {
        let ready = condition(status, "Ready");
        (ready.status(), ready.reason.clone())
    };
    let silent = (v1::ConditionStatus::Unknown, "Unresponsive".to_owned());
    daemon.wait("web", |status| ready(status) == silent).await;
    daemon.told_exactly("Unresponsive", 1).await;
    kill_process(vm_pid(&vm), Signal::CONT).unwrap();
    let answers = (v1::ConditionStatus::True, "Running".to_owned());
    daemon.wait("web", |status| ready(status) == answers).await;
}
