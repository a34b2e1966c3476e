//! Disks as an operator handles them: made, grown, limited, locked, deleted.

use rstest::rstest;
use serde_json::Value;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format, refused};
use vmmd_tests::vm::Vm;
use vmmd_tests::{Case, Node};

const MIB: u64 = 1 << 20;

#[rstest]
#[case(Format::Qcow2)]
#[case::nightly(Format::Raw)]
fn a_disk_grows_while_it_is_used_and_never_shrinks(#[case] format: Format) {
    let case = Case::new("blk-grow");
    let image = case.image("data", format, 16);
    let spec = case.storage_guest(Kernel::Cloud612);
    let (vm, mut console) = Vm::boot(&case, "", &spec.with_disk(Disk::new("data", format, &image)));
    // Something is written all the while.
    console.type_line(
        "(fio --name=v --filename=/dev/vda --direct=1 --rw=randwrite --bs=4k --size=8m --verify=crc32c \
                    --iodepth=8 --ioengine=io_uring --minimal >/tmp/fio 2>&1; echo fio-ended-$?.) &",
    );
    let resize = |size: &str| {
        let command = format!("vmmctl resize disk data --vm {} --size {size}", vm.name());
        case.node().ssh(&command).expect("ssh")
    };
    let output = resize("48Mi");
    assert!(output.success(), "{}", output.stderr);
    console.run(&format!(
        "until [ $(cat /sys/block/vda/size) = {} ]; do usleep 50000; done",
        48 << 11
    ));
    console.until("fio-ended-0.", 120);
    console.run(
        "yes vmmd | head -c 1048576 | dd of=/dev/vda oflag=direct bs=1M seek=47 iflag=fullblock 2>/dev/null",
    );
    assert_eq!(vm.disk("data")["capacityBytes"], (48 * MIB).to_string());
    let output = resize("16Mi");
    refused(&output, None, &["data"]);
    let size = console.run("cat /sys/block/vda/size");
    assert_eq!(size.trim(), (48 << 11).to_string(), "it is as large as before");
    vm.ctl("stop --force");
    let info = case
        .node()
        .sh(&format!("qemu-img info --output=json -f {format} {image}"));
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["virtual-size"], 48 * MIB);
}

/// `vmmctl get disk NAME`, as JSON.
fn disk(node: &Node, name: &str) -> Value {
    let text = node.sh(&format!("vmmctl get disk {name} -o json"));
    let value: Value = serde_json::from_str(&text).expect("JSON");
    // One disk is itself or a list of one.
    value
        .pointer("/items/0")
        .or(value.pointer("/disks/0"))
        .unwrap_or(&value)
        .clone()
}

#[test]
fn the_nodes_own_disks_are_made_listed_grown_used_and_deleted() {
    let case = Case::new("disks");
    let node = case.node();
    let name = |suffix: &str| format!("{}-{suffix}", case.name());
    let names: Vec<String> = ["raw", "qcow2", "full", "copy", "overlay"].map(name).to_vec();
    for name in &names {
        case.at_end(format!("vmmctl delete disk -y {name} 2>/dev/null"));
    }
    let [raw, qcow2, full, copy, overlay] = [0, 1, 2, 3, 4].map(|index: usize| &names[index]);
    let file = format!("{}/file", case.folder());
    node.sh(&format!("yes vmmd | head -c 2097152 >{file}"));
    for command in [
        format!("create disk {raw} --size 16Mi"),
        format!("create disk {qcow2} --size 16Mi --format qcow2 --preallocation metadata"),
        format!("create disk {full} --size 8Mi --preallocation full"),
        format!("create disk {copy} --from-file {file}"),
        format!("create disk {overlay} --overlay-of {copy} --size 4Mi"),
    ] {
        node.sh(&format!("vmmctl {command}"));
    }
    let list = node.sh("vmmctl get disks");
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
    assert!(node.allocated(&path(raw)) < MIB);
    assert!(node.allocated(&path(full)) >= 8 * MIB);
    node.sh(&format!("cmp {file} {}", path(copy)));

    let spec = case
        .storage_guest(Kernel::Cloud612)
        .with_disk(Disk::kept("root", overlay))
        .with_disk(Disk::kept("data", qcow2));
    let (vm, mut console) = Vm::boot(&case, "", &spec);
    let text = console.run("head -c 5 /dev/vda; cat /sys/block/vda/size /sys/block/vdb/size");
    assert_eq!(text, format!("vmmd\n{}\n{}\n", 4 << 11, 16 << 11));
    console.run("dd if=/dev/zero of=/dev/vda bs=64k count=8 oflag=direct 2>/dev/null; sync");
    node.sh(&format!("vmmctl resize disk {qcow2} --size 24Mi"));
    console.run(&format!(
        "until [ $(cat /sys/block/vdb/size) = {} ]; do usleep 50000; done",
        24 << 11
    ));
    let shrink = node
        .ssh(&format!("vmmctl resize disk {raw} --size 8Mi"))
        .expect("ssh");
    refused(&shrink, None, &[]);

    // Disks in use cannot be deleted.
    for (name, user) in [(qcow2, vm.name()), (overlay, vm.name()), (copy, overlay.as_str())] {
        let output = node.ssh(&format!("vmmctl delete disk -y {name}")).expect("ssh");
        refused(&output, 5, &[user]);
    }
    vm.ctl("stop --force");
    node.sh(&format!("cmp {file} {}", path(copy)));
    let paths: Vec<String> = names.iter().map(|name| path(name)).collect();
    drop(vm);
    for name in names.iter().rev() {
        node.sh(&format!("vmmctl delete disk -y {name}"));
    }
    for path in paths {
        node.sh(&format!("test ! -e {path}"));
    }
    let gone = node.ssh(&format!("vmmctl get disk {raw}")).expect("ssh");
    refused(&gone, 3, &[raw]);
}
