//! A guest's network interface: several queues, large packets, link and limits at run time.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};

/// How long a transfer, or a change of the link, may take in a slow node.
const PATIENCE: u64 = 120;

/// Size of what is transferred, in MiB.
const MIB: u32 = 24;

#[test]
fn a_guest_with_two_queues_moves_data_unchanged_and_follows_its_link() {
    let case = Case::new("nic").expect("node");
    let node = case.node();
    let bridge = case.bridge().expect("a bridge");
    node.sh(&format!("ip addr add 10.9.0.1/24 dev {bridge}"))
        .expect("the node's address");
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .cores(2)
        .nic("eth0", &bridge)
        .set("/nics/0/queues", json!(2));
    let vm = Vm::start(&case, "", &spec).expect("start");
    let mut console = vm.console().expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
        .run("ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up", 30)
        .expect("the guest's address");
    let queues = console.run("ls /sys/class/net/eth0/queues", 30).expect("queues");
    assert!(queues.contains("rx-1") && queues.contains("tx-1"), "{queues}");
    node.sh("ping -c 3 -i 0.2 -W 10 10.9.0.2").expect("ping");

    // What arrives is what was sent, both ways: streams that are cut on neither side.
    let folder = case.folder().expect("folder");
    node.sh(&format!("head -c {MIB}M /dev/urandom > {folder}/sent"))
        .expect("data");
    let sum = node.sh(&format!("sha256sum < {folder}/sent")).expect("checksum");
    let sum = sum.split_whitespace().next().expect("a checksum").to_owned();
    console
        .run(
            "(nc -l -p 7000 < /dev/null > /received; echo received) & true",
            30,
        )
        .expect("listen");
    console
        .run(
            "until busybox netstat -lnt | grep -q :7000; do usleep 100000; done",
            30,
        )
        .expect("the guest listens");
    node.sh(&format!("bash -c 'cat {folder}/sent > /dev/tcp/10.9.0.2/7000'"))
        .expect("send");
    console.until("received", PATIENCE).expect("the guest has it");
    let received = console.run("sha256sum < /received", PATIENCE).expect("checksum");
    assert!(received.contains(&sum), "{sum} was sent: {received}");
    console
        .run("(nc -l -p 7001 < /received; echo sent) & true", 30)
        .expect("listen");
    console
        .run(
            "until busybox netstat -lnt | grep -q :7001; do usleep 100000; done",
            30,
        )
        .expect("the guest listens");
    let back = node.sh("bash -c 'timeout 120 cat < /dev/tcp/10.9.0.2/7001 | sha256sum'");
    assert!(back.expect("receive").contains(&sum));

    vm.ctl_with("nic update", "eth0 link=down")
        .expect("pull the cable");
    console
        .run(
            "until [ $(cat /sys/class/net/eth0/carrier) = 0 ]; do usleep 100000; done",
            PATIENCE,
        )
        .expect("no carrier");
    assert!(node.sh("ping -c 1 -W 2 10.9.0.2").is_err());
    vm.ctl_with("nic update", "eth0 link=up")
        .expect("plug the cable in");
    console
        .run(
            "until [ $(cat /sys/class/net/eth0/carrier) = 1 ]; do usleep 100000; done",
            PATIENCE,
        )
        .expect("carrier");
    node.sh("ping -c 3 -i 0.2 -W 10 10.9.0.2").expect("ping again");
}
