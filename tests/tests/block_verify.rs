//! What a guest writes to a disk is what it reads, on every format and with several queues, and also when the machine is
//! paused and resumed all the while.

use rstest::rstest;
use vmmd_tests::Case;
use vmmd_tests::node::{Kernel, Stream};
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{BOOT, Vm};
use vmmd_tests::wait::Deadline;

/// Random writes of 512 bytes to 128 KiB by 4 jobs with 32 requests in flight each, which are then read and compared.
const FIO: &str = "fio --name=verify --filename=/dev/vda --direct=1 --ioengine=io_uring --iodepth=32 --numjobs=4 \
                   --size=6m --offset_increment=8m --rw=randwrite --bsrange=512-128k --verify=crc32c --verify_fatal=1 \
                   --group_reporting --minimal >/tmp/fio 2>&1 || { cat /tmp/fio; false; }";

/// Pauses of each VM under test.
const PAUSES: u32 = 20;

/// Pauses and resumes a VM, 200 ms in each state, until there were [`PAUSES`]; prints `PAUSED` then.
fn pauses(vm: &Vm<'_>) -> Stream {
    let script = format!(
        "for i in $(seq {PAUSES}); do vmmctl pause {vm} && sleep 0.2 && vmmctl resume {vm} && sleep 0.2 || exit; done; echo PAUSED",
        vm = vm.name()
    );
    vm.node().stream(&script).expect("the pauses begin")
}

#[rstest]
fn random_writes_read_back_also_while_the_machine_is_paused_and_resumed(
    #[values(Format::Raw, Format::Qcow2)] format: Format,
    #[values(1, 4)] queues: u32,
) {
    let case = Case::new("blk-verify").expect("node");
    let image = case.image("data", format, 32).expect("image");
    let disk = Disk::new("data", format, &image).with("queues", queues);
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .cores(queues)
        .with_disk(disk);
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    let seen = console
        .run("ls -d /sys/block/vda/mq/* | wc -l", 30)
        .expect("queues");
    assert_eq!(seen.trim(), queues.to_string());
    console.run(FIO, 200).expect("what was written is read back");

    // Again and again, as long as there are pauses.
    console
        .type_line(&format!(
            "(while [ ! -e /tmp/paused ]; do {FIO} || exit; done; echo all-is-$((1 + 1)).) &"
        ))
        .expect("type");
    pauses(&vm)
        .until("PAUSED", Deadline::seconds(200))
        .expect("no pause and no resume failed");
    console.type_line("touch /tmp/paused").expect("type");
    console
        .until("all-is-2.", 200)
        .expect("what was written is read back after pauses");

    vm.ctl("stop --force").expect("stop");
    if format == Format::Qcow2 {
        assert_eq!(
            case.node().check_qcow2(&image).expect("the image is sound"),
            0,
            "leaks"
        );
    }
}
