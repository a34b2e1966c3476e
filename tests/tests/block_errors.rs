//! Errors of the node's storage: no space, a broken device. The guest receives the error, or waits
//! until the storage is repaired. No other component is affected.

use rstest::rstest;
use serde_json::Value;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node};

/// A small file system in the node; taken down with the case's folder.
struct SmallFs<'node> {
    node: &'node Node,
    path: String,
}

impl<'node> SmallFs<'node> {
    /// ext4 of `mib` MiB on a loop device.
    fn ext4(case: &'node Case, mib: u64) -> Self {
        let path = format!("{}/small", case.folder().expect("folder"));
        case.node()
            .sh(&format!(
                "truncate -s {mib}M {path}.fs && mkfs.ext4 -q -O ^has_journal -m 0 {path}.fs && mkdir {path} && \
                 mount -o loop {path}.fs {path}"
            ))
            .expect("a small file system");
        SmallFs {
            node: case.node(),
            path,
        }
    }
}

impl Drop for SmallFs<'_> {
    fn drop(&mut self) {
        let _ = self.node.ssh(&format!("umount -l {}", self.path));
    }
}

/// A device-mapper device with an error in its middle; removed when dropped.
struct Broken<'node> {
    node: &'node Node,
    name: String,
    file: String,
}

impl<'node> Broken<'node> {
    /// A disk of 16 MiB. Reads and writes of the 4 MiB from offset 8 MiB on fail.
    fn new(case: &'node Case) -> Self {
        let file = case.image("broken", Format::Raw, 16).expect("image");
        let device = Broken {
            node: case.node(),
            name: case.name().to_owned(),
            file,
        };
        device
            .node
            .sh(&format!(
                "loop=$(losetup --direct-io=on -f --show {file}) && printf '0 16384 linear %s 0\\n16384 8192 error\\n24576 8192 linear %s 24576\\n' \
                 $loop $loop | dmsetup create {name}",
                file = device.file,
                name = device.name
            ))
            .expect("a broken device");
        device
    }

    fn path(&self) -> String {
        format!("/dev/mapper/{}", self.name)
    }

    fn mend(&self) {
        self.node
            .sh(&format!(
                "loop=$(losetup -j {file} -O NAME -n) && echo \"0 32768 linear $loop 0\" | dmsetup load {name} && \
                 dmsetup suspend {name} && dmsetup resume {name}",
                file = self.file,
                name = self.name
            ))
            .expect("mend it");
    }
}

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        let _ = self.node.ssh(&format!(
            "dmsetup remove --force {}; losetup -d $(losetup -j {} -O NAME -n)",
            self.name, self.file
        ));
    }
}

