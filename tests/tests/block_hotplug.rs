//! Disks come to a running VM and go again.

use rstest::rstest;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::{Console, Vm, VmSpec};
use vmmd_tests::{Case, long};

/// Exit codes of vmmctl.
const EXHAUSTED: i32 = 9;
const TIMEOUT: i32 = 10;
/// Disks of a VM without NICs.
const MOST_DISKS: usize = 64;
/// Those of them that are on bus 0.
const ON_BUS_0: usize = 13;

/// A guest with so many disks, `d0` to `dN`, which it calls `vda` and so on.
fn with_disks(case: &Case, mut spec: VmSpec, count: usize) -> VmSpec {
    for number in 0..count {
        let name = format!("d{number}");
        let image = case.image(&name, Format::Raw, 1);
        spec = spec.with_disk(Disk::new(&name, Format::Raw, &image).with("queues", 1));
    }
    spec
}

/// The PCI buses that the guest knows.
fn buses(console: &mut Console) -> String {
    let buses = console.run("echo $(ls /sys/class/pci_bus)");
    buses.trim().to_owned()
}

/// Waits in the guest until a disk exists, or is gone.
fn wait_for(console: &mut Console, disk: &str, there: bool) {
    let test = if there { "!" } else { "" };
    console.run(&format!(
        "while {test} test -b /dev/{disk}; do usleep 50000; done"
    ));
}

fn attach(vm: &Vm<'_>, name: &str, format: Format, path: &str) {
    vm.ctl_with(
        "attach",
        &format!("--path {path} --format {format} --name {name}"),
    );
}

fn phase(vm: &Vm<'_>, disk: &str) -> String {
    let status = vm.disk(disk);
    status["phase"]
        .as_str()
        .unwrap_or_default()
        .trim_start_matches("ATTACHMENT_PHASE_")
        .to_owned()
}

#[rstest]
#[case(Kernel::Cloud612)]
#[case::nightly(Kernel::Cloud61)]
fn a_disk_is_attached_used_detached_and_attached_again(#[case] kernel: Kernel) {
    let case = Case::new("plug");
    let (vm, mut console) = Vm::boot(&case, "", &case.storage_guest(kernel));
    let mut slots = Vec::new();
    for (round, format) in [Format::Raw, Format::Qcow2, Format::Raw].into_iter().enumerate() {
        let image = case.image(&format!("data-{round}"), format, 8);
        attach(&vm, "data", format, &image);
        wait_for(&mut console, "vda", true);
        assert_eq!(phase(&vm, "data"), "ATTACHED");
        slots.push(vm.disk("data")["pciSlot"].to_string());
        console.run(
            "fio --name=v --filename=/dev/vda --direct=1 --rw=randwrite --bs=4k --size=2m --verify=crc32c --minimal \
             >/dev/null && yes vmmd | head -c 1048576 >/dev/vda && sync");
        vm.ctl_with("detach", "data --timeout 60s");
        wait_for(&mut console, "vda", false);
        assert!(vm.find_disk("data").is_none(), "it is gone from the status");
        assert_eq!(vm.get()["spec"]["disks"].as_array().map_or(0, Vec::len), 0);
        let first = format!(
            "qemu-img dd -O raw -f {format} bs=5 count=1 if={image} of={image}.first && head -c 4 {image}.first"
        );
        assert_eq!(case.node().sh(&first).trim(), "vmmd");
        // No process has the image open or locked.
        case.node().sh(&format!(
            "! find /proc/[0-9]*/fd -lname {image} 2>/dev/null | grep . && rm {image}"
        ));
    }
    assert!(
        slots.iter().all(|slot| *slot == slots[0]),
        "the slot is used again: {slots:?}"
    );
    let log = console.run("dmesg | grep -E 'BUG:|Oops' || true");
    assert_eq!(log.trim(), "");
}

#[test]
fn attached_disk_is_there_after_a_restart_and_a_reset() {
    let case = Case::new("plug-stay");
    let guest = case.storage_guest(Kernel::Cloud612);
    let (vm, mut console) = Vm::boot(&case, "", &with_disks(&case, guest, ON_BUS_0 - 1));
    // The last one of bus 0, and the first of bus 1, which comes with it.
    for (name, device) in [("data", "vdm"), ("more", "vdn")] {
        let image = case.image(name, Format::Raw, 8);
        attach(&vm, name, Format::Raw, &image);
        wait_for(&mut console, device, true);
    }
    let both = "test -b /dev/vdm && test -b /dev/vdn";
    let slots = || ["data", "more"].map(|disk| vm.disk(disk)["pciSlot"].clone());
    let before = slots();
    console.type_line("reboot");
    console.booted();
    console.run(both);
    assert_eq!(buses(&mut console), "0000:00 0000:01");
    vm.ctl("restart --force");
    let mut console = vm.booted();
    console.run(both);
    assert_eq!(slots(), before);
    for (name, device) in [("data", "vdm"), ("more", "vdn")] {
        vm.ctl_with("detach", &format!("{name} --timeout 60s"));
        wait_for(&mut console, device, false);
    }
}

