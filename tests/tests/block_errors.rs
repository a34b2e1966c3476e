//! Errors of the node's storage: no space, a broken device. The guest receives the error, or waits
//! until the storage is repaired. No other component is affected.

use rstest::rstest;
use serde_json::Value;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::Vm;
use vmmd_tests::wait::Deadline;

/// Mounts an ext4 of `mib` MiB on a loop device in the node: its path. It is taken down with the case's folder.
fn small_file_system(case: &Case, mib: u64) -> String {
    let path = format!("{}/small", case.folder());
    case.node().sh(&format!(
        "truncate -s {mib}M {path}.fs && mkfs.ext4 -q -O ^has_journal -m 0 {path}.fs && mkdir {path} && \
         mount -o loop {path}.fs {path}"
    ));
    case.at_end(format!("umount -l {path}"));
    path
}

/// Makes a disk of 16 MiB in the node: its path. Reads and writes of the 4 MiB from offset 8 MiB on fail.
fn broken_device(case: &Case) -> String {
    let (file, name) = (case.image("broken", Format::Raw, 16), case.name());
    case.node().sh(&format!(
        "loop=$(losetup --direct-io=on -f --show {file}) && printf '0 16384 linear %s 0\\n16384 8192 error\\n24576 8192 linear %s 24576\\n' \
         $loop $loop | dmsetup create {name}"
    ));
    case.at_end(format!(
        "dmsetup remove --force {name}; losetup -d $(losetup -j {file} -O NAME -n)"
    ));
    format!("/dev/mapper/{name}")
}

fn errors(vm: &Vm<'_>, disk: &str, operation: &str) -> u64 {
    let stats = vm.disk_stats(disk);
    let errors = stats[operation]["errors"].as_str().unwrap_or("0");
    errors.parse().expect("a number")
}

fn block_devices_ready(vm: &Vm<'_>) -> Value {
    let vm = vm.get();
    let conditions = vm.pointer("/status/conditions").and_then(Value::as_array);
    let mut conditions = conditions.into_iter().flatten();
    conditions
        .find(|condition| condition["type"] == "BlockDevicesReady")
        .cloned()
        .unwrap_or_default()
}

/// Waits until the VM is paused because of a disk, and returns it.
fn paused(vm: &Vm<'_>) -> Value {
    vm.watch().until("\"VM_PHASE_PAUSED\"", Deadline::seconds(120));
    let got = vm.get();
    assert_eq!(got["status"]["reason"], "DiskError", "{got}");
    let message = got["status"]["message"].as_str().unwrap_or_default();
    assert!(!message.contains("os error"), "{message}");
    let condition = block_devices_ready(vm);
    assert_eq!(condition["status"], "CONDITION_STATUS_FALSE", "{condition}");
    got
}

#[test]
fn a_broken_device_gives_errors_for_what_is_broken_only() {
    let case = Case::new("blk-broken");
    let broken = broken_device(&case);
    let other = case.image("other", Format::Raw, 16);
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .with_disk(Disk::new("broken", Format::Raw, &broken))
        .with_disk(Disk::new("other", Format::Raw, &other));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let part = |direction: &str, first: u32| {
        let (from, to) = match direction {
            "read" => ("if=/dev/vda iflag=direct of=/dev/null", "skip"),
            _ => ("if=/dev/zero of=/dev/vda oflag=direct", "seek"),
        };
        format!("dd {from} bs=1M count=4 {to}={first} 2>/dev/null")
    };
    for direction in ["read", "write"] {
        console.run(&part(direction, 4));
        console.run(&part(direction, 12));
        console.run(&format!("! {}", part(direction, 8)));
    }
    console.run("dd if=/dev/zero of=/dev/vdb oflag=direct bs=1M count=16 2>/dev/null");
    for direction in ["read", "write"] {
        assert!(errors(&vm, "broken", direction) > 0, "{direction}");
        assert_eq!(errors(&vm, "other", direction), 0, "{direction}");
    }
    assert_eq!(vm.phase(), "RUNNING");
}

#[rstest]
#[case(Format::Qcow2)]
#[case::nightly(Format::Raw)]
fn with_on_error_pause_a_vm_waits_for_space_and_loses_nothing(#[case] format: Format) {
    let case = Case::new("blk-wait");
    let (node, folder) = (case.node(), case.folder());
    let blkcheck = case.blkcheck();
    let small = small_file_system(&case, 64);
    let image = format!("{small}/disk");
    node.sh(&format!(
        "qemu-img create -q -f {format} {image} 40M && fallocate -l 56M {small}/ballast"
    ));
    let disk = Disk::new("disk", format, &image).with("onError", "DISK_ERROR_POLICY_PAUSE");
    let spec = case.storage_guest(Kernel::Cloud612).with_disk(disk);
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    console.type_line("blkcheck write /dev/vda --round 1 --operations 200 && echo all-is-$((1 + 1))");
    let got = paused(&vm);
    let message = got["status"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("disk") && message.contains("No space left"),
        "{message}"
    );
    let stats = vm.disk_stats("disk");
    assert_ne!(stats["held"].as_str().unwrap_or("0"), "0", "{stats}");

    // Without space a resumed VM pauses again; with space it continues.
    vm.ctl("resume");
    paused(&vm);
    node.sh(&format!("rm {small}/ballast"));
    vm.ctl("resume");
    console.until("all-is-2", 200);
    assert_eq!(vm.phase(), "RUNNING");
    vm.ctl("stop --force");
    if format == Format::Qcow2 {
        assert_eq!(node.check_qcow2(&image).expect("the image is sound"), 0, "leaks");
    }
    node.sh(&format!(
        "qemu-img convert -f {format} -O raw {image} {folder}/converted && \
         {blkcheck} verify {folder}/converted --state {folder}/state --round 1 --confirmed 200,200,200,200"
    ));
}