fn start<'case>(case: &'case Case, spec: &VmSpec) -> (Vm<'case>, Console) {
    let vm = Vm::start(case, "", spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    (vm, console)
}

fn errors(vm: &Vm<'_>, disk: &str, operation: &str) -> u64 {
    let stats = vm.disk_stats(disk).expect("counters");
    let errors = stats[operation]["errors"].as_str().unwrap_or("0");
    errors.parse().expect("a number")
}

fn block_devices_ready(vm: &Vm<'_>) -> Value {
    let vm = vm.get().expect("the VM");
    let conditions = vm.pointer("/status/conditions").and_then(Value::as_array);
    let mut conditions = conditions.into_iter().flatten();
    conditions
        .find(|condition| condition["type"] == "BlockDevicesReady")
        .cloned()
        .unwrap_or_default()
}

fn watch(vm: &Vm<'_>) -> vmmd_tests::node::Stream {
    vm.node()
        .stream(&format!("exec vmmctl get vm {} -w -o json", vm.name()))
        .expect("watch")
}

/// Waits until the VM is paused because of a disk, and returns it.
fn paused(vm: &Vm<'_>) -> Value {
    watch(vm)
        .until("\"VM_PHASE_PAUSED\"", Deadline::seconds(120))
        .expect("it is paused");
    let got = vm.get().expect("the VM");
    assert_eq!(got["status"]["reason"], "DiskError", "{got}");
    let message = got["status"]["message"].as_str().unwrap_or_default();
    assert!(!message.contains("os error"), "{message}");
    let condition = block_devices_ready(vm);
    assert_eq!(condition["status"], "CONDITION_STATUS_FALSE", "{condition}");
    got
}

#[test]
fn a_disk_on_a_full_file_system_gives_the_guest_errors_and_harms_nothing_else() {
    let case = Case::new("blk-full").expect("node");
    let node = case.node();
    let small = SmallFs::ext4(&case, 24);
    let full = format!("{}/full.raw", small.path);
    let full_qcow2 = format!("{}/full.qcow2", small.path);
    let other = case.image("other", Format::Qcow2, 16).expect("image");
    node.sh(&format!(
        "truncate -s 64M {full} && qemu-img create -q -f qcow2 {full_qcow2} 64M"
    ))
    .expect("disks larger than their file system");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(Disk::new("full", Format::Raw, &full))
        .with_disk(Disk::new("other", Format::Qcow2, &other))
        .with_disk(Disk::new("full-qcow2", Format::Qcow2, &full_qcow2));
    let (vm, mut console) = start(&case, &spec);
    let pid = vm.pid().expect("pid");
    console
        .run(
            "! dd if=/dev/zero of=/dev/vda oflag=direct bs=1M count=64 2>/tmp/dd && cat /tmp/dd",
            120,
        )
        .expect("the write fails");
    let log = console.run("dmesg | tail -n 20", 30).expect("dmesg");
    assert!(log.contains("vda"), "{log}");
    console
        .run("fio --name=v --filename=/dev/vdb --direct=1 --rw=randwrite --bs=4k --size=4m --verify=crc32c --minimal >/dev/null", 120)
        .expect("the other disk works");
    console
        .run(
            "dd if=/dev/vda of=/dev/null iflag=direct bs=1M count=8 2>/dev/null",
            60,
        )
        .expect("what was written can be read");
    assert_eq!(
        (vm.phase().expect("phase"), vm.pid().expect("pid")),
        ("RUNNING".into(), pid)
    );
    assert!(errors(&vm, "full", "write") > 0);
    assert_eq!(errors(&vm, "other", "write"), 0);
    let ready = block_devices_ready(&vm);
    assert_eq!(ready["status"], "CONDITION_STATUS_FALSE", "{ready}");
    let message = ready["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("full") && message.contains("No space left"),
        "{ready}"
    );

    // The same of a qcow2, which stays sound.
    console
        .run(
            "! dd if=/dev/zero of=/dev/vdc oflag=direct bs=1M count=64 2>/dev/null",
            120,
        )
        .expect("the write fails");
    assert!(errors(&vm, "full-qcow2", "write") > 0);
    vm.ctl("stop --force").expect("stop");
    node.check_qcow2(&full_qcow2).expect("the image is sound");
}

#[test]
fn a_broken_device_gives_errors_for_what_is_broken_only() {
    let case = Case::new("blk-broken").expect("node");
    let broken = Broken::new(&case);
    let other = case.image("other", Format::Raw, 16).expect("image");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(Disk::new("broken", Format::Raw, &broken.path()))
        .with_disk(Disk::new("other", Format::Raw, &other));
    let (vm, mut console) = start(&case, &spec);
    let part = |direction: &str, first: u32| {
        let (from, to) = match direction {
            "read" => ("if=/dev/vda iflag=direct of=/dev/null", "skip"),
            _ => ("if=/dev/zero of=/dev/vda oflag=direct", "seek"),
        };
        format!("dd {from} bs=1M count=4 {to}={first} 2>/dev/null")
    };
    for direction in ["read", "write"] {
        console
            .run(&part(direction, 4), 60)
            .expect("before the broken part");
        console.run(&part(direction, 12), 60).expect("behind it");
        console
            .run(&format!("! {}", part(direction, 8)), 60)
            .expect("the broken part");
    }
    console
        .run(
            "dd if=/dev/zero of=/dev/vdb oflag=direct bs=1M count=16 2>/dev/null",
            60,
        )
        .expect("the other disk works");
    for direction in ["read", "write"] {
        assert!(errors(&vm, "broken", direction) > 0, "{direction}");
        assert_eq!(errors(&vm, "other", direction), 0, "{direction}");
    }
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
}

#[rstest]
fn with_on_error_pause_a_vm_waits_for_space_and_loses_nothing(
    #[values(Format::Raw, Format::Qcow2)] format: Format,
) {
    let case = Case::new("blk-wait").expect("node");
    let (node, folder) = (case.node(), case.folder().expect("folder"));
    let blkcheck = case.blkcheck().expect("blkcheck");
    let small = SmallFs::ext4(&case, 64);
    let image = format!("{}/disk", small.path);
    node.sh(&format!(
        "qemu-img create -q -f {format} {image} 40M && fallocate -l 56M {}/ballast",
        small.path
    ))
    .expect("a file system that is nearly full");
    let disk = Disk::new("disk", format, &image).with("onError", "DISK_ERROR_POLICY_PAUSE");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(disk);
    let (vm, mut console) = start(&case, &spec);
    console
        .type_line("blkcheck write /dev/vda --round 1 --operations 200 && echo all-is-$((1 + 1))")
        .expect("type");
    let got = paused(&vm);
    let message = got["status"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("disk") && message.contains("No space left"),
        "{message}"
    );
    let stats = vm.disk_stats("disk").expect("counters");
    assert_ne!(stats["held"].as_str().unwrap_or("0"), "0", "{stats}");

    // Without space a resumed VM pauses again; with space it continues.
    vm.ctl("resume").expect("resume");
    paused(&vm);
    node.sh(&format!("rm {}/ballast", small.path)).expect("space");
    vm.ctl("resume").expect("resume");
    console.until("all-is-2", 200).expect("the guest saw no error");
    assert_eq!(vm.phase().expect("phase"), "RUNNING");
    vm.ctl("stop --force").expect("stop");
    if format == Format::Qcow2 {
        assert_eq!(node.check_qcow2(&image).expect("the image is sound"), 0, "leaks");
    }
    node.sh(&format!(
        "qemu-img convert -f {format} -O raw {image} {folder}/converted && \
         {blkcheck} verify {folder}/converted --state {folder}/state --round 1 --confirmed 200,200,200,200"
    ))
    .expect("every write is there");
}

#[test]
fn with_on_error_pause_a_vm_waits_for_a_device_to_be_mended() {
    let case = Case::new("blk-mend").expect("node");
    let blkcheck = case.blkcheck().expect("blkcheck");
    let broken = Broken::new(&case);
    let disk = Disk::new("disk", Format::Raw, &broken.path()).with("onError", "DISK_ERROR_POLICY_PAUSE");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(disk);
    let (vm, mut console) = start(&case, &spec);
    console
        .type_line("blkcheck write /dev/vda --round 1 --operations 60 && echo all-is-$((1 + 1))")
        .expect("type");
    paused(&vm);
    broken.mend();
    vm.ctl("resume").expect("resume");
    console.until("all-is-2", 200).expect("the guest saw no error");
    vm.ctl("stop --force").expect("stop");
    case.node()
        .sh(&format!(
            "{blkcheck} verify {} --state {}/state --round 1 --confirmed 60,60,60,60",
            broken.path(),
            case.folder().expect("folder")
        ))
        .expect("every write is there");
}
