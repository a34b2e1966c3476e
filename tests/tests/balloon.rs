//! Balloon: a guest gives memory back to the node, on request and on its own.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{Console, Vm, VmSpec};

/// How long a guest may take to give memory back, or to take it, in a slow node.
const PATIENCE: u64 = 120;

fn busybox() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612).memory_mib(512)
}

/// Resident memory of the `vmm`, in KiB.
fn rss(vm: &Vm<'_>) -> u64 {
    let pid = vm.pid();
    let text = vm
        .node()
        .sh(&format!("awk '/^VmRSS:/ {{ print $2 }}' /proc/{pid}/status"));
    text.trim().parse().expect("VmRSS")
}

/// Waits in the node until the `vmm` has less in memory than that, in KiB: there is no event for it.
fn wait_rss_below(vm: &Vm<'_>, kib: u64) {
    let pid = vm.pid();
    vm.node()
        .try_sh(&format!(
            "timeout {PATIENCE} sh -c 'until [ $(awk \"/^VmRSS:/ {{ print \\$2 }}\" /proc/{pid}/status) -lt {kib} ]; \
             do sleep 0.2; done'"
        ))
        .unwrap_or_else(|error| panic!("RSS is {} KiB, not below {kib}: {error}", rss(vm)));
}

/// Waits in the guest until its free memory compares so with that many KiB.
fn wait_free(console: &mut Console, comparison: &str, kib: u64) {
    let free = "sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    console.run(&format!(
        "until [ $({free}) {comparison} {kib} ]; do usleep 200000; done"
    ));
}

/// Uses that many MiB of memory, and frees them.
fn touch(console: &mut Console, mib: u64) {
    console.run(
        &format!("mkdir -p /fill && mount -t tmpfs -o size=90% none /fill && dd if=/dev/zero of=/fill/x bs=1M count={mib} 2>/dev/null"));
}

#[test]
fn balloon_follows_a_target_and_its_removal() {
    let case = Case::new("balloon");
    let (vm, mut console) = Vm::boot(&case, "", &busybox());
    touch(&mut console, 250);
    console.run("umount /fill");
    let full = rss(&vm);
    assert!(full > 250 << 10, "{full} KiB: the guest used more");

    vm.ctl_with("set memory", "--target 192Mi");
    wait_free(&mut console, "-lt", 160 << 10);
    wait_rss_below(&vm, 224 << 10);

    vm.ctl_with("set memory", "--all");
    wait_free(&mut console, "-gt", 300 << 10);
    touch(&mut console, 250);
    assert!(rss(&vm) > 250 << 10, "the memory is there again");
}

#[test]
fn free_page_reporting_returns_memory_to_the_node() {
    let case = Case::new("balloon-report");
    let spec = busybox().set("/balloon", json!({"freePageReporting": true}));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    touch(&mut console, 250);
    let full = rss(&vm);
    assert!(full > 250 << 10, "{full} KiB: the guest used more");
    console.run("umount /fill");
    wait_rss_below(&vm, full - (150 << 10));
    // The guest can use reported pages again.
    touch(&mut console, 250);
    console.run("sync");
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn a_guest_that_needs_its_memory_takes_it_from_the_balloon() {
        let case = Case::new("balloon-oom");
        let (vm, mut console) = Vm::boot(&case, "", &busybox());
        vm.ctl_with("set memory", "--target 128Mi");
        wait_free(&mut console, "-lt", 100 << 10);
        // More than the target leaves: nothing is killed.
        touch(&mut console, 200);
        console.run("! dmesg | grep -i 'out of memory'");
    }
}
