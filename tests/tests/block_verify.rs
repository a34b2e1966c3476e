//! A guest reads back the data that it writes to a disk: on every format, with several queues, and
//! also while the machine is paused and resumed repeatedly.

use rstest::rstest;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::{BOOT, Vm};
use vmmd_tests::wait::Deadline;
use vmmd_tests::{Case, Node};

/// Random writes of 512 bytes to 128 KiB by 4 jobs with 32 requests in flight each, which are then read and compared.
const FIO: &str = "fio --name=verify --filename=/dev/vda --direct=1 --ioengine=io_uring --iodepth=32 --numjobs=4 \
                   --size=6m --offset_increment=8m --rw=randwrite --bsrange=512-128k --verify=crc32c --verify_fatal=1 \
                   --group_reporting --minimal >/tmp/fio 2>&1 || { cat /tmp/fio; false; }";

/// Pauses and resumes a VM every 200 ms until it is ended.
struct Pauses<'node> {
    node: &'node Node,
    stream: vmmd_tests::node::Stream,
    stop: String,
}

impl<'node> Pauses<'node> {
    fn of(vm: &Vm<'_>, node: &'node Node, folder: &str) -> Self {
        let stop = format!("{folder}/stop");
        let stream = node
            .stream(&format!(
                "n=0; while [ ! -e {stop} ]; do vmmctl pause {vm} && sleep 0.2 && vmmctl resume {vm} && sleep 0.2 || exit; \
                 n=$((n + 1)); echo paused $n times; done; echo \"PAUSES=$n;\"",
                vm = vm.name()
            ))
            .expect("the pauses begin");
        Pauses { node, stream, stop }
    }

    /// How many there were.
    fn end(mut self) -> u32 {
        self.node.sh(&format!("touch {}", self.stop)).expect("end");
        let deadline = Deadline::seconds(60);
        self.stream
            .until("PAUSES=", deadline)
            .expect("no pause and no resume failed");
        let count = self.stream.until(";", deadline).expect("the count");
        count.trim_end_matches(';').parse().expect("a number")
    }
}

#[rstest]
fn random_writes_read_back_also_while_the_machine_is_paused_and_resumed(
    #[values(Format::Raw, Format::Qcow2)] format: Format,
    #[values(1, 4)] queues: u32,
) {
    let case = Case::new("blk-verify").expect("node");
    let folder = case.folder().expect("folder");
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

    let pauses = Pauses::of(&vm, case.node(), &folder);
    console
        .run(FIO, 400)
        .expect("what was written is read back after pauses");
    let pauses = pauses.end();
    assert!(pauses >= 2, "only {pauses} pauses");

    vm.ctl("stop --force").expect("stop");
    if format == Format::Qcow2 {
        assert_eq!(
            case.node().check_qcow2(&image).expect("the image is sound"),
            0,
            "leaks"
        );
    }
}
