//! The daemon restarts and crashes without effect on the guests. Resources that it created
//! disappear with the VMs.

use std::collections::BTreeSet;

use vmmd_tests::host::Accel;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node, long};

/// A guest that counts, ten times a second, on its console.
fn counting() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612)
        .script("(i=0; while :; do i=$((i + 1)); echo up $i.; usleep 100000; done) &")
}

fn last_count(text: &str) -> u64 {
    text.rsplit("up ")
        .find_map(|part| part.split_once('.')?.0.parse().ok())
        .unwrap_or(0)
}

/// The daemon is ended by the command `kill` and restarts. The VM continues, and the new daemon
/// controls it.
fn survives(vm: &Vm<'_>, kill: &str) {
    let node = vm.node();
    let mut console = vm.console();
    console.until("up 5.", BOOT);
    let (pid, before) = (vm.pid(), last_count(&console.text()));
    node.sh(kill);
    // Waits for systemd to call it started (Type=notify), so it serves requests then.
    node.sh("until systemctl is-active -q vmmd; do sleep 0.1; done");
    node.sh("vmmctl get vm -o name");
    vm.still_runs(pid);
    let mut console = vm.console();
    let text = console.until(&format!("up {}.", before + 20), 60);
    let missing: Vec<u64> = (1..=before + 20)
        .filter(|count| !text.contains(&format!("up {count}.")))
        .collect();
    assert!(missing.is_empty(), "counts not printed: {missing:?}");
    // And it is under control: it can be paused, resumed, stopped.
    vm.ctl("pause");
    vm.ctl("resume");
}

#[test]
fn a_restart_and_a_kill_of_the_service_leave_running_vms_alone() {
    let case = Case::new("svc");
    let vm = Vm::start(&case, "", &counting());
    survives(&vm, "systemctl restart vmmd");
    survives(
        &vm,
        "pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
         while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
    );
    // The unit with the VMs' control group: the VMs stay in it, and it starts again while they run.
    survives(
        &vm,
        "systemctl stop vmmd-vms && systemctl start vmmd-vms && systemctl restart vmmd-vms vmmd && systemctl is-active vmmd-vms",
    );
    let group = "/sys/fs/cgroup/machine.slice/vmmd-vms.service";
    let holders = format!("wc -l <{group}/holder/cgroup.procs; cat {group}/cgroup.procs");
    assert_eq!(case.node().sh(&holders).trim(), "1");
    vm.ctl("stop --grace 60s");
    assert_eq!(vm.exit_reason(), "STOPPED");
}

/// Limit for the notification of clients about a VM's end, in seconds. It is ten times as long in
/// an emulated node, where times are less meaningful.
const TOLD: f64 = 1.0;

#[test]
fn the_death_of_a_vmm_is_told_within_a_second() {
    let case = Case::new("vmm-kill");
    let vm = Vm::start(&case, "", &counting());
    vm.console().until("up 5.", BOOT);
    let (name, pid) = (vm.name(), vm.pid());
    // By the node's clock: from the kill to the line that a client prints. One line may have both.
    let mut watch = vm
        .node()
        .stream(&format!(
            "vmmctl get vm {name} -w -o json | while read -r line; do \
                 case $line in *VM_PHASE_RUNNING*) \
                     [ -n \"$killed\" ] || {{ kill -9 {pid}; read -r killed _ </proc/uptime; echo watching; }} ;; esac; \
                 case $line in *EXIT_REASON_LOST*) [ -n \"$reason\" ] || {{ reason=1; echo reason; }} ;; esac; \
                 case $line in *VM_PHASE_FAILED*) \
                     read -r told _ </proc/uptime; echo \"told $killed $told.\"; break ;; esac; done"
        ));
    for wanted in ["watching\n", "reason\n", "told "] {
        watch.until(wanted, Deadline::seconds(20));
    }
    let times = watch.until(".\n", Deadline::seconds(10));
    let times: Vec<f64> = times
        .trim_end_matches(".\n")
        .split(' ')
        .map(|time| time.parse().expect("a time"))
        .collect();
    let took = times[1] - times[0];
    eprintln!("told {took:.2} s after the kill");
    let slow = if Accel::detect() == Accel::Kvm { 1.0 } else { 10.0 };
    assert!(took <= TOLD * slow, "told {took} s after the kill");
}

/// Everything in the node that VMs make: processes, network interfaces, sockets, cgroups, files.
fn traces(node: &Node) -> BTreeSet<String> {
    let found = node.sh("for p in $(pgrep -x vmm); do echo process $p; done; \
             for i in /sys/class/net/*; do echo interface ${i##*/}; done; \
             find /run/vmmd /var/lib/vmmd /var/log/vmmd | sed 's/^/file /'; \
             find /sys/fs/cgroup -type d | grep -i vmm | sed 's/^/cgroup /'; true");
    found.lines().map(str::to_owned).collect()
}

/// Some are stopped before they are up, some after; some by the guest, some by force.
fn made_and_deleted(case: &Case, kind: u32, round: u32, spec: &VmSpec) {
    let vm = Vm::start(case, &format!("-{kind}-{round}"), spec);
    match kind {
        0 => drop(vm.ctl("stop --force")),
        1 => {
            vm.booted();
            vm.ctl("stop --grace 60s");
        }
        2 => {
            vm.node().sh(&format!("kill -9 {}", vm.pid()));
            vm.wait_phase("FAILED", 60);
        }
        _ => {
            vm.ctl("delete --force");
            return;
        }
    }
    vm.ctl("delete");
}

/// Eight, and twenty in the long form.
#[test]
fn vms_made_and_deleted_in_a_loop_leave_nothing() {
    let case = Case::new("twenty");
    let node = case.node();
    let (bridge, folder) = (case.bridge(), case.folder());
    node.sh(&format!(
        "truncate -s 16M {folder}/0 {folder}/1 {folder}/2 {folder}/3"
    ));
    let before = traces(node);
    let rounds = if long() { 5 } else { 2 };
    // Four at a time, each with a disk and an end of its own.
    std::thread::scope(|scope| {
        for kind in 0..4 {
            let (case, disk) = (&case, format!("{folder}/{kind}"));
            let spec = VmSpec::busybox(Kernel::Cloud612)
                .disk("data", &disk, false)
                .nic("eth0", &bridge)
                .cmdline("guest.after=none");
            scope.spawn(move || (0..rounds).for_each(|round| made_and_deleted(case, kind, round, &spec)));
        }
    });
    let after = traces(node);
    let left: Vec<_> = after.difference(&before).collect();
    assert!(left.is_empty(), "left behind: {left:#?}");
}

#[test]
fn guests_power_off_in_order_without_vmmd() {
    let case = Case::new("svc-guests");
    let node = case.node();
    let vm = Vm::start(&case, "", &counting());
    vm.console().until("up 5.", BOOT);
    let pid = vm.pid();
    let alive = || node.try_sh(&format!("kill -0 {pid}")).is_ok();
    // A restart of the unit asks no guest, with the daemon or without.
    node.sh("systemctl restart vmmd-guests; systemctl stop vmmd; systemctl restart vmmd-guests");
    assert!(alive(), "a restart of vmmd-guests has ended the VM");
    // A stop of it does, as at a shutdown of the node.
    node.sh("systemctl stop vmmd-guests");
    assert!(!alive(), "the VM runs on");
    node.sh("systemctl start vmmd vmmd-guests");
    assert_eq!(vm.phase(), "STOPPED");
    assert_eq!(vm.exit_reason(), "STOPPED");
}
