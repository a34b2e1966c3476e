//! Resources that a VM may use of its node: limits of its control group, out of memory, huge pages.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::{Kernel, Node};
use vmmd_tests::vm::{Vm, VmSpec};

/// 1 vCPU, 256 MiB; only started by request.
fn busybox() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612)
}

/// The folder of a VM's control group in the node.
fn group(vm: &Vm<'_>) -> String {
    let pid = vm.pid();
    let path = vm.node().sh(&format!("cut -d: -f3 /proc/{pid}/cgroup"));
    format!("/sys/fs/cgroup{}", path.trim())
}

fn read(node: &Node, path: &str) -> String {
    let text = node.sh(&format!("cat {path}"));
    text.trim().to_owned()
}

#[test]
fn a_vm_that_is_out_of_memory_ends_alone_and_is_said_to_be() {
    let case = Case::new("oom");
    let victim = Vm::start(&case, "-victim", &busybox());
    let other = Vm::start(&case, "-other", &busybox());
    let mut console = other.booted();
    victim.booted();
    let node = case.node();
    let daemon = node.sh("systemctl show -p MainPID vmmd");
    let other_pid = other.pid();
    // The kernel can take nothing back: there is no swap for a guest's memory.
    node.ssh(&format!("echo 16M >{}/memory.max", group(&victim)))
        .expect("lower the limit");
    victim.wait_end(60);
    let reason = victim.exit_reason();
    assert_eq!(reason, "OUT_OF_MEMORY");
    assert_eq!(victim.phase(), "FAILED");
    assert_eq!(node.sh("systemctl show -p MainPID vmmd"), daemon, "vmmd goes on");
    assert_eq!(other.pid(), other_pid);
    console.run("echo alive");
    // The reason applies only to that run.
    victim.ctl("start");
    node.sh(&format!("kill -9 {}", victim.pid()));
    victim.wait_phase("FAILED", 60);
    let reason = victim.exit_reason();
    assert_eq!(reason, "LOST");
}

/// Tests that need the node to themselves.
mod exclusive {
    use super::*;

    #[test]
    fn a_vm_has_a_control_group_with_the_limits_of_its_spec() {
        let case = Case::new("limits");
        let node = case.node();
        let last = node.sh("echo $(($(nproc --all) - 1))");
        let spec = busybox()
            .cores(2)
            .set("/cpu/coreFractionPercent", json!(20))
            .set("/cpu/coreLimitPercent", json!(60))
            .set("/cpu/hostCpus", json!(last.trim()));
        let vm = Vm::start(&case, "", &spec);
        let group = group(&vm);
        let memory = (256 + 4 + 64 + 4) << 20;
        for (file, expected) in [
            ("cpu.weight", "40"),
            ("cpu.max", "120000 100000"),
            ("cpuset.cpus", last.trim()),
            ("memory.max", memory.to_string().as_str()),
            ("memory.high", "max"),
            ("memory.oom.group", "1"),
            ("pids.max", "66"),
        ] {
            assert_eq!(read(node, &format!("{group}/{file}")), expected, "{file}");
        }
        let pid = vm.pid();
        let allowed = node.sh(&format!("grep Cpus_allowed_list /proc/{pid}/task/*/status"));
        for line in allowed.lines() {
            assert!(line.ends_with(&format!("\t{}", last.trim())), "{line}");
        }
        node.sh(&format!("echo 1234 >{group}/cpu.weight; systemctl restart vmmd"));
        assert_eq!(vm.pid(), pid);
        assert_eq!(read(node, &format!("{group}/cpu.weight")), "40");
        let mut console = vm.booted();

        let others = spec
            .set("/cpu/coreFractionPercent", json!(30))
            .set("/cpu/coreLimitPercent", json!(80))
            .set("/cpu/hostCpus", json!(""));
        vm.apply(&others);
        assert_eq!(vm.field("/status/pendingChanges"), "", "all are had at once");
        for (file, expected) in [
            ("cpu.weight", "60"),
            ("cpu.max", "160000 100000"),
            // The kernel leaves no group with processes without any.
            (
                "cpuset.cpus",
                &read(node, &format!("{group}/../cpuset.cpus.effective")),
            ),
        ] {
            assert_eq!(read(node, &format!("{group}/{file}")), expected, "{file}");
        }
        console.run("true");
    }

    #[test]
    fn huge_pages_are_taken_at_start_or_start_fails() {
        let case = Case::new("huge");
        let node = case.node();
        let spec = busybox().set("/memory/hugePages", json!("HUGE_PAGES_2M"));
        let vm = Vm::create(&case, "", &spec);
        let refused = vm.try_ctl("start");
        assert!(!refused.success());
        let expected = "huge pages of 2 MiB: the VM needs 256 MiB, all VMs together may have 0";
        assert!(refused.stderr.contains(expected), "{}", refused.stderr);

        let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB";
        node.sh(&format!(
            "sync; echo 3 >/proc/sys/vm/drop_caches; echo 1 >/proc/sys/vm/compact_memory; echo 130 >{pool}/nr_hugepages"
        ));
        let set_aside: u64 = read(node, &format!("{pool}/nr_hugepages"))
            .parse()
            .expect("number");
        assert!(
            set_aside >= 128,
            "the node has only {set_aside} pages to set aside"
        );
        vm.ctl("start");
        let free: u64 = read(node, &format!("{pool}/free_hugepages"))
            .parse()
            .expect("number");
        assert_eq!(free, set_aside - 128, "all are taken at once");
        let max: u64 = read(node, &format!("{}/memory.max", group(&vm)))
            .parse()
            .expect("number");
        assert!(max < 256 << 20, "huge pages are not counted as memory");
        let mut console = vm.booted();
        console.type_line("reboot -f");
        console.booted();
        vm.ctl("stop --force");
        assert_eq!(
            read(node, &format!("{pool}/free_hugepages")),
            set_aside.to_string(),
            "all are given back"
        );
        node.sh(&format!("echo 0 >{pool}/nr_hugepages"));
    }
}
