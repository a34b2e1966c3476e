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
    let case = Case::new(topic).expect("node");
    let vm = Vm::start(&case, "", &busybox().script(script)).expect("start");
    vm.wait_end(BOOT).expect("the end");
    (
        vm.phase().expect("phase"),
        vm.field("/status/lastExit/reason").expect("reason"),
    )
}

#[test]
fn a_guest_that_powers_itself_off_is_stopped() {
    let ended = exit_of("poweroff", "poweroff");
    assert_eq!(ended, ("STOPPED".into(), "EXIT_REASON_GUEST_SHUTDOWN".into()));
}

#[test]
fn a_guest_that_panics_and_halts_is_told_apart() {
    let case = Case::new("panic").expect("node");
    // Without panic= the kernel stays where it is after a panic.
    let spec = busybox()
        .set("/onPanic", "PANIC_POLICY_IGNORE".into())
        .cmdline("panic=0")
        .script("echo c >/proc/sysrq-trigger");
    let vm = Vm::start(&case, "", &spec).expect("start");
    vm.console()
        .expect("console")
        .until("Kernel panic", BOOT)
        .expect("the panic");
    let mut watch = vm
        .node()
        .stream(&format!("exec vmmctl get vm {} -w -o json", vm.name()))
        .expect("watch");
    watch
        .until("GuestPanicked", Deadline::seconds(20))
        .expect("the panic is in the status");
    vm.ctl("stop --force").expect("stop");
    assert_eq!(
        vm.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_GUEST_PANIC"
    );
}

#[test]
fn a_triple_fault_ends_the_run_as_a_crash_where_the_spec_says_so() {
    // reboot=triple makes the kernel reset the machine by an invalid IDT; for the machine that is a crash of the CPU.
    let case = Case::new("triple").expect("node");
    let spec = busybox()
        .set("/onCrash", "CRASH_POLICY_STOP".into())
        .cmdline("reboot=triple")
        .script("reboot");
    let vm = Vm::start(&case, "", &spec).expect("start");
    vm.wait_end(BOOT).expect("the end");
    let ended = (
        vm.phase().expect("phase"),
        vm.field("/status/lastExit/reason").expect("reason"),
    );
    assert_eq!(ended, ("FAILED".into(), "EXIT_REASON_GUEST_CRASH".into()));
}

#[test]
fn a_triple_fault_resets_the_machine_as_it_does_a_pc() {
    let case = Case::new("triple-reset").expect("node");
    let vm = Vm::start(&case, "", &busybox().cmdline("reboot=triple")).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("first boot");
    let pid = vm.pid().expect("pid");
    console.type_line("reboot").expect("type");
    console.until("GUEST-READY", BOOT).expect("next boot");
    assert_eq!(vm.pid().expect("pid"), pid);
    let instance = vm.get().expect("get")["status"]["instance"].clone();
    assert_eq!(instance["crashResets"], "1", "{instance}");
    assert!(
        instance["guestResets"].is_null() || instance["guestResets"] == "0",
        "{instance}"
    );
}

