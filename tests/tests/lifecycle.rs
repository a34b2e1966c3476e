//! How a VM's life goes, as its owner and its operator see it.

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};
use vmmd_tests::wait::Deadline;

fn busybox() -> VmSpec {
    VmSpec::busybox(Kernel::Cloud612)
}

/// Starts a guest whose script ends it in some way, and returns how the daemon says that it ended.
fn exit_of(topic: &str, script: &str) -> (String, String) {
    let case = Case::new(topic);
    let vm = Vm::start(&case, "", &busybox().script(script));
    vm.wait_end(BOOT);
    (vm.phase(), vm.exit_reason())
}

#[test]
fn a_guest_that_powers_itself_off_is_stopped() {
    let ended = exit_of("poweroff", "poweroff");
    assert_eq!(ended, ("STOPPED".into(), "GUEST_SHUTDOWN".into()));
}

/// An operator's NMI panics a guest that wants this.
#[test]
fn a_guest_that_panics_and_halts_is_told_apart() {
    let case = Case::new("panic");
    // Without panic= the kernel stays where it is after a panic.
    let spec = busybox()
        .set("/onPanic", "PANIC_POLICY_IGNORE".into())
        .cmdline("panic=0");
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    console.run("echo 1 >/proc/sys/kernel/unknown_nmi_panic");
    let mut watch = vm.watch();
    vm.ctl("nmi");
    console.until("Kernel panic", BOOT);
    watch.until("GuestPanicked", Deadline::seconds(20));
    vm.ctl("stop --force");
    assert_eq!(vm.exit_reason(), "GUEST_PANIC");
}

#[test]
fn a_triple_fault_resets_the_machine_as_it_does_a_pc() {
    let case = Case::new("triple-reset");
    let (vm, mut console) = Vm::boot(&case, "", &busybox().cmdline("reboot=triple"));
    let pid = vm.pid();
    console.type_line("reboot");
    console.booted();
    assert_eq!(vm.pid(), pid);
    let instance = vm.get()["status"]["instance"].clone();
    assert_eq!(instance["crashResets"], "1", "{instance}");
    assert!(
        instance["guestResets"].is_null() || instance["guestResets"] == "0",
        "{instance}"
    );
}

#[test]
fn a_reboot_resets_the_machine_within_the_same_process() {
    let case = Case::new("reboot");
    let (vm, mut console) = Vm::boot(&case, "", &busybox());
    let pid = vm.pid();
    for resets in 1..=2 {
        console.type_line("reboot");
        console.booted();
        assert_eq!(vm.pid(), pid);
        assert_eq!(vm.field("/status/instance/guestResets"), resets.to_string());
    }
    console.run("dd if=/dev/hwrng of=/dev/null bs=512 count=4");
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_was() {
    let case = Case::new("pause");
    let (vm, mut console) = Vm::boot(&case, "", &busybox().cores(2));
    console.type_line("i=0; while :; do i=$((i + 1)); echo tick $i; usleep 100000; done");
    console.until("tick 3\r\n", 60);
    for _ in 0..5 {
        vm.ctl("pause");
        assert_eq!(vm.phase(), "PAUSED");
        let used = || {
            vm.node()
                .sh(&format!("cut -d' ' -f14,15 /proc/{}/stat", vm.pid()))
        };
        let before = used();
        vm.node().sh("sleep 0.5");
        assert_eq!(used(), before, "a paused VM uses no CPU");
        vm.ctl("resume");
    }
    assert_eq!(vm.phase(), "RUNNING");
    let text = console.text();
    let last = text
        .rsplit("tick ")
        .next()
        .and_then(|tick| tick.trim().parse::<u64>().ok())
        .unwrap_or(3);
    console.until(&format!("tick {}\r\n", last + 20), 60);
    let text = console.text();
    let ticks: Vec<u64> = text
        .split("tick ")
        .filter_map(|tick| tick.split_once("\r\n")?.0.parse().ok())
        .collect();
    let all: Vec<u64> = (1..=ticks.len() as u64).collect();
    assert_eq!(ticks, all, "no tick is missing, and none comes twice");
    let log = vm.node().sh(&format!(
        "cat /var/log/vmmd/vms/{}/serial.log",
        vm.field("/metadata/uid")
    ));
    assert!(
        !log.contains("soft lockup") && !log.contains("rcu_sched self-detected"),
        "{log}"
    );
}

#[test]
fn a_resumed_guests_clock_is_behind_or_right_as_its_spec_says() {
    let case = Case::new("clock");
    let kinds = [
        ("keep", "CLOCK_ON_RESUME_KEEP", true),
        ("sync", "CLOCK_ON_RESUME_SYNC", false),
    ];
    let vms = kinds.map(|(name, on_resume, _)| {
        let spec = busybox().set("/clock", serde_json::json!({ "onResume": on_resume }));
        Vm::start(&case, &format!("-{name}"), &spec)
    });
    let mut consoles = vms.each_ref().map(|vm| vm.console());
    for console in &mut consoles {
        console.booted();
    }
    let mut behind = || {
        consoles.each_mut().map(|console| {
            let guest = console.run("date +%s");
            let node = case.node().sh("date +%s");
            let seconds = |text: &str| text.trim().parse::<i64>().expect("seconds");
            seconds(&node) - seconds(&guest)
        })
    };
    let before = behind();
    for vm in &vms {
        vm.ctl("pause");
    }
    case.node().sh("sleep 20");
    for vm in &vms {
        vm.ctl("resume");
    }
    let after = behind();
    for ((_, on_resume, is_behind), (before, after)) in kinds.into_iter().zip(before.into_iter().zip(after)) {
        let lost = after - before;
        // The query itself may take seconds in an emulated node.
        assert_eq!(lost >= 15, is_behind, "{on_resume}: {lost} s");
    }
}

#[test]
fn stop_presses_the_power_button_and_kills_what_does_not_listen() {
    let case = Case::new("stop");
    let polite = Vm::start(&case, "a", &busybox());
    let mut console = polite.booted();
    polite.ctl("stop --grace 60s");
    console.until("GUEST-POWER-BUTTON", 10);
    assert_eq!(polite.exit_reason(), "STOPPED");
    // Without its modules the generic kernel knows no power button.
    let spec = VmSpec::busybox(Kernel::Generic61).cmdline("guest.modules=none");
    let deaf = Vm::start(&case, "b", &spec);
    deaf.booted();
    let stopped = deaf.try_ctl("stop --grace 2s");
    assert_eq!(stopped.status.code(), Some(13), "{}", stopped.stderr);
    assert!(stopped.stderr.contains("was killed"), "{}", stopped.stderr);
    assert_eq!(deaf.exit_reason(), "KILLED");
}

#[test]
fn early_power_button_press_reaches_the_driver_later() {
    let case = Case::new("early-press");
    let spec = busybox().script("grep ACPI:Ged /proc/interrupts");
    let vm = Vm::start(&case, "", &spec);
    let mut console = vm.console();
    // The button is pressed at once. The test does not wait for the reaction of the guest's init.
    vm.ctl("stop --grace 300s --no-wait");
    let text = console.until("GUEST-RUN-EXIT 0", BOOT);
    // How often input 17 of the I/O APIC interrupted the only processor. The kernel gives it a number of its own.
    let count = text
        .lines()
        .find(|line| line.contains("IO-APIC") && line.contains(" 17-"))
        .and_then(|line| line.split_ascii_whitespace().nth(1));
    assert_eq!(count, Some("1"), "{text}");
}
