//! A guest moves between two daemons of one node, each with a root of its own, and notices nothing but a moment.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::{BOOT, Console, VmSpec};

/// How long the guest's shell may take to answer, in a slow node.
const PATIENCE: u64 = 60;
/// Longest time between two looks at its clock that the guest may see, in hundredths of a second.
const LONGEST_GAP: u64 = 300;

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; usleep 20000; done) >/dev/null 2>&1 & }";

/// What the guest's kernel says when something is wrong with it.
const COMPLAINTS: &str = "! dmesg | grep -iE 'lockup|stall|unstable|BUG:|WARNING:|hung'";

/// What the watcher has written down.
fn seen(console: &mut Console) -> (u64, u64) {
    let text = console.run("cat /run/seen", PATIENCE).expect("read");
    let mut numbers = text
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|word| word.parse().ok());
    let (count, gap) = (numbers.next(), numbers.next());
    count.zip(gap).unwrap_or_else(|| panic!("{text:?}"))
}

#[test]
fn a_guest_moves_to_another_daemon_and_back_twice_and_its_clock_goes_on() {
    let case = Case::new("migration").expect("node");
    let daemons = two_daemons::pair(&case, 1).expect("daemons");
    let name = case.name();
    let manifest = VmSpec::busybox(Kernel::Cloud612).manifest(name);
    daemons[0]
        .ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ))
        .expect("start");
    let mut console = daemons[0].console(name).expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    // What this kernel says of the node's processor when it boots is no complaint about a move.
    console
        .run("dmesg -c >/dev/null", PATIENCE)
        .expect("clear the log");
    console.run(WATCHER, PATIENCE).expect("watch");
    console
        .run("until [ -s /run/seen ]; do usleep 50000; done", PATIENCE)
        .expect("watch");
    console
        .run(
            "head -c 8388608 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
            PATIENCE,
        )
        .expect("fill memory");
    let (mut before, _) = seen(&mut console);
    for turn in 0..4 {
        drop(console);
        let (from, to) = (&daemons[turn % 2], &daemons[(turn + 1) % 2]);
        let told = from.ctl(&format!(
            "migrate {name} --to {} --downtime-limit 2s 2>&1",
            to.address()
        ));
        println!("{}", told.expect("migrate"));
        assert!(
            !from.vms().expect("list").contains(name),
            "it is not there any more"
        );
        assert!(to.vms().expect("list").contains(name));
        console = to.console(name).expect("console");
        let (now, gap) = seen(&mut console);
        println!("turn {turn}: {now} looks at the clock, the longest gap is {gap}0 ms");
        assert!(now >= before, "{now} is before {before}");
        assert!(gap < LONGEST_GAP, "the guest's clock made a step of {gap}0 ms");
        let on = format!("until [ $(cut -d ' ' -f 1 /run/seen) -gt {now} ]; do usleep 50000; done");
        console.run(&on, PATIENCE).expect("it does not stand still");
        console
            .run("md5sum -c /run/sum >/dev/null", PATIENCE)
            .expect("memory is what it was");
        before = now;
    }
    console
        .run(COMPLAINTS, PATIENCE)
        .expect("the guest has no complaint");
}

/// Random writes that are then read and compared, again and again until it is to stop.
const VERIFY: &str = "{ (while [ ! -e /run/stop ]; do \
     fio --name=verify --filename=/dev/vda --direct=1 --ioengine=io_uring --iodepth=16 --size=8m --rw=randwrite \
         --bsrange=512-128k --verify=crc32c --verify_fatal=1 --minimal >/run/fio 2>&1 || { touch /run/failed; break; }; \
     echo again >>/run/rounds; done; touch /run/over) >/dev/null 2>&1 & }";

