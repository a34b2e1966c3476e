//! Disks as an operator handles them: made, grown, limited, locked, deleted.

use rstest::rstest;
use serde_json::{Value, json};
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::{BOOT, Console, Vm, VmSpec};
use vmmd_tests::{Case, Node};

const MIB: u64 = 1 << 20;

fn start<'case>(case: &'case Case, spec: &VmSpec) -> (Vm<'case>, Console) {
    let vm = Vm::start(case, "", spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    (vm, console)
}

#[rstest]
fn a_disk_grows_while_it_is_used_and_never_shrinks(#[values(Format::Raw, Format::Qcow2)] format: Format) {
    let case = Case::new("blk-grow").expect("node");
    let image = case.image("data", format, 16).expect("image");
    let spec = case.storage_guest(Kernel::Cloud612).expect("guest");
    let (vm, mut console) = start(&case, &spec.with_disk(Disk::new("data", format, &image)));
    // Something is written all the while.
    console
        .type_line(
            "(fio --name=v --filename=/dev/vda --direct=1 --rw=randwrite --bs=4k --size=8m --verify=crc32c \
                    --iodepth=8 --ioengine=io_uring --minimal >/tmp/fio 2>&1; echo fio-ended-$?.) &",
        )
        .expect("type");
    let resize = |size: &str| {
        let command = format!("vmmctl resize disk data --vm {} --size {size}", vm.name());
        case.node().ssh(&command).expect("ssh")
    };
    let output = resize("48Mi");
    assert!(output.success(), "{}", output.stderr);
    console
        .run(
            &format!(
                "until [ $(cat /sys/block/vda/size) = {} ]; do usleep 50000; done",
                48 << 11
            ),
            60,
        )
        .expect("the guest sees it");
    console
        .until("fio-ended-0.", 120)
        .expect("what was written is read back");
    console
        .run("yes vmmd | head -c 1048576 | dd of=/dev/vda oflag=direct bs=1M seek=47 iflag=fullblock 2>/dev/null", 60)
        .expect("the new end can be written to");
    assert_eq!(
        vm.disk("data").expect("status")["capacityBytes"],
        (48 * MIB).to_string()
    );
    let output = resize("16Mi");
    let code = output.status.code().unwrap_or_default();
    assert_ne!(code, 0, "{}", output.stdout);
    refused(&output, code, &["data"]);
    let size = console.run("cat /sys/block/vda/size", 30).expect("size");
    assert_eq!(size.trim(), (48 << 11).to_string(), "it is as large as before");
    vm.ctl("stop --force").expect("stop");
    let info = case
        .node()
        .sh(&format!("qemu-img info --output=json -f {format} {image}"))
        .expect("info");
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["virtual-size"], 48 * MIB);
}

/// Seconds by the guest's clock that a command takes.
fn seconds(console: &mut Console, command: &str) -> f64 {
    let command = format!(
        "a=$(cut -d' ' -f1 /proc/uptime); {command} || echo failed; b=$(cut -d' ' -f1 /proc/uptime); echo $a $b"
    );
    let text = console.run(&command, 240).expect("the command");
    let mut times = text
        .split_whitespace()
        .map(|word| word.parse::<f64>().expect("a time"));
    let (a, b) = (times.next().expect("begin"), times.next().expect("end"));
    b - a
}