#[rstest]
#[case(Kernel::Generic612)]
#[case::nightly(Kernel::Cloud510)]
#[case::nightly(Kernel::Cloud61)]
#[case::nightly(Kernel::Generic61)]
fn a_further_bus_comes_with_its_first_disk(#[case] kernel: Kernel) {
    let case = Case::new("plug-bus");
    let guest = VmSpec::busybox(kernel).cmdline(kernel.arguments());
    let (vm, mut console) = Vm::boot(&case, "", &with_disks(&case, guest, ON_BUS_0));
    assert_eq!(buses(&mut console), "0000:00");
    let image = case.image("data", Format::Raw, 8);
    for _ in 0..2 {
        attach(&vm, "data", Format::Raw, &image);
        wait_for(&mut console, "vdn", true);
        assert_eq!(buses(&mut console), "0000:00 0000:01");
        let write = "dd if=/dev/zero of=/dev/vdn bs=64k count=8 2>/dev/null && sync";
        console.run(write);
        vm.ctl_with("detach", "data --timeout 60s");
        wait_for(&mut console, "vdn", false);
    }
    // The bus outlives its disk.
    assert_eq!(buses(&mut console), "0000:00 0000:01");
    let log = console.run("dmesg | grep -E 'BUG:|Oops|ACPI.*(Error|error)|enumerat|not claimed' || true");
    assert_eq!(log.trim(), "");
}

#[test]
fn ignored_eject_keeps_the_disk_until_a_forced_detach() {
    let case = Case::new("plug-deaf");
    let image = case.image("data", Format::Raw, 8);
    let other = case.image("other", Format::Raw, 8);
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .cmdline("acpiphp.disable=1")
        .with_disk(Disk::new("data", Format::Raw, &image))
        .with_disk(Disk::new("other", Format::Raw, &other));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let write = "dd if=/dev/zero of=/dev/vda oflag=direct bs=64k count=8 2>/dev/null";
    console.run(write);
    let output = vm.try_ctl_with("detach", "data --timeout 3s");
    refused(&output, TIMEOUT, &["data"]);
    assert_eq!(phase(&vm, "data"), "ATTACHED");
    assert_ne!(vm.disk("data")["message"].as_str().unwrap_or_default(), "");
    console.run(write);

    vm.ctl_with("detach", "data --timeout 2s --force");
    assert!(vm.find_disk("data").is_none(), "it is gone");
    // Requests to the removed disk must not block the guest forever, although its driver may wait.
    console.run("dd if=/dev/zero of=/dev/vdb oflag=direct bs=64k count=8 2>/dev/null");
    assert_eq!(vm.phase(), "RUNNING");
    case.node().sh(&format!("rm {image}"));
    let log = console.run("dmesg | grep -E 'BUG:|Oops' || true");
    assert_eq!(log.trim(), "");
}

/// Tests that `make nightly` runs and `make test` does not.
mod nightly {
    use super::*;

    #[test]
    fn attach_is_refused_when_all_slots_are_used() {
        let case = Case::new("plug-all");
        let (vm, mut console) = Vm::boot(&case, "", &case.storage_guest(Kernel::Cloud612));
        let folder = case.folder();
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
            console.run(&format!("until [ $({there}) = {count} ]; do usleep 50000; done"));
        };
        wait_for_disks(&mut console, MOST_DISKS);
        // Each ninth is on all three buses too.
        let every = if long() { 1 } else { 9 };
        let gone: Vec<String> = (0..MOST_DISKS)
            .step_by(every)
            .map(|disk| format!("d{disk}"))
            .collect();
        case.node().sh(&format!(
            "for disk in {}; do vmmctl detach {} $disk --timeout 60s >/dev/null || exit; done",
            gone.join(" "),
            vm.name()
        ));
        wait_for_disks(&mut console, MOST_DISKS - gone.len());
        // Their slots are free again.
        let again = attach(MOST_DISKS, MOST_DISKS);
        assert!(again.success(), "{}", again.stderr);
        wait_for_disks(&mut console, MOST_DISKS - gone.len() + 1);
    }
}
