//! A guest moves between two daemons of one node, each with a root and a network namespace of its own, and notices nothing but a moment.

use serde_json::json;
use vmmd_tests::Case;
use vmmd_tests::node::{Kernel, Stream};
use vmmd_tests::storage::{Disk, Format};
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::{BOOT, Console, VmSpec};
use vmmd_tests::wait::Deadline;

/// How long the guest's shell may take to answer, in a slow node.
const PATIENCE: u64 = 60;
/// Longest time between two looks at its clock that the guest may see, in hundredths of a second.
const LONGEST_GAP: u64 = 300;
/// What a guest that rewrites its memory may be stopped for.
const DOWNTIME: &str = "--downtime-limit 2s";
/// Memory that is free is zero, and not sent: an emulated node encrypts and decrypts a megabyte or two in a second.
const SMALL: &str = "init_on_free=1";

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; usleep 20000; done) >/dev/null 2>&1 & }";

/// What the guest's kernel says when something is wrong with it.
const COMPLAINTS: &str = "dmesg | grep -iE 'lockup|stall|unstable|BUG:|WARNING:|hung' && false || true";

/// Random writes that are then read and compared, again and again until it is to stop.
const VERIFY: &str = "{ (while [ ! -e /run/stop ]; do \
     fio --name=verify --filename=/dev/vda --direct=1 --ioengine=io_uring --iodepth=16 --size=8m --rw=randwrite \
         --bsrange=512-128k --verify=crc32c --verify_fatal=1 --minimal >/run/fio 2>&1 || { touch /run/failed; break; }; \
     echo again >>/run/rounds; done; touch /run/over) >/dev/null 2>&1 & }";

/// A guest that watches its clock, and has something in its memory.
struct Traveller<'pair, 'case> {
    name: &'pair str,
    daemons: &'pair [Daemon<'case>; 2],
    /// Which of them it is on.
    at: usize,
    console: Console,
    /// How often it has looked at its clock, when that was last asked.
    looks: u64,
}

impl<'pair, 'case> Traveller<'pair, 'case> {
    fn boot(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec).expect("start");
        let mut console = daemons[0].console(name).expect("console");
        console.until("GUEST-READY", BOOT).expect("boot");
        // What this kernel says of the node's processor when it boots is no complaint about a move.
        for command in [
            "dmesg -c >/dev/null",
            WATCHER,
            "until [ -s /run/seen ]; do usleep 50000; done",
            "head -c 8388608 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
        ] {
            console.run(command, PATIENCE).expect(command);
        }
        Self {
            name,
            daemons,
            at: 0,
            console,
            looks: 0,
        }
    }

    /// The daemon that has it.
    fn home(&self) -> &'pair Daemon<'case> {
        &self.daemons[self.at]
    }

    /// The other one.
    fn away(&self) -> &'pair Daemon<'case> {
        &self.daemons[1 - self.at]
    }

    /// Moves it to the other daemon, where it goes on; nothing stays behind.
    fn moves(&mut self) {
        let (from, to) = (self.home(), self.away());
        println!("{}", from.migrate(self.name, to, DOWNTIME).expect("migrate"));
        assert_eq!(from.vms().expect("list"), "", "it is not there any more");
        assert_eq!(from.traces().expect("look"), "", "nor is anything of it");
        assert!(to.vms().expect("list").contains(self.name));
        self.at = 1 - self.at;
        self.goes_on();
    }

    /// Its clock goes on from where it was, and its memory is what it was.
    fn goes_on(&mut self) {
        self.console = self.home().console(self.name).expect("console");
        let (looks, gap) = self.seen();
        println!("{looks} looks at the clock, the longest gap is {gap}0 ms");
        assert!(looks >= self.looks, "{looks} is before {}", self.looks);
        assert!(gap < LONGEST_GAP, "the guest's clock made a step of {gap}0 ms");
        let on = format!("until [ $(cut -d ' ' -f 1 /run/seen) -gt {looks} ]; do usleep 50000; done");
        self.console.run(&on, PATIENCE).expect("it does not stand still");
        self.console
            .run("md5sum -c /run/sum >/dev/null", PATIENCE)
            .expect("memory is what it was");
        self.looks = looks;
    }

    /// What the watcher has written down.
    fn seen(&mut self) -> (u64, u64) {
        let text = self.console.run("cat /run/seen", PATIENCE).expect("read");
        let mut numbers = text
            .split(|letter: char| !letter.is_ascii_digit())
            .filter_map(|word| word.parse().ok());
        let (count, gap) = (numbers.next(), numbers.next());
        count.zip(gap).unwrap_or_else(|| panic!("{text:?}"))
    }

    fn has_no_complaint(&mut self) {
        self.console
            .run(COMPLAINTS, PATIENCE)
            .expect("the guest has no complaint");
    }
}