#[test]
fn a_disk_on_shared_storage_goes_along_while_the_guest_writes_to_it() {
    let case = Case::new("migration-disk").expect("node");
    let daemons = two_daemons::pair(&case, 2).expect("daemons");
    let name = case.name();
    let image = case.image("data", Format::Raw, 32).expect("image");
    let spec = case.storage_guest(Kernel::Cloud612).expect("guest");
    let manifest = spec
        .with_disk(Disk::new("data", Format::Raw, &image))
        .manifest(name);
    daemons[0]
        .ctl(&format!(
            "create -f - --start <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ))
        .expect("start");
    let mut console = daemons[0].console(name).expect("console");
    console.until("GUEST-READY", BOOT).expect("boot");
    console
        .run("dmesg -c >/dev/null", PATIENCE)
        .expect("clear the log");
    console.run(VERIFY, PATIENCE).expect("fio begins");
    for turn in 0..4 {
        drop(console);
        let (from, to) = (&daemons[turn % 2], &daemons[(turn + 1) % 2]);
        let told = from.ctl(&format!(
            "migrate {name} --to {} --downtime-limit 2s 2>&1",
            to.address()
        ));
        println!("{}", told.expect("migrate"));
        console = to.console(name).expect("console");
        // A whole round from here on, so that what was written before the next move is read behind it.
        let rounds = "wc -l 2>/dev/null </run/rounds || echo 0";
        let on = format!(
            "n=$({rounds}); until [ $({rounds}) -gt $n ] || [ -e /run/failed ]; do usleep 200000; done"
        );
        console.run(&on, 300).expect("fio goes on");
    }
    console
        .run(
            "touch /run/stop; until [ -e /run/over ]; do usleep 200000; done; if [ -e /run/failed ]; then cat /run/fio; false; fi",
            300,
        )
        .expect("what was written is read back");
    console
        .run(COMPLAINTS, PATIENCE)
        .expect("the guest has no complaint");
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
    let spec = VmSpec::busybox(Kernel::Cloud612).set("/nics", json!([{"name": "eth0", "network": "lan"}]));
    let create = |daemon: &Daemon<'_>, name: &str, more: &str| {
        let manifest = spec.manifest(name);
        daemon.ctl(&format!(
            "create -f - {more} <<'MANIFEST'\n{manifest}\nMANIFEST\n"
        ))
    };
    create(&daemons[0], name, "--start").expect("start");
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
    for turn in 0..2 {
        drop(console);
        let (from, to) = (&daemons[turn % 2], &daemons[(turn + 1) % 2]);
        let told = from.ctl(&format!(
            "migrate {name} --to {} --downtime-limit 2s 2>&1",
            to.address()
        ));
        println!("{}", told.expect("migrate"));
        console = to.console(name).expect("console");
        assert_eq!(address(&mut console), had, "turn {turn}");
        let (ip, _) = had.split_once('/').expect("a prefix");
        to.within(&format!("ping -c 3 -i 0.2 -W 10 {ip}"))
            .expect("the guest answers at its new place");
        let leases = to.ctl("network describe lan").expect("describe");
        assert!(leases.contains(ip) && leases.contains(name), "{leases}");
        console
            .run("ping -c 3 -W 10 10.83.0.1", PATIENCE)
            .expect("it reaches the gateway there");
    }
    drop(console);

    // A node without the network is told by its name, before anything moves.
    let (on, other) = (&daemons[0], &daemons[1]);
    other.ctl("network rm lan").expect("remove the network");
    let refused = |why: &str| {
        let command = on.command(&format!("migrate {name} --to {} 2>&1", other.address()));
        let output = case.node().ssh(&command).expect("ask");
        assert!(
            !output.success() && output.stdout.contains(why),
            "{}",
            output.stdout
        );
        assert!(
            !other.vms().expect("list").contains(name),
            "nothing is left there"
        );
    };
    refused("lan");
    other
        .ctl("network create lan --cidr 10.84.0.0/24")
        .expect("another network");
    refused("10.83.0.0/24");
    assert!(on.ctl("get vm").expect("list").contains("RUNNING"));
}
