//! Consoles from end to end: the virtio-console beside the serial port, breaks, access for typing.

use serde_json::{Value, json};
use vmmd_tests::node::{Kernel, Stream};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Guests, long};

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
    let text = vm.ctl_with("stats", "-o json");
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

/// Number of exits for printing a number of lines on a terminal, with a command that is typed on a
/// console. Input on the serial port also causes exits, and more of them the fewer characters the
/// guest finds at once.
fn exits_of_lines(console: &mut Console, vm: &Vm<'_>, terminal: &str) -> u64 {
    let line = "x".repeat(usize::try_from(WIDTH).expect("a small number") - 2);
    console.run(&format!(
        "for i in $(seq {LINES}); do echo {line}; done > /tmp/lines"
    ));
    let before = exits(vm);
    console.run(&format!(
        "while read -r line; do echo \"$line\"; done < /tmp/lines > {terminal}"
    ));
    exits(vm) - before
}

#[test]
fn virtio_console_line_causes_fewer_exits_than_serial() {
    let case = Case::new("hvc");
    let (vm, mut serial) = Vm::boot(&case, "", &with_console());
    let mut hvc = Console::open(&case, &format!("vmmctl console {} --hvc", vm.name()));
    // It is a terminal of its own, in both directions.
    serial.run("setsid sh -c 'exec sh </dev/hvc0 >/dev/hvc0 2>&1' & true");
    let there = hvc.run("readlink /proc/self/fd/0");
    assert_eq!(there.trim(), "/dev/hvc0");
    let printed = hvc.run("seq 3000 | tail -n 1");
    assert_eq!(printed.trim(), "3000");

    let cost = |console: &mut Console, terminal| {
        let idle = exits_of_lines(console, &vm, "/dev/null");
        exits_of_lines(console, &vm, terminal).saturating_sub(idle)
    };
    let by_hvc = cost(&mut hvc, "/dev/hvc0");
    let by_serial = cost(&mut serial, "/dev/ttyS0");
    println!(
        "exits to the vmm for {LINES} lines of {WIDTH} bytes: {by_serial} by the serial port, {by_hvc} by the virtio-console"
    );
    assert!(by_serial >= LINES * WIDTH, "{by_serial}");
    assert!(by_hvc < LINES * 4, "{by_hvc}");
}

#[test]
fn a_console_is_held_read_along_and_taken_over() {
    let case = Case::new("held");
    let vm = Vm::start(&case, "", &VmSpec::busybox(Kernel::Cloud612));
    let mut first = Console::open(&case, &format!("vmmctl console {} --exclusive", vm.name()));
    first.booted();
    first.run("true");
    let refused = vm.try_ctl_with("console", "</dev/null");
    assert!(!refused.success());
    assert!(
        refused.stderr.contains("another client types there (uid 0, for "),
        "{}",
        refused.stderr
    );

    let mut reader = Console::open(&case, &format!("vmmctl console {} --read-only", vm.name()));
    let mut second = Console::open(&case, &format!("vmmctl console {} --force", vm.name()));
    second.run("echo taken-$((40 + 2))");
    for other in [&mut first, &mut reader] {
        other.until("taken-42", 60);
    }
}

/// Readers of a console in the node: half of them read, and half never do. They end when this is dropped.
struct Readers<'a> {
    case: &'a Case,
    /// Their process group.
    group: String,
    /// Path of the output FIFO of the first reader that never reads.
    unread: String,
    /// The marks that the others have read.
    marks: Stream,
}

/// How many readers of each kind.
const READERS: usize = 5;

impl<'a> Readers<'a> {
    fn start(case: &'a Case, vm: &Vm<'_>) -> Self {
        let folder = case.folder();
        // The input FIFO is empty and stays open. The output FIFOs of the blocked readers are
        // neither read nor closed.
        let reader = format!("vmmctl console {} --hvc --read-only <&3", vm.name());
        let script = format!(
            "set -e; cd {folder}; mkfifo in; exec 3<>in; echo $$
             for i in $(seq {READERS}); do
                 mkfifo out$i; exec 4<>out$i
                 {reader} >&4 & {reader} 4>&- | grep -ao --line-buffered 'mark-[0-9]' &
             done
             wait"
        );
        let mut marks = case.node().stream(&script);
        let group = marks.until("\n", Deadline::seconds(60));
        let readers = Self {
            case,
            group: group.trim().to_owned(),
            unread: format!("{folder}/out1"),
            marks,
        };
        let uid = vm.field("/metadata/uid");
        let attached = format!(
            "timeout 120 sh -c 'until [ $(ss -xH state established | grep -c {uid}.*hvc.sock) -ge {} ]; do sleep 0.2; done'",
            2 * READERS
        );
        case.node().sh(&attached);
        readers
    }

