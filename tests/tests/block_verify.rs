//! A guest reads back the data that it writes to a disk: on every format, with several queues, and
//! also while the machine is paused and resumed repeatedly.

use rstest::rstest;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::vm::Vm;
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
            ));
        Pauses { node, stream, stop }
    }

    /// How many there were.
    fn end(mut self) -> u32 {
        self.node.sh(&format!("touch {}", self.stop));
        let deadline = Deadline::seconds(60);
        self.stream.until("PAUSES=", deadline);
        let count = self.stream.until(";", deadline);
        count.trim_end_matches(';').parse().expect("a number")
    }
}

#[rstest]
#[case::raw(Format::Raw, 1)]
#[case::qcow2(Format::Qcow2, 4)]
#[case::nightly(Format::Raw, 4)]
#[case::nightly(Format::Qcow2, 1)]
fn random_writes_read_back_during_pauses(#[case] format: Format, #[case] queues: u32) {
    let case = Case::new("blk-verify");
    let folder = case.folder();
    let image = case.image("data", format, 32);
    let disk = Disk::new("data", format, &image).with("queues", queues);
    let spec = case.storage_guest(Kernel::Cloud612).cores(queues).with_disk(disk);
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let seen = console.run("ls -d /sys/block/vda/mq/* | wc -l");
    assert_eq!(seen.trim(), queues.to_string());
    console.run_within(FIO, 200);

    let pauses = Pauses::of(&vm, case.node(), &folder);
    console.run_within(FIO, 400);
    let pauses = pauses.end();
    assert!(pauses >= 2, "only {pauses} pauses");

    vm.ctl("stop --force");
    if format == Format::Qcow2 {
        assert_eq!(
            case.node().check_qcow2(&image).expect("the image is sound"),
            0,
            "leaks"
        );
    }
}
