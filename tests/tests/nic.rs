//! A guest's network interface with several queues.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::vm::{BOOT, Vm, VmSpec};

#[test]
fn a_guest_with_two_queues_has_both_and_is_reached() {
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
}