#[test]
fn a_limit_holds_and_can_be_changed_at_any_time() {
    let case = Case::new("blk-limit").expect("node");
    let mut spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .rate_group("both", &json!({"bytesPerSecond": MIB, "burstBytes": 65536}));
    for name in ["own", "a", "b"] {
        let disk = Disk::new(
            name,
            Format::Raw,
            &case.image(name, Format::Raw, 64).expect("image"),
        );
        spec = spec.with_disk(match name {
            "own" => disk.with("rateLimit", json!({"bytesPerSecond": MIB, "burstBytes": 65536})),
            _ => disk.with("rateGroup", "both"),
        });
    }
    let (vm, mut console) = start(&case, &spec);
    let write = |disk: &str, kib: u32| {
        format!(
            "dd if=/dev/zero of=/dev/{disk} oflag=direct bs=64k count={} 2>/dev/null",
            kib / 64
        )
    };
    // 4 MiB at 1 MiB/s with 64 KiB at once take 3.9 s, however slow the node is.
    let took = seconds(&mut console, &write("vda", 4096));
    assert!(took >= 3.7, "{took} s for 4 MiB at 1 MiB/s");
    // Two disks of a group have one limit: 2 MiB each.
    let took = seconds(
        &mut console,
        &format!("{} & {}; wait", write("vdb", 2048), write("vdc", 2048)),
    );
    assert!(took >= 3.7, "{took} s for 2 × 2 MiB at 1 MiB/s together");
    let own = vm.disk_stats("own").expect("counters");
    assert_eq!(own["write"]["bytes"], (4 * MIB).to_string(), "{own}");

    // 48 MiB would take 48 s; without the limit they end earlier.
    console
        .type_line(&format!("({}; echo write-ended-$?.) &", write("vda", 48 << 10)))
        .expect("type");
    vm.node().sh("sleep 1").expect("a second of it");
    vm.ctl_with("limit", "--disk own --none").expect("no limit");
    console
        .until("write-ended-0.", 35)
        .expect("it ends without the limit");
    // Requests: 100 of any size a second.
    vm.ctl_with("limit", "--disk own --iops 100 --burst-ops 1")
        .expect("another limit");
    let took = seconds(
        &mut console,
        "fio --name=r --filename=/dev/vda --direct=1 --rw=read --bs=512 --size=153600 --minimal >/dev/null",
    );
    assert!(took >= 2.8, "{took} s for 300 reads at 100 a second");
    vm.ctl_with("limit", "--group both --bps 2Mi --burst 64Ki")
        .expect("the group's limit");
    let took = seconds(&mut console, &write("vdb", 4096));
    assert!(took >= 1.8, "{took} s for 4 MiB at 2 MiB/s");
}

#[test]
fn a_disk_that_one_vm_can_write_to_is_refused_to_another_with_the_first_ones_name() {
    let case = Case::new("blk-lock").expect("node");
    for format in [Format::Raw, Format::Qcow2] {
        let image = case.image("shared", format, 8).expect("image");
        let disk = |read_only: bool| Disk::new("shared", format, &image).with("readOnly", read_only);
        let spec = |read_only| {
            case.storage_guest(Kernel::Cloud612)
                .expect("guest")
                .with_disk(disk(read_only))
        };
        let started = |suffix: &str, read_only| {
            let vm = Vm::start(&case, &format!("-{suffix}-{format}"), &spec(read_only)).expect("start");
            // Locks do not depend on the state of the guest.
            vm.ctl("pause").expect("pause");
            vm
        };
        let first = started("first", false);
        let pid = first.pid().expect("pid");
        for read_only in [false, true] {
            let second = Vm::create(&case, &format!("-second-{format}"), &spec(read_only)).expect("create");
            let output = second.try_ctl("start").expect("ssh");
            refused(&output, 5, &["shared", "in use", first.name()]);
            assert_ne!(second.phase().expect("phase"), "RUNNING");
        }
        let goes_on = (first.phase().expect("phase"), first.pid().expect("pid"));
        assert_eq!(goes_on, ("PAUSED".into(), pid));
        drop(first);
        // Two that only read are no trouble.
        let readers = ["a", "b"].map(|suffix| started(suffix, true));
        let third = Vm::create(&case, &format!("-third-{format}"), &spec(false)).expect("create");
        let output = third.try_ctl("start").expect("ssh");
        assert!(!output.success(), "a writer beside readers: {}", output.stdout);
        drop(readers);
        third.ctl("start").expect("when they are gone it starts");
    }
}

/// `vmmctl get disk NAME`, as JSON.
fn disk(node: &Node, name: &str) -> Value {
    let text = node
        .sh(&format!("vmmctl get disk {name} -o json"))
        .expect("get disk");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    // One disk is itself or a list of one.
    value
        .pointer("/items/0")
        .or(value.pointer("/disks/0"))
        .unwrap_or(&value)
        .clone()
}

/// Deletes the disks of a test when it ends, the overlays first.
struct Kept<'node>(&'node Node, Vec<String>);

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        for name in self.1.iter().rev() {
            let _ = self.0.ssh(&format!("vmmctl delete disk -y {name} 2>/dev/null"));
        }
    }
}

