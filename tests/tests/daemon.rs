//! The daemon restarts and dies; guests don't notice. What it made is gone when the VMs are.

use std::collections::BTreeSet;

use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node};

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

/// The daemon ends by `kill` and comes back; the VM goes on, and is under control.
fn survives(topic: &str, kill: &str) {
    let case = Case::new(topic).expect("node");
    let node = case.node();
    let vm = Vm::start(&case, "", &counting()).expect("start");
    let mut console = vm.console().expect("console");
    console.until("up 5.", BOOT).expect("boot");
    let (pid, before) = (vm.pid().expect("pid"), last_count(&console.text()));
    node.sh(kill).expect("the daemon ends");
    // Waits for systemd to call it started (Type=notify), so it serves requests then.
    node.sh("until systemctl is-active -q vmmd; do sleep 0.1; done")
        .expect("the daemon is back");
    node.sh("vmmctl get vm -o name").expect("the daemon answers");
    assert_eq!(
        (vm.phase().expect("phase"), vm.pid().expect("pid")),
        ("RUNNING".into(), pid)
    );
    let mut console = vm.console().expect("the console is back");
    let text = console
        .until(&format!("up {}.", before + 20), 60)
        .expect("the guest went on counting");
    let missing: Vec<u64> = (1..=before + 20)
        .filter(|count| !text.contains(&format!("up {count}.")))
        .collect();
    assert!(missing.is_empty(), "counts not printed: {missing:?}");
    // And it is under control: it can be paused, resumed, stopped.
    vm.ctl("pause").expect("pause");
    vm.ctl("resume").expect("resume");
    vm.ctl("stop --grace 60s").expect("stop");
    assert_eq!(
        vm.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_STOPPED"
    );
}

#[test]
fn a_restart_of_the_service_leaves_running_vms_alone() {
    survives("svc-restart", "systemctl restart vmmd");
}

#[test]
fn a_killed_daemon_leaves_running_vms_alone() {
    survives(
        "svc-kill",
        "pid=$(systemctl show -P MainPID vmmd); kill -9 $pid; \
         while [ \"$(systemctl show -P MainPID vmmd)\" = $pid ] || ! systemctl is-active -q vmmd; do sleep 0.1; done",
    );
}

#[test]
fn a_vm_that_ended_while_the_daemon_was_down_is_found_ended() {
    let case = Case::new("svc-gone").expect("node");
    let node = case.node();
    let vm = Vm::start(&case, "", &counting()).expect("start");
    vm.console().expect("console").until("up 5.", BOOT).expect("boot");
    let pid = vm.pid().expect("pid");
    node.sh(&format!("systemctl stop vmmd; kill -9 {pid}; while [ -d /proc/{pid} ]; do sleep 0.05; done; systemctl start vmmd"))
        .expect("vmmd is down while the vmm is killed");
    assert_eq!(vm.phase().expect("phase"), "FAILED");
    assert_eq!(
        vm.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_LOST"
    );
    vm.ctl("start").expect("it can be started again");
    vm.console().expect("console").until("up 5.", BOOT).expect("boot");
}

#[test]
fn the_death_of_a_vmm_is_noticed_at_once() {
    let case = Case::new("vmm-kill").expect("node");
    let vm = Vm::start(&case, "", &counting()).expect("start");
    vm.console().expect("console").until("up 5.", BOOT).expect("boot");
    let mut watch = vm
        .node()
        .stream(&format!("exec vmmctl get vm {} -w -o json", vm.name()))
        .expect("watch");
    watch
        .until("VM_PHASE_RUNNING", Deadline::seconds(20))
        .expect("running");
    vm.node()
        .sh(&format!("kill -9 {}", vm.pid().expect("pid")))
        .expect("kill");
    // One change has both, the reason first.
    watch
        .until("EXIT_REASON_LOST", Deadline::seconds(10))
        .expect("the reason");
    watch
        .until("VM_PHASE_FAILED", Deadline::seconds(10))
        .expect("failed");
}

