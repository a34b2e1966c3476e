//! Properties of a disk that a guest sees: block size, serial, write protection; and ISO images.

use rstest::rstest;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::Vm;

#[rstest]
#[case(4096)]
#[case::nightly(512)]
fn blocks_topology_and_serial_are_in_the_guests_sysfs(#[case] block: u32) {
    let case = Case::new("blk-topology");
    let image = case.image("data", Format::Raw, 16);
    let disk = Disk::new("data", Format::Raw, &image)
        .with("logicalBlockBytes", block)
        .with("serial", "VMMD-0123456789-ABCD");
    // A disk without a serial has its name as the serial.
    let plain = Disk::new("plain", Format::Qcow2, &case.image("plain", Format::Qcow2, 16));
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .with_disk(disk)
        .with_disk(plain);
    let (_vm, mut console) = Vm::boot(&case, "", &spec.cores(2));
    let queues = console.run("ls -d /sys/block/vda/mq/* | wc -l");
    assert_eq!(queues.trim(), "2", "as many as vCPUs when nothing is said");
    let mut read = |file: &str| {
        let text = console.run(&format!("cat /sys/block/{file}"));
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
    console.run(&write(block));
    console.run(&format!("! {}", write(block / 2)));
}

#[test]
fn a_read_only_disk_reads_and_is_never_written_to() {
    let case = Case::new("blk-ro");
    let node = case.node();
    let mut spec = case.storage_guest(Kernel::Cloud612);
    let mut images = Vec::new();
    for format in [Format::Raw, Format::Qcow2] {
        let image = case.image("data", format, 8);
        let options = format!("-f {format}");
        node.sh(&format!(
            "qemu-io {options} -c 'write -P 0x76 0 8M' {image} >/dev/null && cp {image} {image}.before"
        ));
        spec = spec.with_disk(Disk::new(&format.to_string(), format, &image).with("readOnly", true));
        images.push(image);
    }
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    for disk in ["vda", "vdb"] {
        let only = console.run(&format!("cat /sys/block/{disk}/ro"));
        assert_eq!(only.trim(), "1");
        console.run(&format!(
            "! dd if=/dev/zero of=/dev/{disk} bs=64k count=1 oflag=direct 2>/dev/null"
        ));
        console.run(&format!("! /tools/blkdiscard -f /dev/{disk} 2>/dev/null"));
        let count = console.run(&format!("tr -d v </dev/{disk} | wc -c"));
        assert_eq!(count.trim(), "0", "all of it is read as it was written");
    }
    vm.ctl("stop --force");
    for image in images {
        node.sh(&format!("cmp {image} {image}.before"));
    }
}

#[test]
fn an_iso_image_is_mounted_and_what_is_none_is_refused() {
    let case = Case::new("blk-iso");
    let (node, folder) = (case.node(), case.folder());
    let iso = format!("{folder}/seed.iso");
    node.sh(&format!(
        "mkdir {folder}/files && echo hello-from-the-iso >{folder}/files/meta-data && \
         genisoimage -quiet -V CIDATA -r -o {iso} {folder}/files"
    ));
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .with_disk(Disk::iso("seed", &iso));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let text =
        console.run("cat /sys/block/vda/ro && mount -t iso9660 -o ro /dev/vda /mnt && cat /mnt/meta-data");
    assert_eq!(text.trim(), "1\nhello-from-the-iso");
    drop(vm);

    let image = case.image("no", Format::Raw, 1);
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .with_disk(Disk::iso("seed", &image));
    let vm = Vm::create(&case, "-no", &spec);
    let output = vm.try_ctl("start");
    refused(&output, None, &["ISO"]);
}