#[test]
fn the_nodes_own_disks_are_made_listed_grown_used_and_deleted() {
    let case = Case::new("disks").expect("node");
    let node = case.node();
    let name = |suffix: &str| format!("{}-{suffix}", case.name());
    let names: Vec<String> = ["raw", "qcow2", "full", "copy", "overlay"].map(name).to_vec();
    let kept = Kept(node, names.clone());
    let [raw, qcow2, full, copy, overlay] = [0, 1, 2, 3, 4].map(|index: usize| &names[index]);
    let file = format!("{}/file", case.folder().expect("folder"));
    node.sh(&format!("yes vmmd | head -c 2097152 >{file}"))
        .expect("a file");
    for command in [
        format!("create disk {raw} --size 16Mi"),
        format!("create disk {qcow2} --size 16Mi --format qcow2 --preallocation metadata"),
        format!("create disk {full} --size 8Mi --preallocation full"),
        format!("create disk {copy} --from-file {file}"),
        format!("create disk {overlay} --overlay-of {copy} --size 4Mi"),
    ] {
        node.sh(&format!("vmmctl {command}")).expect("create");
    }
    let list = node.sh("vmmctl get disks").expect("list");
    for name in &names {
        assert!(list.contains(name), "{list}");
    }
    let again = node
        .ssh(&format!("vmmctl create disk {raw} --size 32Mi"))
        .expect("ssh");
    refused(&again, 4, &[raw]);
    let path = |name: &str| {
        let disk = disk(node, name);
        let path = disk.pointer("/state/path").or(disk.pointer("/status/path"));
        path.and_then(Value::as_str).expect("its path").to_owned()
    };
    assert!(node.allocated(&path(raw)).expect("allocated") < MIB);
    assert!(node.allocated(&path(full)).expect("allocated") >= 8 * MIB);
    node.sh(&format!("cmp {file} {}", path(copy))).expect("a copy");

    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .with_disk(Disk::kept("root", overlay))
        .with_disk(Disk::kept("data", qcow2));
    let (vm, mut console) = start(&case, &spec);
    let text = console
        .run(
            "head -c 5 /dev/vda; cat /sys/block/vda/size /sys/block/vdb/size",
            30,
        )
        .expect("read");
    assert_eq!(text, format!("vmmd\n{}\n{}\n", 4 << 11, 16 << 11));
    console
        .run(
            "dd if=/dev/zero of=/dev/vda bs=64k count=8 oflag=direct 2>/dev/null; sync",
            30,
        )
        .expect("write to the overlay");
    node.sh(&format!("vmmctl resize disk {qcow2} --size 24Mi"))
        .expect("resize");
    console
        .run(
            &format!(
                "until [ $(cat /sys/block/vdb/size) = {} ]; do usleep 50000; done",
                24 << 11
            ),
            60,
        )
        .expect("the guest sees it");
    let shrink = node
        .ssh(&format!("vmmctl resize disk {raw} --size 8Mi"))
        .expect("ssh");
    refused(
        &shrink,
        shrink.status.code().filter(|code| *code != 0).expect("a failure"),
        &[],
    );

    // Disks in use cannot be deleted.
    for (name, user) in [(qcow2, vm.name()), (overlay, vm.name()), (copy, overlay.as_str())] {
        let output = node.ssh(&format!("vmmctl delete disk -y {name}")).expect("ssh");
        refused(&output, 5, &[user]);
    }
    vm.ctl("stop --force").expect("stop");
    node.sh(&format!("cmp {file} {}", path(copy)))
        .expect("the disk below the overlay is as it was");
    let paths: Vec<String> = names.iter().map(|name| path(name)).collect();
    drop(vm);
    for name in names.iter().rev() {
        node.sh(&format!("vmmctl delete disk -y {name}")).expect("delete");
    }
    drop(kept);
    for path in paths {
        node.sh(&format!("test ! -e {path}")).expect("its file is gone");
    }
    let gone = node.ssh(&format!("vmmctl get disk {raw}")).expect("ssh");
    refused(&gone, 3, &[raw]);
}

#[test]
fn a_disk_that_can_not_be_made_leaves_nothing() {
    let case = Case::new("disk-fail").expect("node");
    let node = case.node();
    // The folder of the disks is made when the first one is, and stays.
    let files = "find /var/lib/vmmd -type f -not -name '*.redb*' | sort";
    let before = node.sh(files).expect("files");
    let name = case.name();
    for (command, says) in [
        (
            format!("create disk {name} --size 64Ti --preallocation full"),
            "bytes free",
        ),
        (
            format!("create disk {name} --from-file /does/not/exist"),
            "/does/not/exist",
        ),
        (
            format!("create disk {name} --overlay-of no-such-disk"),
            "no-such-disk",
        ),
        (format!("create disk {name} --size 1048577"), "512"),
    ] {
        let output = node.ssh(&format!("vmmctl {command}")).expect("ssh");
        refused(
            &output,
            output.status.code().filter(|code| *code != 0).expect("a failure"),
            &[says],
        );
    }
    assert_eq!(before, node.sh(files).expect("files"));
}