/// Everything in the node that VMs make: processes, network interfaces, sockets, cgroups, files.
fn traces(node: &Node) -> BTreeSet<String> {
    let found = node
        .sh("for p in $(pgrep -x vmm); do echo process $p; done; \
             for i in /sys/class/net/*; do echo interface ${i##*/}; done; \
             find /run/vmmd /var/lib/vmmd /var/log/vmmd | sed 's/^/file /'; \
             find /sys/fs/cgroup -type d | grep -i vmm | sed 's/^/cgroup /'; true")
        .expect("look around");
    found.lines().map(str::to_owned).collect()
}

#[test]
fn twenty_vms_made_and_deleted_leave_nothing() {
    let case = Case::new("twenty").expect("node");
    let node = case.node();
    let bridge = case.bridge().expect("a bridge");
    let disk = format!("{}/data.raw", case.folder().expect("folder"));
    node.sh(&format!("truncate -s 16M {disk}"))
        .expect("a bridge and a disk");
    let before = traces(node);
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .disk("data", &disk, false)
        .nic("eth0", &bridge)
        .cmdline("guest.after=none");
    for round in 0..20 {
        let vm = Vm::start(&case, &format!("-{round}"), &spec).expect("start");
        // Some are stopped before they are up, some after; some by the guest, some by force.
        match round % 4 {
            0 => drop(vm.ctl("stop --force").expect("stop")),
            1 => {
                vm.console()
                    .expect("console")
                    .until("GUEST-READY", BOOT)
                    .expect("boot");
                vm.ctl("stop --grace 60s").expect("stop");
            }
            2 => {
                vm.node()
                    .sh(&format!("kill -9 {}", vm.pid().expect("pid")))
                    .expect("kill");
                vm.wait_phase("FAILED", 20).expect("failed");
            }
            _ => drop(vm.ctl("delete --force").expect("delete")),
        }
        if round % 4 != 3 {
            vm.ctl("delete").expect("delete");
        }
    }
    let after = traces(node);
    let left: Vec<_> = after.difference(&before).collect();
    assert!(left.is_empty(), "left behind: {left:#?}");
}

#[test]
fn guests_power_off_in_an_orderly_way_also_while_vmmd_is_stopped() {
    let case = Case::new("svc-guests").expect("node");
    let node = case.node();
    let vm = Vm::start(&case, "", &counting()).expect("start");
    let up = || vm.console().expect("console").until("up 5.", BOOT).expect("boot");
    up();
    let pid = vm.pid().expect("pid");
    let alive = || node.sh(&format!("kill -0 {pid}")).is_ok();
    // A restart of the unit asks no guest, with the daemon or without.
    node.sh("systemctl restart vmmd-guests; systemctl stop vmmd; systemctl restart vmmd-guests")
        .expect("restart");
    assert!(alive(), "a restart of vmmd-guests has ended the VM");
    // A stop of it does, as at a shutdown of the node.
    node.sh("systemctl stop vmmd-guests").expect("stop");
    assert!(!alive(), "the VM runs on");
    node.sh("systemctl start vmmd vmmd-guests").expect("start");
    let stopped = |vm: &Vm| {
        assert_eq!(vm.phase().expect("phase"), "STOPPED");
        vm.field("/status/lastExit/reason").expect("reason")
    };
    assert_eq!(stopped(&vm), "EXIT_REASON_STOPPED");

    // So does the removal of the package, which says so.
    vm.ctl("start").expect("start");
    up();
    let said = node
        .sh("systemctl stop vmmd; DPKG_MAINTSCRIPT_NAME=prerm DPKG_MAINTSCRIPT_PACKAGE=vmmd /var/lib/dpkg/info/vmmd.prerm remove")
        .expect("prerm");
    assert!(said.contains("stopping 1 virtual machine"), "{said}");
    node.sh("systemctl start vmmd vmmd-guests").expect("start");
    assert_eq!(stopped(&vm), "EXIT_REASON_STOPPED");
}
