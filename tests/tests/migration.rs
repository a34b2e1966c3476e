//! A guest moves between two daemons of one node, each with a root and a network namespace of its own.

use serde_json::json;
use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons::traveller::{DOWNTIME, SMALL};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::{Console, VmSpec};
use vmmd_tests::{Case, Guests};

/// The guest's address.
fn address(console: &mut Console) -> String {
    let text = console.run("ip -4 -o addr show dev eth0 | sed 's/.*inet //; s/ .*//'");
    text.trim().to_owned()
}

/// Takes a picture of the guest's screen, which must be as large as its VM says; returns its path in the node.
fn screenshot(case: &Case, daemon: &Daemon<'_>, name: &str) -> String {
    let path = format!("{}/{name}.png", case.folder());
    daemon.ctl(&format!("screenshot {} {path}", case.name()));
    // Width and height (IHDR chunk: PNG, 11.2.2).
    let size = case.node().sh(&format!("od -An -tu1 -j16 -N8 {path}"));
    let size: Vec<_> = size.split_whitespace().collect();
    assert_eq!(size, ["0", "0", "7", "128", "0", "0", "4", "56"], "1920 x 1080");
    path
}

#[test]
fn a_guest_keeps_its_address_in_a_network_that_both_nodes_have() {
    let case = Case::new("migration-net");
    let daemons = two_daemons::pair(&case, 3);
    let name = case.name();
    for daemon in &daemons {
        daemon.ctl("network create lan --cidr 10.83.0.0/24");
    }
    // A bzImage, because the entry path of an ELF does not report screens.
    let kernel = Kernel::Cloud612;
    let spec = VmSpec::new(Guests.vmlinuz(kernel), Some(Guests.initrd(kernel)))
        .cmdline(kernel.arguments())
        .cmdline(SMALL)
        .set("/display", json!({ "width": 1920, "height": 1080 }))
        .set("/nics", json!([{"name": "eth0", "network": "lan"}]));
    daemons[0].start_vm(name, &spec);
    let mut console = daemons[0].console(name);
    console.booted();
    console.run("ip link set eth0 up && udhcpc -i eth0 -s /lib/udhcpc -n -q -t 20 -T 2");
    let had = address(&mut console);
    assert!(had.starts_with("10.83.0."), "{had}");
    let (ip, _) = had.split_once('/').expect("a prefix");
    // No messages of the kernel, no cursor, and what only this guest knows.
    let draw = "dmesg -n 1; printf '\\033[?25l\\033[2J\\033[H%s\\n' \"$(cat /proc/sys/kernel/random/boot_id)\" >/dev/tty1";
    console.run(draw);
    drop(console);
    let [from, to] = &daemons;
    let before = screenshot(&case, from, "before");
    println!("{}", from.migrate(name, to, DOWNTIME));
    // The guest has drawn nothing since, so that the picture went along.
    let after = screenshot(&case, to, "after");
    case.node().sh(&format!("cmp {before} {after}"));
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
