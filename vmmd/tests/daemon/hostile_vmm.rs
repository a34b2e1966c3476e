//! A `vmm` under the control of its guest: its messages and its remains affect its own VM alone.

use std::{fs, time::Duration};

use vmmd_api::v1::{self, ExitReason, VmPhase};

use crate::{
    console::Client,
    harness::{Daemon, PATIENCE, status, uid, vm_pid},
};

/// Has the mock of a VM do something, and waits until it has.
async fn command(daemon: &Daemon, name: &str, line: &str, done: &str) {
    let mut console = Client::open(daemon, name).await;
    console.type_in(&format!("{line}\n")).await;
    console.expect(done).await;
}

/// A line of the status of the daemon's process, in KiB.
fn memory_kib(daemon: &Daemon, field: &str) -> u64 {
    let pid = daemon.pid().as_raw_nonzero();
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_end_matches(" kB").trim().parse().unwrap()
}

/// The daemon's own record of each VM can be told as JSON.
fn assert_tellable(vms: &[v1::Vm]) {
    for vm in vms {
        serde_json::to_string(vm).unwrap();
        let message = &status(vm).message;
        assert!(
            message.len() <= 4096 && !message.contains(char::is_control),
            "{message:?}"
        );
    }
}

#[tokio::test]
async fn what_a_vmm_leaves_behind_dies_with_its_run() {
    let daemon = Daemon::start().await;
    let ends = [("poweroff", VmPhase::Stopped), ("abort", VmPhase::Failed)];
    for (number, (end, phase)) in ends.into_iter().enumerate() {
        let name = format!("vm{number}");
        let vm = daemon.run(&name, "").await;
        command(&daemon, &name, "fork", "forked").await;
        assert_eq!(daemon.vmm_processes().len(), 2);
        let mut console = Client::open(&daemon, &name).await;
        console.type_in(&format!("{end}\n")).await;
        daemon.wait_phase(&name, phase).await;
        // When the VM is reported as ended, the cleanup is complete.
        assert!(daemon.vmm_processes().is_empty(), "{end}");
        assert!(daemon.cgroups().is_empty(), "{end}");
        assert!(!daemon.path(&format!("run/vms/{}", uid(&vm))).exists());
    }
}

#[tokio::test]
async fn a_lie_ends_the_connection_and_neither_the_vm_nor_the_daemon() {
    let daemon = Daemon::start().await;
    daemon.run("honest", "").await;
    let liar = daemon.run("liar", "").await;
    for lie in ["text", "device", "disk", "many", "long", "garbage", "flood"] {
        command(&daemon, "liar", &format!("lie {lie}"), &format!("lied {lie}")).await;
        // The connection is restored, and the VM is unchanged.
        let ready = |status: &v1::VmStatus| {
            let mut conditions = status.conditions.iter();
            conditions.any(|condition| {
                condition.r#type == "Ready" && condition.status() == v1::ConditionStatus::True
            })
        };
        daemon.wait("liar", ready).await;
        let vms = daemon.list().await;
        assert_eq!(vms.len(), 2, "{lie}");
        assert_tellable(&vms);
        let pid = vms.iter().find(|vm| uid(vm) == uid(&liar)).map(vm_pid);
        assert_eq!(pid, Some(vm_pid(&liar)), "{lie}");
    }
    daemon.pause("honest").await.unwrap();
    daemon.kill_vm("liar").await.unwrap();
}

#[tokio::test]
async fn what_the_daemon_saw_outranks_the_exit_record() {
    let daemon = Daemon::start().await;
    for (lie, reason, phase) in [
        ("kind", ExitReason::Lost, VmPhase::Failed),
        ("time", ExitReason::GuestShutdown, VmPhase::Stopped),
    ] {
        daemon.run(lie, "").await;
        let mut console = Client::open(&daemon, lie).await;
        console.type_in(&format!("lie {lie}\n")).await;
        let status = daemon.wait_phase(lie, phase).await;
        let exit = status.last_exit.unwrap();
        assert_eq!(exit.reason(), reason, "{exit:?}");
        assert_tellable(&daemon.list().await);
    }
}

#[tokio::test]
async fn what_a_vmm_writes_into_its_logs_is_bounded() {
    let daemon = Daemon::start().await;
    let vm = daemon.run("liar", "").await;
    command(&daemon, "liar", "lie logs", "lied logs").await;
    let logs = daemon.path(&format!("log/vms/{}", uid(&vm)));
    let length = |log: &str| fs::metadata(logs.join(log)).unwrap().len();
    // 16 MiB were written to each. A log is empty for a moment while it is shortened, and the event comes after that.
    let began = std::time::Instant::now();
    loop {
        let events = daemon.events("LogTruncated").await;
        let told = |log: &str| events.iter().any(|event| event.message.contains(log));
        let (vmm, serial) = (length("vmm.log"), length("serial.log"));
        // For the vmm's own log, the end is kept.
        let bounded = (64 << 10..=2 << 20).contains(&vmm) && serial <= 2 << 20;
        if bounded && told("vmm.log") && told("serial.log") {
            break;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "vmm.log has {vmm} bytes, serial.log {serial}; events: {events:?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Lines of the daemon's log, in the levels that go to the journal.
fn lines(daemon: &Daemon) -> Vec<String> {
    let text = fs::read_to_string(daemon.path("log.txt")).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_flood_of_one_vm_leaves_the_audit_log_where_it_is() {
    let daemon = Daemon::with_log("").await;
    daemon.run("liar", "").await;
    daemon.run("honest", "").await;
    daemon.pause("honest").await.unwrap();
    let before = lines(&daemon).len();
    for lie in ["flood", "flap", "text", "flood", "flap", "device", "flap"] {
        command(&daemon, "liar", &format!("lie {lie}"), &format!("lied {lie}")).await;
    }
    // All of it was read when this is answered.
    daemon.kill_vm("liar").await.unwrap();
    let all = lines(&daemon);
    // 15,000 messages; of each kind of event, 30 are reported per minute.
    assert!(all.len() - before < 400, "{} lines", all.len() - before);
    let audited = |line: &&String| line.contains("event=Call") && line.contains("PauseVm");
    assert_eq!(all.iter().filter(audited).count(), 1);
}

#[tokio::test]
async fn the_daemons_memory_is_bounded_whatever_its_vms_say() {
    let daemon = Daemon::start().await;
    const LIARS: usize = 16;
    for number in 0..LIARS {
        daemon.run(&format!("liar{number}"), "").await;
    }
    let before = memory_kib(&daemon, "VmRSS:");
    for lie in ["many", "long", "text", "disk", "flood"] {
        let mut told = tokio::task::JoinSet::new();
        for number in 0..LIARS {
            let name = format!("liar{number}");
            let mut console = Client::open(&daemon, &name).await;
            told.spawn(async move {
                console.type_in(&format!("lie {lie}\n")).await;
                console.expect(&format!("lied {lie}")).await;
            });
        }
        while let Some(told) = told.join_next().await {
            told.unwrap();
        }
    }
    let most = memory_kib(&daemon, "VmHWM:");
    // Without bounds a single message became 144 MiB.
    assert!(
        most < before + (64 << 10),
        "{before} KiB before, {most} KiB at most"
    );
    assert_eq!(daemon.list().await.len(), LIARS);
}
