//! Consoles from end to end: the virtio-console beside the serial port, breaks, who may type.

use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::{Case, Guests};

const LINES: u64 = 100;
/// A line with its end.
const WIDTH: u64 = 80;

/// With a kernel that has the console's driver in it.
fn with_console() -> VmSpec {
    VmSpec::quick(Kernel::Cloud612, Guests.initrd(Kernel::Cloud612)).set("/virtioConsole", json!({}))
}

/// Exits of a VM so far that the vmm handled: accesses to ports and to memory of devices. A notification of a virtio device is none, as KVM
/// hands it to the device's thread.
fn exits(vm: &Vm<'_>) -> u64 {
    let text = vm.ctl_with("stats", "-o json").expect("stats");
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    ["io_exits", "mmio_exits"]
        .iter()
        .map(|name| {
            let count = stats["cpu"]["exits"][name].as_str();
            count
                .and_then(|count| count.parse::<u64>().ok())
                .unwrap_or_else(|| panic!("no {name} in {text}"))
        })
        .sum()
}

/// How many exits it costs the guest to print a number of lines on a terminal.
fn cost(console: &mut Console, vm: &Vm<'_>, terminal: &str) -> u64 {
    let line = "x".repeat(usize::try_from(WIDTH).expect("a small number") - 2);
    console
        .run(
            &format!("for i in $(seq {LINES}); do echo {line}; done > /tmp/lines"),
            60,
        )
        .expect("lines");
    let before = exits(vm);
    console
        .run(
            &format!("while read -r line; do echo \"$line\"; done < /tmp/lines > {terminal}"),
            120,
        )
        .expect("printed");
    exits(vm) - before
}

#[test]
fn lines_on_a_virtio_console_do_not_leave_the_guest_for_the_vmm_where_the_serial_port_does_for_each_byte() {
    let case = Case::new("hvc").expect("node");
    let vm = Vm::start(&case, "", &with_console()).expect("start");
    let mut serial = vm.console().expect("console");
    serial.until("GUEST-READY", BOOT).expect("boot");
    let mut hvc = Console::open(&case, &format!("vmmctl console {} --hvc", vm.name())).expect("hvc");
    // It is a terminal of its own, in both directions.
    serial
        .run("setsid sh -c 'exec sh </dev/hvc0 >/dev/hvc0 2>&1' & true", 60)
        .expect("a shell");
    let there = hvc.run("readlink /proc/self/fd/0", 60).expect("a shell on hvc0");
    assert_eq!(there.trim(), "/dev/hvc0");
    let printed = hvc.run("seq 3000 | tail -n 1", 60).expect("a command");
    assert_eq!(printed.trim(), "3000");

    let idle = cost(&mut serial, &vm, "/dev/null");
    let by_hvc = cost(&mut serial, &vm, "/dev/hvc0").saturating_sub(idle);
    let by_serial = cost(&mut serial, &vm, "/dev/ttyS0").saturating_sub(idle);
    println!(
        "exits to the vmm for {LINES} lines of {WIDTH} bytes: {by_serial} by the serial port, {by_hvc} by the virtio-console"
    );
    assert!(by_serial >= LINES * WIDTH, "{by_serial}");
    assert!(by_hvc < LINES * 4, "{by_hvc}");
}

#[test]
fn a_break_of_the_serial_line_is_sysrq_to_linux() {
    let case = Case::new("break").expect("node");
    let vm = Vm::start(&case, "", &VmSpec::busybox(Kernel::Cloud612)).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    let command = format!("vmmctl console {} --no-replay --send-break", vm.name());
    let mut breaking = Console::open(&case, &command).expect("a second console");
    breaking.type_line("h").expect("a key");
    console.until("sysrq: HELP", 60).expect("Linux's help");
}

#[test]
fn a_console_is_held_read_along_and_taken_over() {
    let case = Case::new("held").expect("node");
    let vm = Vm::start(&case, "", &VmSpec::busybox(Kernel::Cloud612)).expect("start");
    let mut first =
        Console::open(&case, &format!("vmmctl console {} --exclusive", vm.name())).expect("console");
    first.until("GUEST-READY", BOOT).expect("boot");
    first.run("true", 60).expect("the holder types");
    let refused = vm
        .try_ctl_with("console", "</dev/null")
        .expect("the node answers");
    assert!(!refused.success());
    assert!(
        refused.stderr.contains("another client types there (uid 0, for "),
        "{}",
        refused.stderr
    );

    let mut reader =
        Console::open(&case, &format!("vmmctl console {} --read-only", vm.name())).expect("a reader");
    let mut second =
        Console::open(&case, &format!("vmmctl console {} --force", vm.name())).expect("by force");
    second.run("echo taken-$((40 + 2))", 60).expect("it types");
    for other in [&mut first, &mut reader] {
        other.until("taken-42", 60).expect("it reads along");
    }
}