    /// Waits until all that read have come to a mark.
    fn until(&mut self, mark: &str) {
        for _ in 0..READERS {
            self.marks.until(mark, Deadline::seconds(300));
        }
    }
}

impl Drop for Readers<'_> {
    fn drop(&mut self) {
        // They may have ended.
        let _ = self.case.node().ssh(&format!("kill -- -{}", self.group));
    }
}

/// Cost of a flood of output.
#[derive(Debug)]
struct Flood {
    /// Calls of `read` and `write` by the threads of the virtio-console.
    calls: u64,
    /// Memory of the vmm afterwards, without the guest's, in KiB.
    vmm_kib: u64,
    /// Memory of the daemon afterwards, in KiB.
    vmmd_kib: u64,
    /// By the guest's clock.
    seconds: f64,
}

/// Has the guest print a number of MiB on hvc0, and a mark.
fn flood(console: &mut Console, vm: &Vm<'_>, mib: u64, mark: &str) -> Flood {
    let pid = vm.pid();
    let number = |command: &str| {
        let text = vm.node().sh(command);
        text.trim().parse::<u64>().expect("a number")
    };
    let calls = format!(
        "for task in /proc/{pid}/task/*; do grep -qx console $task/comm && cat $task/io; done | awk '/^sysc[rw]:/ {{ n += $2 }} END {{ print n }}'"
    );
    let calls_before = number(&calls);
    let print = format!(
        "a=$(cut -d' ' -f1 /proc/uptime); for i in $(seq {mib}); do cat /tmp/mib; done > /dev/hvc0; echo {mark} > /dev/hvc0; \
         b=$(cut -d' ' -f1 /proc/uptime); echo $a $b"
    );
    let times = console.run_within(&print, 1200);
    let times: Vec<f64> = times
        .split_whitespace()
        .map(|time| time.parse().expect("seconds"))
        .collect();
    let anonymous = |pid: &str| number(&format!("awk '/^RssAnon:/ {{ print $2 }}' /proc/{pid}/status"));
    Flood {
        calls: number(&calls) - calls_before,
        vmm_kib: anonymous(&pid.to_string()),
        vmmd_kib: anonymous("$(pidof -s vmmd)"),
        seconds: times[1] - times[0],
    }
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn a_break_of_the_serial_line_is_sysrq_to_linux() {
        let case = Case::new("break");
        let (vm, mut console) = Vm::boot(&case, "", &VmSpec::busybox(Kernel::Cloud612));
        let command = format!("vmmctl console {} --no-replay --send-break", vm.name());
        let mut breaking = Console::open(&case, &command);
        breaking.type_line("h");
        console.until("sysrq: HELP", 60);
    }

    #[test]
    fn console_flood_with_blocked_readers_is_bounded() {
        // Linux gives hvc0 16 bytes at a time: a GiB would take an emulated node an hour. The device's own test has that much.
        let mib = if long() { 128 } else { 32 };
        let case = Case::new("flood");
        // The guest's memory is no anonymous memory of the vmm.
        let (vm, mut serial) = Vm::boot(&case, "", &with_console().shared_memory());
        // Its settings hold as long as somebody has it open.
        serial.run(
            "exec 5<>/dev/hvc0; stty -F /dev/hvc0 raw -echo; yes $(seq 100) | head -c 1048576 > /tmp/mib",
        );
        let alone = flood(&mut serial, &vm, mib, "mark-1");
        let mut readers = Readers::start(&case, &vm);
        let read = flood(&mut serial, &vm, mib, "mark-2");
        for (readers, flood) in [(0, &alone), (2 * READERS, &read)] {
            println!(
                "{mib} MiB with {readers} readers: {:.1} s, {} calls, {flood:?}",
                flood.seconds, flood.calls
            );
        }
        readers.until("mark-2");
        let told = format!(
            "timeout 120 grep -aom 1 'bytes of output lost' {}",
            readers.unread
        );
        case.node().sh(&told);

        // Times and calls depend on what else the machine does.
        for (before, after) in [(alone.vmm_kib, read.vmm_kib), (alone.vmmd_kib, read.vmmd_kib)] {
            assert!(after < before + (16 << 10), "{alone:?}, {read:?}");
        }

        // The serial port has a log, in two files of 1 MiB. The log does not contain output on hvc0.
        serial.run_within("for i in 1 2 3; do cat /tmp/mib; done > /dev/ttyS0", 1200);
        let uid = vm.field("/metadata/uid");
        let log = format!("cat $(find /var/log/vmmd/vms -path '*{uid}*' -name 'serial*') | wc -c");
        let log = case.node().sh(&log);
        let log: u64 = log.trim().parse().expect("a number");
        assert!((1 << 20..=2 << 20).contains(&log), "{log}");
    }
}
