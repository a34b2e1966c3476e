//! A guest moves between two daemons of one node, each with a root and a network namespace of its own.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons;
use vmmd_tests::two_daemons::traveller::{DOWNTIME, SMALL};
use vmmd_tests::vm::{Console, VmSpec};

/// The guest's address.
fn address(console: &mut Console) -> String {
    let text = console.run("ip -4 -o addr show dev eth0 | sed 's/.*inet //; s/ .*//'");
    text.trim().to_owned()
}

#[test]
fn a_guest_keeps_its_address_in_a_network_that_both_nodes_have() {
    let case = Case::new("migration-net");
    let daemons = two_daemons::pair(&case, 3);
    let name = case.name();
    for daemon in &daemons {
        daemon.ctl("network create lan --cidr 10.83.0.0/24");
    }
    let spec = VmSpec::busybox(Kernel::Cloud612)
        .cmdline(SMALL)
        .set("/nics", json!([{"name": "eth0", "network": "lan"}]));
    daemons[0].start_vm(name, &spec);
    let mut console = daemons[0].console(name);
    console.booted();
    console.run("ip link set eth0 up && udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2");
    let had = address(&mut console);
    assert!(had.starts_with("10.83.0."), "{had}");
    let (ip, _) = had.split_once('/').expect("a prefix");
    drop(console);
    let [from, to] = &daemons;
    println!("{}", from.migrate(name, to, DOWNTIME));
    let mut console = to.console(name);
    assert_eq!(address(&mut console), had);
    to.within(&format!("ping -c 3 -i 0.2 -W 10 {ip}"));
    let leases = to.ctl("network describe lan");
    assert!(leases.contains(ip) && leases.contains(name), "{leases}");
    console.run("ping -c 3 -W 10 10.83.0.1");
    drop(console);

    // When the target node lacks the network, the error names the network before the transfer
    // begins.
    let [other, on] = &daemons;
    other.ctl("network rm lan");
    let refused = |why: &str| {
        let command = on.command(&format!("migrate {name} --to {} 2>&1", other.address()));
        let output = case.node().ssh(&command).expect("ask");
        assert!(
            !output.success() && output.stdout.contains(why),
            "{}",
            output.stdout
        );
        assert_eq!(other.vms(), "", "nothing is left there");
    };
    refused("lan");
    other.ctl("network create lan --cidr 10.84.0.0/24");
    refused("10.83.0.0/24");
    assert!(on.ctl("get vm").contains("Running"));
}