/// The node's end of a connection to a guest: each line that it sends has to come back.
struct Connection<'case> {
    case: &'case Case,
    folder: String,
    stream: Stream,
}

impl<'case> Connection<'case> {
    /// Where the node and the guest are on the bridge.
    const NODE: &'static str = "10.78.200.1/24";
    const GUEST: &'static str = "10.78.200.2";

    fn open(case: &'case Case, console: &mut Console) -> Self {
        let echo = "busybox mkfifo /tmp/echo; { (nc -l -p 7 </tmp/echo | cat >/tmp/echo) >/dev/null 2>&1 & }; \
                    until busybox netstat -lnt | grep -q :7; do usleep 100000; done";
        console.run(echo, PATIENCE).expect("listen");
        let folder = case.folder().expect("folder");
        let script = format!(
            "exec 3<>/dev/tcp/{guest}/7 || exit\n\
             n=0\n\
             while [ ! -e {folder}/hang-up ]; do\n\
                 n=$((n+1)); echo $n >&3; read -r -t 60 -u 3 got\n\
                 [ \"$got\" = $n ] || {{ echo \"CONNECTION: $got instead of $n;\"; exit; }}\n\
                 echo $n >{folder}/count.new; mv {folder}/count.new {folder}/count; sleep 0.05\n\
             done\n\
             echo \"CONNECTION: whole;\"\n",
            guest = Self::GUEST
        );
        let node = case.node();
        node.sh(&format!("cat >{folder}/talk <<'SCRIPT'\n{script}SCRIPT\n"))
            .expect("write the script");
        let stream = node.stream(&format!("exec bash {folder}/talk")).expect("connect");
        let connection = Self { case, folder, stream };
        connection.goes_on();
        connection
    }

    /// Waits until more has come back.
    fn goes_on(&self) {
        let count = format!("$(cat {}/count 2>/dev/null || echo 0)", self.folder);
        let on = format!(
            "before={count}; timeout {PATIENCE} sh -c 'until [ {count} -gt $0 ]; do sleep 0.1; done' $before && echo {count} lines came back"
        );
        let told = self.case.node().sh(&on).expect("what the node says comes back");
        println!("{}", told.trim());
    }

    fn hang_up(mut self) {
        self.case
            .node()
            .sh(&format!("touch {}/hang-up", self.folder))
            .expect("hang up");
        let deadline = Deadline::seconds(PATIENCE);
        self.stream.until("CONNECTION: ", deadline).expect("the end");
        assert_eq!(self.stream.until(";", deadline).expect("how it ended"), "whole;");
    }
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
    let spec = case
        .storage_guest(Kernel::Cloud612)
        .expect("guest")
        .cmdline(&format!("{SMALL} guest.ip={}/24", Connection::GUEST))
        .nic("eth0", &bridge)
        .with_disk(Disk::new("data", Format::Raw, &image));
    let mut guest = Traveller::boot(case.name(), &daemons, &spec);
    let connection = Connection::open(&case, &mut guest.console);
    guest.console.run(VERIFY, PATIENCE).expect("fio begins");
    let turns = if vmmd_tests::long() { 20 } else { 2 };
    for turn in 1..=turns {
        println!("turn {turn} of {turns}");
        guest.moves();
        connection.goes_on();
        // A whole round from here on, so that what was written before the next move is read behind it.
        let rounds = "$(wc -l 2>/dev/null </run/rounds || echo 0)";
        let on = format!(
            "n={rounds}; until [ {rounds} -gt $((n+1)) ] || [ -e /run/over ]; do usleep 200000; done; [ ! -e /run/failed ] || {{ cat /run/fio; false; }}"
        );
        guest.console.run(&on, 300).expect("fio goes on");
    }
    let end = "touch /run/stop; until [ -e /run/over ]; do usleep 200000; done; [ ! -e /run/failed ] || { cat /run/fio; false; }";
    guest
        .console
        .run(end, 300)
        .expect("what was written is read back");
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