#[test]
fn a_reboot_resets_the_machine_within_the_same_process() {
    let case = Case::new("reboot").expect("node");
    let vm = Vm::start(&case, "", &busybox()).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("first boot");
    let pid = vm.pid().expect("pid");
    for resets in 1..=2 {
        console.type_line("reboot").expect("type");
        console.until("GUEST-READY", BOOT).expect("next boot");
        assert_eq!(vm.pid().expect("pid"), pid);
        assert_eq!(
            vm.field("/status/instance/guestResets").expect("resets"),
            resets.to_string()
        );
    }
    console
        .run("dd if=/dev/hwrng of=/dev/null bs=512 count=4", 60)
        .expect("a device works after resets");
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_was() {
    let case = Case::new("pause").expect("node");
    let vm = Vm::start(&case, "", &busybox().cores(2)).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
        .type_line("i=0; while :; do i=$((i + 1)); echo tick $i; usleep 100000; done")
        .expect("type");
    console.until("tick 3\r\n", 60).expect("ticks");
    for _ in 0..5 {
        vm.ctl("pause").expect("pause");
        assert_eq!(vm.phase().expect("phase"), "PAUSED");
        let used = |when| {
            vm.node()
                .sh(&format!("cut -d' ' -f14,15 /proc/{}/stat", vm.pid().expect(when)))
                .expect(when)
        };
        let before = used("before");
        vm.node()
            .sh("sleep 0.5")
            .expect("half a second of the node's time");
        assert_eq!(used("after"), before, "a paused VM uses no CPU");
        vm.ctl("resume").expect("resume");
    }
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
    let text = console.text();
    let last = text
        .rsplit("tick ")
        .next()
        .and_then(|tick| tick.trim().parse::<u64>().ok())
        .unwrap_or(3);
    console
        .until(&format!("tick {}\r\n", last + 20), 60)
        .expect("it ticks on");
    let text = console.text();
    let ticks: Vec<u64> = text
        .split("tick ")
        .filter_map(|tick| tick.split_once("\r\n")?.0.parse().ok())
        .collect();
    let all: Vec<u64> = (1..=ticks.len() as u64).collect();
    assert_eq!(ticks, all, "no tick is missing, and none comes twice");
    let log = vm.node().sh(&format!(
        "cat /var/log/vmmd/vms/{}/serial.log",
        vm.field("/metadata/uid").expect("uid")
    ));
    let log = log.expect("serial log");
    assert!(
        !log.contains("soft lockup") && !log.contains("rcu_sched self-detected"),
        "{log}"
    );
}

#[test]
fn a_resumed_guests_clock_is_behind_or_right_as_its_spec_says() {
    let case = Case::new("clock").expect("node");
    let kinds = [
        ("keep", "CLOCK_ON_RESUME_KEEP", true),
        ("sync", "CLOCK_ON_RESUME_SYNC", false),
    ];
    let vms = kinds.map(|(name, on_resume, _)| {
        let spec = busybox().set("/clock", serde_json::json!({ "onResume": on_resume }));
        Vm::start(&case, &format!("-{name}"), &spec).expect("start")
    });
    let mut consoles = vms.each_ref().map(|vm| vm.console().expect("console"));
    for console in &mut consoles {
        console.until("GUEST-READY", BOOT).expect("boot");
    }
    let mut behind = || {
        consoles.each_mut().map(|console| {
            let guest = console.run("date +%s", 60).expect("the guest's time");
            let node = case.node().sh("date +%s").expect("the node's time");
            let seconds = |text: &str| text.trim().parse::<i64>().expect("seconds");
            seconds(&node) - seconds(&guest)
        })
    };
    let before = behind();
    for vm in &vms {
        vm.ctl("pause").expect("pause");
    }
    case.node().sh("sleep 20").expect("a long pause");
    for vm in &vms {
        vm.ctl("resume").expect("resume");
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
    let case = Case::new("stop").expect("node");
    let polite = Vm::start(&case, "a", &busybox()).expect("start");
    let mut console = polite.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    polite.ctl("stop --grace 60s").expect("stop");
    console
        .until("GUEST-POWER-BUTTON", 10)
        .expect("the guest felt the button");
    assert_eq!(
        polite.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_STOPPED"
    );
    // Without its modules the generic kernel knows no power button.
    let spec = VmSpec::busybox(Kernel::Generic61).cmdline("guest.modules=none");
    let deaf = Vm::start(&case, "b", &spec).expect("start");
    deaf.console()
        .expect("console")
        .until("GUEST-READY", BOOT)
        .expect("boot");
    let stopped = deaf.try_ctl("stop --grace 2s").expect("ssh");
    assert_eq!(stopped.status.code(), Some(13), "{}", stopped.stderr);
    assert!(stopped.stderr.contains("was killed"), "{}", stopped.stderr);
    assert_eq!(
        deaf.field("/status/lastExit/reason").expect("reason"),
        "EXIT_REASON_KILLED"
    );
}

#[test]
fn a_press_of_the_power_button_before_the_guest_has_its_driver_is_seen_once_it_has() {
    let case = Case::new("early-press").expect("node");
    let spec = busybox().script("grep ACPI:Ged /proc/interrupts");
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    // The button is pressed at once. The test does not wait for the reaction of the guest's init.
    vm.ctl("stop --grace 300s --no-wait").expect("stop");
    let text = console.until("GUEST-RUN-EXIT 0", BOOT).expect("boot");
    // How often input 17 of the I/O APIC interrupted the only processor. The kernel gives it a number of its own.
    let count = text
        .lines()
        .find(|line| line.contains("IO-APIC") && line.contains(" 17-"))
        .and_then(|line| line.split_ascii_whitespace().nth(1));
    assert_eq!(count, Some("1"), "{text}");
}

#[test]
fn restart_gives_a_new_process_and_delete_wants_force_while_it_runs() {
    let case = Case::new("restart").expect("node");
    let vm = Vm::start(&case, "", &busybox()).expect("start");
    vm.console()
        .expect("console")
        .until("GUEST-READY", BOOT)
        .expect("boot");
    let pid = vm.pid().expect("pid");
    vm.ctl("restart --grace 60s").expect("restart");
    assert_ne!(vm.pid().expect("pid"), pid);
    let refused = vm.try_ctl("delete").expect("ssh");
    assert_eq!(refused.status.code(), Some(5), "{}", refused.stderr);
    assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
    vm.ctl("delete --force").expect("delete");
    assert_eq!(vm.try_ctl("get vm").expect("ssh").status.code(), Some(3));
}

#[test]
fn several_consoles_see_the_same_and_one_that_does_not_read_slows_nobody() {
    let case = Case::new("consoles").expect("node");
    let vm = Vm::start(&case, "", &busybox()).expect("start");
    let mut first = vm.console().expect("first");
    first.until("GUEST-READY", BOOT).expect("boot");
    // A client that opens the console and never reads: its pipe fills, then its stream, then it loses output.
    let idle = vm.console().expect("a console that nobody reads");
    let mut second = vm.console().expect("second");
    second
        .until("GUEST-READY", 30)
        .expect("what was printed before is replayed");
    first
        .type_line("seq 1 4000; echo flood-$((1 + 1))")
        .expect("type");
    first.until("flood-2", BOOT).expect("the flood ends");
    second.until("flood-2", BOOT).expect("for the other one too");
    second
        .run("echo from-the-second", 60)
        .expect("input from any of them");
    first.until("from-the-second", 30).expect("is seen by all");
    drop(idle);
    let mut late = vm.console().expect("late");
    late.until("from-the-second", 30)
        .expect("a late client sees the last output");
}
