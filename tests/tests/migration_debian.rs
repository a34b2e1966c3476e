//! A complete Debian with systemd is moved, saved, restored and copied under load. fio verifies its
//! writes to a disk, iperf sends data from the node, and a program watches the clock.

use std::time::Instant;

use serde_json::json;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::two_daemons::load::{Fio, Iperf, bring_fio};
use vmmd_tests::two_daemons::traveller::{GUEST, NODE, SMALL, Traveller};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::VmSpec;
use vmmd_tests::{Case, long};

/// Debian and its load in as little as they need: all that is not free is sent.
const MEMORY_MIB: u64 = 256;

/// How often it moves to the other daemon and back.
fn turns() -> u32 {
    if long() { 20 } else { 1 }
}

/// It, on a bridge of the test's, with a disk for fio.
fn debian(case: &Case, bridge: &str) -> VmSpec {
    let guests = case.node().guests();
    let root = case.debian_disk();
    bring_fio(case, &root);
    let data = case.image("data", Format::Raw, 32);
    VmSpec::new(guests.debian_vmlinuz(), Some(guests.debian_initrd()))
        .memory_mib(MEMORY_MIB)
        .with_disk(Disk::new("root", Format::Raw, &root))
        .with_disk(Disk::new("data", Format::Raw, &data))
        .nic("eth0", bridge)
        // The first byte is that of the taps' own addresses. A tap must not have the address of its
        // NIC, or the guest is not reachable through other ports of the bridge.
        .set("/nics/0/mac", json!("fe:00:00:00:c8:02"))
        .cmdline(&format!(
            "{SMALL} norandmaps root=/dev/vda rw ip={}:::255.255.255.0::eth0:off net.ifnames=0",
            GUEST
        ))
}

/// A bridge with the node's address, which both daemons have.
fn bridge(case: &Case, daemons: &[Daemon<'_>; 2]) -> String {
    let bridge = case.bridge();
    case.node().sh(&format!("ip addr add {NODE} dev {bridge}"));
    for daemon in daemons {
        daemon.join_bridge(&bridge);
    }
    bridge
}

#[test]
fn busy_debian_moves_without_loss() {
    let case = Case::new("migration-debian");
    let daemons = two_daemons::pair(&case, 5);
    let bridge = bridge(&case, &daemons);
    let mut guest = Traveller::boot_debian(case.name(), &daemons, &debian(&case, &bridge));
    let fio = Fio::begin(&mut guest.console);
    let iperf = Iperf::begin(&case, &mut guest.console, GUEST);
    for turn in 1..=2 * turns() {
        println!("migration {turn}");
        guest.moves();
        iperf.goes_on();
        fio.goes_on(&mut guest.console);
    }
    fio.end(&mut guest.console);
    guest.has_no_complaint();
}

#[test]
fn busy_debian_continues_from_snapshot_and_as_four_clones() {
    let case = Case::new("snapshot-debian");
    let daemons = two_daemons::pair(&case, 6);
    let bridge = bridge(&case, &daemons);
    let (name, daemon) = (case.name(), &daemons[0]);
    let mut guest = Traveller::boot_debian(name, &daemons, &debian(&case, &bridge));
    let fio = Fio::begin(&mut guest.console);
    let iperf = Iperf::begin(&case, &mut guest.console, GUEST);
    // The node's file system can't share blocks: the guest stands still while its disks are copied.
    let saved = guest.snapshot(name);
    guest.goes_on();
    iperf.goes_on();
    fio.goes_on(&mut guest.console);
    guest.has_no_complaint();
    drop(iperf);

    daemon.ctl(&format!("stop --force {name}"));
    let restored = within(|| daemon.ctl(&format!("restore {name}")));
    let clones = [1, 2, 3, 4].map(|number| format!("{name}-{number}"));
    goes_on(&mut guest.copy(name, &saved, restored));
    // Clones that are not fresh have the addresses of its NIC, which are in use as long as it
    // exists.
    daemon.ctl(&format!("delete --force --yes {name}"));

    // All four have them.
    daemon.keep_apart();
    let all = format!("clone --share-addresses {name} {}", clones.join(" "));
    let restored = within(|| daemon.ctl(&all));
    for clone in &clones {
        println!("{clone}");
        goes_on(&mut guest.copy(clone, &saved, restored));
    }
}

/// Runs `work`, prints its output, and returns the start and end time.
fn within(work: impl FnOnce() -> String) -> [Instant; 2] {
    let begun = Instant::now();
    println!("{}", work());
    [begun, Instant::now()]
}

/// Checks that fio continues in a restored guest and ends without errors, and that the clock
/// continues meanwhile.
fn goes_on(guest: &mut Traveller<'_, '_>) {
    // The first round was partly in the snapshot.
    for _ in 0..2 {
        Fio.goes_on(&mut guest.console);
    }
    Fio.end(&mut guest.console);
    guest.goes_on();
    guest.has_no_complaint();
}