    // A node without the network is told by its name, before anything moves.
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

/// What may happen while memory is sent.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Cancel,
    TargetsVmm,
    TargetsDaemon,
    SourcesDaemon,
    Cut,
}

#[test]
fn whatever_is_killed_cut_or_cancelled_while_memory_is_sent_the_guest_runs_on() {
    let case = Case::new("migration-kill").expect("node");
    let daemons = two_daemons::pair(&case, 4).expect("daemons");
    let name = case.name();
    let node = case.node();
    let mut guest = Traveller::boot(name, &daemons, &VmSpec::busybox(Kernel::Cloud612).cmdline(SMALL));
    let (source, target) = (guest.home(), guest.away());
    let kill = |daemon: &Daemon<'_>| {
        let pids = daemon.processes().expect("processes");
        let [pid] = pids.as_slice() else {
            panic!("{pids:?}");
        };
        node.sh(&format!("kill -9 {pid}")).expect("kill");
    };
    // Slow enough to be met on its way.
    let begin = || {
        source
            .migrate(name, target, "--bandwidth 2Mi --detach")
            .expect("begin");
        let comes = format!(
            "timeout {PATIENCE} sh -c 'until {} | grep -q Starting; do sleep 0.1; done'",
            target.command(&format!("get vm {name} 2>/dev/null"))
        );
        node.sh(&comes).expect("it comes to the target");
    };
    for trouble in [
        Trouble::Cancel,
        Trouble::TargetsVmm,
        Trouble::TargetsDaemon,
        Trouble::SourcesDaemon,
        Trouble::Cut,
    ] {
        println!("{trouble:?}");
        begin();
        match trouble {
            Trouble::Cancel => drop(source.ctl(&format!("migrate cancel {name}")).expect("cancel")),
            Trouble::TargetsVmm => kill(target),
            Trouble::TargetsDaemon => target.kill().expect("kill"),
            Trouble::SourcesDaemon => source.kill().expect("kill"),
            Trouble::Cut => source.link(false).expect("cut"),
        }
        source
            .ctl(&format!("wait {name} --for operation --timeout 2m"))
            .expect("the source gives up");
        if matches!(trouble, Trouble::Cut) {
            target
                .ctl(&format!("wait {name} --for deleted --timeout 2m"))
                .expect("the target gives up by itself");
            source.link(true).expect("join");
        }
        target
            .ctl(&format!("wait {name} --for deleted --timeout 2m"))
            .expect("the target forgets it");
        assert_eq!(target.traces().expect("look"), "", "{trouble:?}");
        let shown = source.ctl(&format!("get vm {name}")).expect("get");
        assert!(shown.contains("Running"), "{trouble:?}: {shown}");
        guest.goes_on();
    }

    // Without its own vmm it has ended, as it would have without a migration.
    begin();
    kill(source);
    target
        .ctl(&format!("wait {name} --for deleted --timeout 2m"))
        .expect("the target forgets it");
    source
        .ctl(&format!("wait {name} --for phase=Failed --timeout 2m"))
        .expect("it has ended");
    assert_eq!(target.traces().expect("look"), "");
}
