//! Disks come to a running VM and go again.

use rstest::rstest;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::{Case, long};

/// Exit codes of vmmctl.
const EXHAUSTED: i32 = 9;
const TIMEOUT: i32 = 10;
/// Disks of a VM without NICs.
const MOST_DISKS: usize = 64;
/// Those of them that are on bus 0.
const ON_BUS_0: usize = 16;

fn start<'case>(case: &'case Case, spec: &VmSpec) -> (Vm<'case>, Console) {
    let vm = Vm::start(case, "", spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    (vm, console)
}

/// A guest with so many disks, `d0` to `dN`, which it calls `vda` and so on.
fn with_disks(case: &Case, mut spec: VmSpec, count: usize) -> VmSpec {
    for number in 0..count {
        let name = format!("d{number}");
        let image = case.image(&name, Format::Raw, 1).expect("image");
        spec = spec.with_disk(Disk::new(&name, Format::Raw, &image).with("queues", 1));
    }
    spec
}

/// The PCI buses that the guest knows.
fn buses(console: &mut Console) -> String {
    let buses = console.run("echo $(ls /sys/class/pci_bus)", 30);
    buses.expect("the buses").trim().to_owned()
}

/// Waits in the guest until a disk exists, or is gone.
fn wait_for(console: &mut Console, disk: &str, there: bool) {
    let test = if there { "!" } else { "" };
    console
        .run(
            &format!("while {test} test -b /dev/{disk}; do usleep 50000; done"),
            60,
        )
        .expect("the guest notices");
}

fn attach(vm: &Vm<'_>, name: &str, format: Format, path: &str) {
    vm.ctl_with(
        "attach",
        &format!("--path {path} --format {format} --name {name}"),
    )
    .expect("attach");
}

fn phase(vm: &Vm<'_>, disk: &str) -> String {
    let status = vm.disk(disk).expect("the disk's status");
    status["phase"]
        .as_str()
        .unwrap_or_default()
        .trim_start_matches("ATTACHMENT_PHASE_")
        .to_owned()
}

#[rstest]
#[case(Kernel::Cloud612)]
#[case(Kernel::Cloud61)]
fn a_disk_is_attached_used_detached_and_attached_again(#[case] kernel: Kernel) {
    let case = Case::new("plug").expect("node");
    let (vm, mut console) = start(&case, &case.storage_guest(kernel).expect("guest"));
    let mut slots = Vec::new();
    for (round, format) in [Format::Raw, Format::Qcow2, Format::Raw].into_iter().enumerate() {
        let image = case.image(&format!("data-{round}"), format, 8).expect("image");
        attach(&vm, "data", format, &image);
        wait_for(&mut console, "vda", true);
        assert_eq!(phase(&vm, "data"), "ATTACHED");
        slots.push(vm.disk("data").expect("status")["pciSlot"].to_string());
        console
            .run(
                "fio --name=v --filename=/dev/vda --direct=1 --rw=randwrite --bs=4k --size=2m --verify=crc32c --minimal \
                 >/dev/null && yes vmmd | head -c 1048576 >/dev/vda && sync",
                120,
            )
            .expect("it works");
        vm.ctl_with("detach", "data --timeout 60s").expect("detach");
        wait_for(&mut console, "vda", false);
        assert!(vm.disk("data").is_err(), "it is gone from the status");
        assert_eq!(
            vm.get().expect("the VM")["spec"]["disks"]
                .as_array()
                .map_or(0, Vec::len),
            0
        );
        let first = format!(
            "qemu-img dd -O raw -f {format} bs=5 count=1 if={image} of={image}.first && head -c 4 {image}.first"
        );
        assert_eq!(case.node().sh(&first).expect("read the image").trim(), "vmmd");
        // No process has the image open or locked.
        case.node()
            .sh(&format!(
                "! find /proc/[0-9]*/fd -lname {image} 2>/dev/null | grep . && rm {image}"
            ))
            .expect("nobody uses it");
    }
    assert!(
        slots.iter().all(|slot| *slot == slots[0]),
        "the slot is used again: {slots:?}"
    );
    let log = console
        .run("dmesg | grep -E 'BUG:|Oops' || true", 30)
        .expect("dmesg");
    assert_eq!(log.trim(), "");
}

#[test]
fn a_disk_that_was_attached_is_there_after_a_restart_and_a_reset() {
    let case = Case::new("plug-stay").expect("node");
    let guest = case.storage_guest(Kernel::Cloud612).expect("guest");
    let (vm, mut console) = start(&case, &with_disks(&case, guest, ON_BUS_0 - 1));
    // The last one of bus 0, and the first of bus 1, which comes with it.
    for (name, device) in [("data", "vdp"), ("more", "vdq")] {
        let image = case.image(name, Format::Raw, 8).expect("image");
        attach(&vm, name, Format::Raw, &image);
        wait_for(&mut console, device, true);
    }
    let both = "test -b /dev/vdp && test -b /dev/vdq";
    let slots = || ["data", "more"].map(|disk| vm.disk(disk).expect("status")["pciSlot"].clone());
    let before = slots();
    console.type_line("reboot").expect("type");
    console.until("GUEST-READY", BOOT).expect("after a reset");
    console.run(both, 30).expect("they are there after a reset");
    assert_eq!(buses(&mut console), "0000:00 0000:01");
    vm.ctl("restart --force").expect("restart");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("after a restart");
    console.run(both, 30).expect("they are there after a restart");
    assert_eq!(slots(), before);
    for (name, device) in [("data", "vdp"), ("more", "vdq")] {
        vm.ctl_with("detach", &format!("{name} --timeout 60s"))
            .expect("detach");
        wait_for(&mut console, device, false);
    }
}

#[rstest]
fn a_further_bus_comes_with_its_first_disk(
    #[values(Kernel::Cloud510, Kernel::Cloud61, Kernel::Generic61, Kernel::Generic612)] kernel: Kernel,
) {
    let case = Case::new("plug-bus").expect("node");
    let guest = VmSpec::busybox(kernel).cmdline(kernel.arguments());
    let (vm, mut console) = start(&case, &with_disks(&case, guest, ON_BUS_0));
    assert_eq!(buses(&mut console), "0000:00");
    let image = case.image("data", Format::Raw, 8).expect("image");
    for _ in 0..2 {
        attach(&vm, "data", Format::Raw, &image);
        wait_for(&mut console, "vdq", true);
        assert_eq!(buses(&mut console), "0000:00 0000:01");
        let write = "dd if=/dev/zero of=/dev/vdq bs=64k count=8 2>/dev/null && sync";
        console.run(write, 60).expect("it works");
        vm.ctl_with("detach", "data --timeout 60s").expect("detach");
        wait_for(&mut console, "vdq", false);
    }
    // The bus outlives its disk.
    assert_eq!(buses(&mut console), "0000:00 0000:01");
    let log = console.run(
        "dmesg | grep -E 'BUG:|Oops|ACPI.*(Error|error)|enumerat|not claimed' || true",
        30,
    );
    assert_eq!(log.expect("dmesg").trim(), "");
}

#[test]
fn disks_are_attached_until_the_slots_are_used_up_and_one_more_is_refused() {
    let case = Case::new("plug-all").expect("node");
    let (vm, mut console) = start(&case, &case.storage_guest(Kernel::Cloud612).expect("guest"));
    let folder = case.folder().expect("folder");
    let attach = |first: usize, last: usize| {
        let output = case.node().ssh(&format!(
            "cd {folder}; for i in $(seq {first} {last}); do truncate -s 1M d$i.raw; \
             vmmctl attach {} --path {folder}/d$i.raw --format raw --name d$i --queues 1 >/dev/null || exit; echo d$i; done",
            vm.name()
        ));
        output.expect("ssh")
    };
    let output = attach(0, MOST_DISKS);
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(matches!(output.status.code(), Some(EXHAUSTED | 6)), "{text}");
    assert!(output.stderr.starts_with("error: "), "{text}");
    // On all three buses.
    assert_eq!(output.stdout.lines().count(), MOST_DISKS, "{text}");
    let wait_for_disks = |console: &mut Console, count: usize| {
        let there = "ls -d /sys/block/vd* 2>/dev/null | wc -l";
        console
            .run(
                &format!("until [ $({there}) = {count} ]; do usleep 50000; done"),
                120,
            )
            .expect("the guest has so many disks");
    };
    wait_for_disks(&mut console, MOST_DISKS);
    // Each ninth is on all three buses too.
    let every = if long() { 1 } else { 9 };
    let gone: Vec<String> = (0..MOST_DISKS)
        .step_by(every)
        .map(|disk| format!("d{disk}"))
        .collect();
    case.node()
        .sh(&format!(
            "for disk in {}; do vmmctl detach {} $disk --timeout 60s >/dev/null || exit; done",
            gone.join(" "),
            vm.name()
        ))
        .expect("detach");
    wait_for_disks(&mut console, MOST_DISKS - gone.len());
    // Their slots are free again.
    let again = attach(MOST_DISKS, MOST_DISKS);
    assert!(again.success(), "{}", again.stderr);
    wait_for_disks(&mut console, MOST_DISKS - gone.len() + 1);
}

#[test]
fn a_guest_that_ignores_the_eject_keeps_its_disk_until_it_is_taken_by_force() {
    let case = Case::new("plug-deaf").expect("node");
    let image = case.image("data", Format::Raw, 8).expect("image");
    let other = case.image("other", Format::Raw, 8).expect("image");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .cmdline("acpiphp.disable=1")
        .with_disk(Disk::new("data", Format::Raw, &image))
        .with_disk(Disk::new("other", Format::Raw, &other));
    let (vm, mut console) = start(&case, &spec);
    let write = "dd if=/dev/zero of=/dev/vda oflag=direct bs=64k count=8 2>/dev/null";
    console.run(write, 30).expect("it works");
    let output = vm.try_ctl_with("detach", "data --timeout 3s").expect("ssh");
    refused(&output, TIMEOUT, &["data"]);
    assert_eq!(phase(&vm, "data"), "ATTACHED");
    assert_ne!(
        vm.disk("data").expect("status")["message"]
            .as_str()
            .unwrap_or_default(),
        ""
    );
    console.run(write, 30).expect("it still works");

    vm.ctl_with("detach", "data --timeout 2s --force")
        .expect("by force");
    assert!(vm.disk("data").is_err(), "it is gone");
    // Requests to the removed disk must not block the guest forever, although its driver may wait.
    console
        .run(
            "dd if=/dev/zero of=/dev/vdb oflag=direct bs=64k count=8 2>/dev/null",
            60,
        )
        .expect("the other disk works");
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
    case.node().sh(&format!("rm {image}")).expect("nobody uses it");
    let log = console
        .run("dmesg | grep -E 'BUG:|Oops' || true", 30)
        .expect("dmesg");
    assert_eq!(log.trim(), "");
}

#[test]
fn a_disk_of_a_stopped_vm_waits_for_its_next_start() {
    let case = Case::new("plug-later").expect("node");
    let vm = Vm::create(&case, "", &case.storage_guest(Kernel::Cloud612).expect("guest")).expect("create");
    let image = case.image("data", Format::Qcow2, 8).expect("image");
    attach(&vm, "data", Format::Qcow2, &image);
    assert_eq!(phase(&vm, "data"), "PENDING");
    attach(&vm, "data", Format::Qcow2, &image);
    vm.ctl("start").expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console.run("test -b /dev/vda", 30).expect("it is there");
    assert_eq!(phase(&vm, "data"), "ATTACHED");
    vm.ctl("stop --force").expect("stop");
    vm.ctl_with("detach", "data").expect("detach");
    assert!(vm.disk("data").is_err());
}
