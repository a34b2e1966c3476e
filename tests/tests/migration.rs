//! A guest moves between two daemons of one node, each with a root and a network namespace of its own.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::two_daemons;
use vmmd_tests::two_daemons::traveller::{Connection, DOWNTIME, PATIENCE, SMALL, Traveller};
use vmmd_tests::vm::{BOOT, Console, VmSpec};

/// How often a guest moves to the other daemon and back.
fn turns() -> u32 {
    if vmmd_tests::long() { 20 } else { 1 }
}

#[test]
fn a_guest_moves_to_and_fro_with_its_disk_its_clock_and_an_open_connection() {
    let case = Case::new("migration").expect("node");
    let daemons = two_daemons::pair(&case, 1).expect("daemons");
    let bridge = case.bridge().expect("bridge");
    case.node()
        .sh(&format!("ip addr add {} dev {bridge}", Connection::NODE))
        .expect("the node's address");
    for daemon in &daemons {
        daemon.join_bridge(&bridge).expect("join");
    }
    let image = case.image("data", Format::Raw, 32).expect("image");
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .memory_mib(128)
        .cmdline(&format!("{SMALL} guest.ip={}/24", Connection::GUEST))
        .nic("eth0", &bridge)
        .with_disk(Disk::new("data", Format::Raw, &image));
    let mut guest = Traveller::boot(case.name(), &daemons, &spec);
    let connection = Connection::open(&case, &mut guest.console);
    for turn in 1..=turns() {
        for _ in 0..2 {
            println!("turn {turn}");
            // Data that is written on one node is read on the other.
            let write = "head -c 262144 /dev/urandom >/run/block && dd if=/run/block of=/dev/vda bs=64k oflag=direct 2>/dev/null";
            guest.console.run(write, PATIENCE).expect("write");
            guest.moves();
            connection.goes_on();
            let read = "dd if=/dev/vda bs=64k count=4 iflag=direct 2>/dev/null | cmp - /run/block";
            guest
                .console
                .run(read, PATIENCE)
                .expect("the disk has what was written");
        }
    }
    connection.hang_up();
    guest.has_no_complaint();
}

/// The guest's address.
fn address(console: &mut Console) -> String {
    let text = console
        .run(
            "ip -4 -o addr show dev eth0 | sed 's/.*inet //; s/ .*//'",
            PATIENCE,
        )
        .expect("the address");
    text.trim().to_owned()
}

#[test]
fn a_guest_keeps_its_address_in_a_network_that_both_nodes_have() {
    let case = Case::new("migration-net").expect("node");
    let daemons = two_daemons::pair(&case, 3).expect("daemons");
    let name = case.name();
    for daemon in &daemons {
        daemon
            .ctl("network create lan --cidr 10.83.0.0/24")
            .expect("a network");
    }
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .cmdline(SMALL)
        .set("/nics", json!([{"name": "eth0", "network": "lan"}]));
    daemons[0].start_vm(name, &spec).expect("start");
    let mut console = daemons[0].console(name).expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
        .run(
            "ip link set eth0 up && udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2",
            PATIENCE,
        )
        .expect("an address");
    let had = address(&mut console);
    assert!(had.starts_with("10.83.0."), "{had}");
    let (ip, _) = had.split_once('/').expect("a prefix");
    drop(console);
    let [from, to] = &daemons;
    println!("{}", from.migrate(name, to, DOWNTIME).expect("migrate"));
    let mut console = to.console(name).expect("console");
    assert_eq!(address(&mut console), had);
    to.within(&format!("ping -c 3 -i 0.2 -W 10 {ip}"))
        .expect("the guest answers at its new place");
    let leases = to.ctl("network describe lan").expect("describe");
    assert!(leases.contains(ip) && leases.contains(name), "{leases}");
    console
        .run("ping -c 3 -W 10 10.83.0.1", PATIENCE)
        .expect("it reaches the gateway there");
    drop(console);

    // When the target node lacks the network, the error names the network before the transfer
    // begins.
    let [other, on] = &daemons;
    other.ctl("network rm lan").expect("remove the network");
    let refused = |why: &str| {
        let command = on.command(&format!("migrate {name} --to {} 2>&1", other.address()));
        let output = case.node().ssh(&command).expect("ask");
        assert!(
            !output.success() && output.stdout.contains(why),
            "{}",
            output.stdout
        );
        assert_eq!(other.vms().expect("list"), "", "nothing is left there");
    };
    refused("lan");
    other
        .ctl("network create lan --cidr 10.84.0.0/24")
        .expect("another network");
    refused("10.83.0.0/24");
    assert!(on.ctl("get vm").expect("list").contains("Running"));
}
