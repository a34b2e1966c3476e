//! Properties of a disk that a guest sees: block size, serial, write protection; and ISO images.

use rstest::rstest;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::{BOOT, Vm};

#[rstest]
#[case(512)]
#[case(4096)]
fn blocks_topology_and_serial_are_in_the_guests_sysfs(#[case] block: u32) {
    let case = Case::new("blk-topology").expect("node");
    let image = case.image("data", Format::Raw, 16).expect("image");
    let disk = Disk::new("data", Format::Raw, &image)
        .with("logicalBlockBytes", block)
        .with("serial", "VMMD-0123456789-ABCD");
    // A disk without a serial has its name as the serial.
    let plain = Disk::new(
        "plain",
        Format::Qcow2,
        &case.image("plain", Format::Qcow2, 16).expect("image"),
    );
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(disk)
        .with_disk(plain);
    let vm = Vm::start(&case, "", &spec.cores(2)).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    let queues = console
        .run("ls -d /sys/block/vda/mq/* | wc -l", 30)
        .expect("queues");
    assert_eq!(queues.trim(), "2", "as many as vCPUs when nothing is said");
    let mut read = |file: &str| {
        let text = console.run(&format!("cat /sys/block/{file}"), 30).expect(file);
        text.trim().to_owned()
    };
    assert_eq!(read("vda/serial"), "VMMD-0123456789-ABCD");
    assert_eq!(read("vdb/serial"), "plain");
    assert_eq!(read("vda/queue/logical_block_size"), block.to_string());
    assert_eq!(read("vdb/queue/logical_block_size"), "512");
    let mut number = |file: &str| read(file).parse::<u64>().expect("a number");
    let physical = number("vda/queue/physical_block_size");
    assert!(
        physical >= u64::from(block) && physical.is_power_of_two(),
        "physical {physical}"
    );
    let minimum = number("vda/queue/minimum_io_size");
    assert!(
        minimum >= physical && minimum.is_multiple_of(physical),
        "minimum {minimum}"
    );
    let optimal = number("vda/queue/optimal_io_size");
    assert!(optimal.is_multiple_of(physical), "optimal {optimal}");
    assert_eq!(number("vda/size"), 16 << 11);
    // A direct write of less than a block fails; a direct write of a block succeeds.
    let write = |bytes: u32| {
        format!(
            "fio --name=w --filename=/dev/vda --direct=1 --rw=write --bs={bytes} --size={bytes} --minimal >/dev/null 2>&1"
        )
    };
    console.run(&write(block), 30).expect("a block");
    console
        .run(&format!("! {}", write(block / 2)), 30)
        .expect("half a block is refused");
}

#[test]
fn a_read_only_disk_reads_and_is_never_written_to() {
    let case = Case::new("blk-ro").expect("node");
    let node = case.node();
    let mut spec = case.storage_guest(Kernel::Cloud612).expect("guest");
    let mut images = Vec::new();
    for format in [Format::Raw, Format::Qcow2] {
        let image = case.image("data", format, 8).expect("image");
        let options = format!("-f {format}");
        node.sh(&format!(
            "qemu-io {options} -c 'write -P 0x76 0 8M' {image} >/dev/null && cp {image} {image}.before"
        ))
        .expect("fill");
        spec = spec.with_disk(Disk::new(&format.to_string(), format, &image).with("readOnly", true));
        images.push(image);
    }
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    for disk in ["vda", "vdb"] {
        let only = console.run(&format!("cat /sys/block/{disk}/ro"), 30).expect("ro");
        assert_eq!(only.trim(), "1");
        console
            .run(
                &format!("! dd if=/dev/zero of=/dev/{disk} bs=64k count=1 oflag=direct 2>/dev/null"),
                30,
            )
            .expect("no write");
        console
            .run(&format!("! /tools/blkdiscard -f /dev/{disk} 2>/dev/null"), 30)
            .expect("no discard");
        let count = console
            .run(&format!("tr -d v </dev/{disk} | wc -c"), 60)
            .expect("read");
        assert_eq!(count.trim(), "0", "all of it is read as it was written");
    }
    vm.ctl("stop --force").expect("stop");
    for image in images {
        node.sh(&format!("cmp {image} {image}.before"))
            .expect("as it was");
    }
}

#[test]
fn an_iso_image_is_mounted_and_what_is_none_is_refused() {
    let case = Case::new("blk-iso").expect("node");
    let (node, folder) = (case.node(), case.folder().expect("folder"));
    let iso = format!("{folder}/seed.iso");
    node.sh(&format!(
        "mkdir {folder}/files && echo hello-from-the-iso >{folder}/files/meta-data && \
         genisoimage -quiet -V CIDATA -r -o {iso} {folder}/files"
    ))
    .expect("an ISO image");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(Disk::iso("seed", &iso));
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    let text = console
        .run(
            "cat /sys/block/vda/ro && mount -t iso9660 -o ro /dev/vda /mnt && cat /mnt/meta-data",
            60,
        )
        .expect("mount");
    assert_eq!(text.trim(), "1\nhello-from-the-iso");
    drop(vm);

    let image = case.image("no", Format::Raw, 1).expect("image");
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(Disk::iso("seed", &image));
    let vm = Vm::create(&case, "-no", &spec).expect("create");
    let output = vm.try_ctl("start").expect("ssh");
    assert!(!output.success(), "{}", output.stdout);
    assert!(
        output.stderr.starts_with("error: ") && output.stderr.contains("ISO"),
        "{}",
        output.stderr
    );
}

#[rstest]
#[case::not_qcow2("truncate -s 1M IMAGE", "qcow2")]
#[case::encrypted(
    "qemu-img create -q -f qcow2 --object secret,id=s,data=x -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 IMAGE 1M",
    "encrypt"
)]
#[case::foreign_backing(
    "qemu-img create -q -f raw IMAGE.base 1M; qemu-img create -q -f qcow2 -b IMAGE.base -F raw IMAGE",
    "backing"
)]
#[case::corrupt(
    "qemu-img create -q -f qcow2 IMAGE 1M; printf '\\000\\000\\000\\000\\000\\000\\000\\002' | dd of=IMAGE bs=1 seek=72 conv=notrunc status=none",
    "corrupt"
)]
fn a_qcow2_that_must_not_be_used_is_refused_with_the_reason(#[case] make: &str, #[case] reason: &str) {
    let case = Case::new("blk-refuse").expect("node");
    let image = format!("{}/image.qcow2", case.folder().expect("folder"));
    case.node().sh(&make.replace("IMAGE", &image)).expect("an image");
    let spec = case.storage_guest(Kernel::Cloud612).expect("guest");
    let spec = spec.with_disk(Disk::new("data", Format::Qcow2, &image));
    let vm = Vm::create(&case, "", &spec).expect("create");
    let output = vm.try_ctl("start").expect("ssh");
    let code = output.status.code().unwrap_or_default();
    assert_ne!(code, 0, "{}", output.stdout);
    refused(&output, code, &["data", reason]);
}
