//! Balloon: a guest gives memory back to the node, on request and on its own.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};

/// How long a guest may take to give memory back, or to take it, in a slow node.
const PATIENCE: u64 = 120;

fn busybox() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612).memory_mib(512)
}

fn up(vm: &Vm<'_>) -> Console {
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
}

/// Resident memory of the `vmm`, in KiB.
fn rss(vm: &Vm<'_>) -> u64 {
    let pid = vm.pid().expect("pid");
    let text = vm
        .node()
        .sh(&format!("awk '/^VmRSS:/ {{ print $2 }}' /proc/{pid}/status"))
        .expect("status of the process");
    text.trim().parse().expect("VmRSS")
}

/// Waits in the node until the `vmm` has less in memory than that, in KiB: there is no event for it.
fn wait_rss_below(vm: &Vm<'_>, kib: u64) {
    let pid = vm.pid().expect("pid");
    vm.node()
        .sh(&format!(
            "timeout {PATIENCE} sh -c 'until [ $(awk \"/^VmRSS:/ {{ print \\$2 }}\" /proc/{pid}/status) -lt {kib} ]; \
             do sleep 0.2; done'"
        ))
        .unwrap_or_else(|error| panic!("RSS is {} KiB, not below {kib}: {error}", rss(vm)));
}

/// Waits in the guest until its free memory compares so with that many KiB.
fn wait_free(console: &mut Console, comparison: &str, kib: u64) {
    let free = "sed -n 's/^MemFree: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    console
        .run(
            &format!("until [ $({free}) {comparison} {kib} ]; do usleep 200000; done"),
            PATIENCE,
        )
        .expect("free memory of the guest");
}

/// Uses that many MiB of memory, and frees them.
fn touch(console: &mut Console, mib: u64) {
    console
        .run(
            &format!("mkdir -p /fill && mount -t tmpfs -o size=90% none /fill && dd if=/dev/zero of=/fill/x bs=1M count={mib} 2>/dev/null"),
            PATIENCE,
        )
        .expect("fill a tmpfs");
}

#[test]
fn a_guest_gives_back_what_a_target_leaves_out_and_gets_it_when_the_target_is_lifted() {
    let case = Case::new("balloon").expect("node");
    let vm = Vm::start(&case, "", &busybox()).expect("start");
    let mut console = up(&vm);
    touch(&mut console, 250);
    console.run("umount /fill", PATIENCE).expect("free it");
    let full = rss(&vm);
    assert!(full > 250 << 10, "{full} KiB: the guest used more");

    vm.ctl_with("set memory", "--target 192Mi").expect("target");
    wait_free(&mut console, "-lt", 160 << 10);
    wait_rss_below(&vm, 224 << 10);

    vm.ctl_with("set memory", "--all").expect("all");
    wait_free(&mut console, "-gt", 300 << 10);
    touch(&mut console, 250);
    assert!(rss(&vm) > 250 << 10, "the memory is there again");
}

#[test]
fn a_guest_that_needs_its_memory_takes_it_from_the_balloon() {
    let case = Case::new("balloon-oom").expect("node");
    let vm = Vm::start(&case, "", &busybox()).expect("start");
    let mut console = up(&vm);
    vm.ctl_with("set memory", "--target 128Mi").expect("target");
    wait_free(&mut console, "-lt", 100 << 10);
    // More than the target leaves: nothing is killed.
    touch(&mut console, 200);
    console
        .run("! dmesg | grep -i 'out of memory'", PATIENCE)
        .expect("nothing was killed");
}

#[test]
fn with_free_page_reporting_the_node_gets_what_a_guest_has_freed() {
    let case = Case::new("balloon-report").expect("node");
    let spec = busybox().balloon(&json!({"freePageReporting": true}));
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = up(&vm);
    touch(&mut console, 250);
    let full = rss(&vm);
    assert!(full > 250 << 10, "{full} KiB: the guest used more");
    console.run("umount /fill", PATIENCE).expect("free it");
    wait_rss_below(&vm, full - (150 << 10));
    // The guest can use reported pages again.
    touch(&mut console, 250);
    console.run("sync", PATIENCE).expect("it is alive");
}
