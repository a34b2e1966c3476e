//! Discard: the node frees space that a guest discards. Ranges that the guest zeroes read as
//! zeroes.

use rstest::rstest;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{Console, Vm};

const MIB: u64 = 1 << 20;

/// Bytes that are not zero in a part of the guest's disk, read past its page cache.
fn not_zero(console: &mut Console, first_mib: u64, mib: u64) -> u64 {
    let command = format!(
        "dd if=/dev/vda iflag=direct bs=1M skip={first_mib} count={mib} 2>/dev/null | tr -d '\\0' | wc -c"
    );
    let count = console.run(&command);
    count.trim().parse().expect("a number")
}

#[rstest]
#[case(Format::Qcow2, 4096)]
#[case::nightly(Format::Raw, 512)]
#[case::nightly(Format::Raw, 4096)]
#[case::nightly(Format::Qcow2, 512)]
fn fstrim_and_blkdiscard_free_space_and_zero_ranges(#[case] format: Format, #[case] block: u32) {
    let case = Case::new("blk-trim");
    let node = case.node();
    let image = case.image("data", format, 64);
    let disk = Disk::new("data", format, &image).with("logicalBlockBytes", block);
    let spec = case.storage_guest(Kernel::Cloud612).with_disk(disk);
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    for limit in ["discard_max_bytes", "write_zeroes_max_bytes"] {
        let bytes = console.run(&format!("cat /sys/block/vda/queue/{limit}"));
        assert!(
            bytes.trim().parse::<u64>().expect("a number") >= MIB,
            "{limit}: {bytes}"
        );
    }

    // 24 MiB of a file system's file, then without the file.
    console.run_within(
        "yes vmmd | head -c 1048576 >/tmp/mib && /tools/mkfs.ext4 -q -O ^has_journal /dev/vda && \
             mount -t ext4 /dev/vda /mnt && for i in $(seq 24); do cat /tmp/mib; done >/mnt/file && sync",
        200,
    );
    let full = node.allocated(&image);
    assert!(full >= 24 * MIB, "{full} bytes with the file");
    console.run("rm /mnt/file && sync && /tools/fstrim /mnt && umount /mnt");
    let trimmed = node.allocated(&image);
    assert!(trimmed < 8 * MIB, "{trimmed} bytes after fstrim, {full} before");

    // 8 MiB that are not zero, of which some are zeroed and some discarded.
    console.run(
        "for i in $(seq 0 7); do dd if=/tmp/mib of=/dev/vda oflag=direct bs=1M seek=$i 2>/dev/null || break; done",
    );
    let before = node.allocated(&image);
    console.run("/tools/blkdiscard -z -o 2097152 -l 2097152 /dev/vda");
    for (first, mib, left) in [(1, 1, MIB), (2, 2, 0), (4, 1, MIB)] {
        assert_eq!(
            not_zero(&mut console, first, mib),
            left,
            "bytes at {first} MiB that are not zero"
        );
    }
    // Clusters of a qcow2 may be given back only when the tables that no longer name them are on stable storage.
    console.run(
        "/tools/blkdiscard -o 4194304 -l 4194304 /dev/vda && dd if=/dev/null of=/dev/vda conv=notrunc,fsync 2>/dev/null",
    );
    let after = node.allocated(&image);
    assert!(
        after + 4 * MIB <= before + MIB / 2,
        "{after} bytes after blkdiscard, {before} before"
    );
    // A part of a cluster that was not asked for stays: 64 KiB from the middle of one to the middle of the next.
    console.run("/tools/blkdiscard -z -o 1081344 -l 65536 /dev/vda");
    assert_eq!(
        not_zero(&mut console, 1, 1),
        MIB - 65536,
        "only what was asked for is zero"
    );

    let stats = vm.disk_stats("data");
    let discards = stats["discard"]["requests"]
        .as_str()
        .unwrap_or("0")
        .parse::<u64>()
        .expect("a number");
    assert!(discards >= 3, "{stats}");
    vm.ctl("stop --force");
    if format == Format::Qcow2 {
        node.check_qcow2(&image).expect("the image is sound");
    }
}
