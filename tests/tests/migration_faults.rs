//! Migrations that end early: whatever is killed, cut or cancelled, the guest runs on where it was, and nothing is left elsewhere.

use vmmd_tests::Case;
use vmmd_tests::node::Kernel;
use vmmd_tests::two_daemons::{self, Daemon};
use vmmd_tests::vm::{BOOT, Console, VmSpec};

/// How long the guest's shell may take to answer, in a slow node.
const PATIENCE: u64 = 60;
/// Longest time between two looks at its clock that the guest may see, in hundredths of a second.
const LONGEST_GAP: u64 = 300;
/// Memory that is free is zero, and not sent: an emulated node encrypts and decrypts a megabyte or two in a second.
const SMALL: &str = "init_on_free=1";

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; usleep 20000; done) >/dev/null 2>&1 & }";

/// A guest that watches its clock, and has something in its memory.
struct Traveller<'pair, 'case> {
    name: &'pair str,
    daemons: &'pair [Daemon<'case>; 2],
    console: Console,
    /// How often it has looked at its clock, when that was last asked.
    looks: u64,
}

impl<'pair, 'case> Traveller<'pair, 'case> {
    fn boot(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec).expect("start");
        let mut console = daemons[0].console(name).expect("console");
        console.until("GUEST-READY", BOOT).expect("boot");
        for command in [
            WATCHER,
            "until [ -s /run/seen ]; do usleep 50000; done",
            "head -c 8388608 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
        ] {
            console.run(command, PATIENCE).expect(command);
        }
        Self {
            name,
            daemons,
            console,
            looks: 0,
        }
    }

    /// The daemon that has it.
    fn home(&self) -> &'pair Daemon<'case> {
        &self.daemons[0]
    }

    /// The other one.
    fn away(&self) -> &'pair Daemon<'case> {
        &self.daemons[1]
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
