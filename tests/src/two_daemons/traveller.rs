//! A guest that looks at its clock, has something in its memory, and may be moved.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Daemon;
use crate::vm::{Console, VmSpec};

/// How long the guest's shell may take to answer, in a slow node.
pub const PATIENCE: u64 = 60;
/// A whole Debian takes one to three minutes to boot in an emulated node.
const DEBIAN_BOOT: u64 = 300;
/// Longest time between two looks at its clock that the guest may see beside a blackout and the time that its node did not run, in hundredths of a
/// second: it has to share the node's processors with what encrypts its memory.
const LONGEST_GAP: u64 = 300;
/// Longest time that a guest stands still in a slow node, in addition to the reported time. It
/// covers the hand-over, the pause and the resume.
const HAND_OVER: Duration = Duration::from_secs(5);
/// Permitted downtime of a guest that rewrites its memory.
pub const DOWNTIME: &str = "--downtime-limit 2s";
/// Address of the node on a bridge with a guest.
pub const NODE: &str = "10.78.200.1/24";
/// Address of the guest on that bridge.
pub const GUEST: &str = "10.78.200.2";
/// For its kernel's command line. Memory that is free is zero, and not sent: an emulated node encrypts and decrypts a megabyte or two in a second.
pub const SMALL: &str = "init_on_free=1";

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second. A clock that goes back
/// counts as one that made a large step.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); [ $gap -lt 0 ] && gap=99999; \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; sleep 0.02; done) >/dev/null 2>&1 & }";
/// The same for a Debian, with a real-time priority, so that the watcher does not wait for the
/// guest's load. It starts no process for each look, because the pages of such processes would
/// dominate the changes during the transfer of memory.
const DEBIAN_WATCHER: &str = "{ chrt -f 1 perl -e 'open U, q(/proc/uptime); ($n, $last, $max) = (0, 0, 0); for (;;) { \
     sysseek U, 0, 0; sysread U, $_, 99; tr/.//d; ($now) = split; $gap = $now - $last; $gap = 99999 if $gap < 0; \
     $max = $gap if $last && $gap > $max; $last = $now; $n++; \
     open S, q(>/run/seen.new); print S qq($n $max\\n); close S; rename q(/run/seen.new), q(/run/seen); select undef, undef, undef, 0.1 }' \
     >/dev/null 2>&1 & }";

/// The same in a node, whose processors an emulator may not run for seconds. Answers each line with the longest time between two of its looks.
const WITNESS: &str = "perl -e '$| = 1; open U, q(/proc/uptime); ($last, $max) = (0, 0); for (;;) { \
     $in = q(); vec($in, 0, 1) = 1; $asked = select $in, undef, undef, 0.05; \
     sysseek U, 0, 0; sysread U, $_, 99; tr/.//d; ($now) = split; $gap = $now - $last; \
     $max = $gap if $last && $gap > $max; $last = $now; \
     if ($asked > 0) { sysread STDIN, $_, 99 or exit; print qq(longest $max;\n) } }'";

/// Fails when the guest's kernel has said that something is wrong with it.
const NO_COMPLAINT: &str = "! dmesg | grep -iE 'lockup|stall|unstable|BUG:|WARNING:|hung'";
/// The same for a Debian, whose dmesg distinguishes warnings and worse. Two warnings are only
/// shown: an interrupt took long, and a timer was more than a second late, so that its clocks were
/// not compared. Both mean that a vCPU waited for the node's processors. The node logs the first
/// one about itself.
const NO_WARNING: &str = "dmesg -l emerg,alert,crit,err,warn >/run/warnings; cat /run/warnings; \
     ! grep -vE 'hrtimer: interrupt took|clocksource: Long readout interval' /run/warnings >/dev/null";

/// A guest that watches its clock, and has something in its memory.
pub struct Traveller<'pair, 'case> {
    name: &'pair str,
    daemons: &'pair [Daemon<'case>; 2],
    /// Which of them it is on.
    at: usize,
    /// Where it is, or was when this was opened.
    pub console: Console,
    /// How often it has looked at its clock, when that was last asked.
    looks: u64,
    /// Fails in the guest when its kernel has complained.
    no_complaint: &'static str,
    /// Options of a move: the permitted downtime, and whether the guest may be throttled.
    downtime: &'static str,
    /// The longest time for which it was stopped.
    blackout: Duration,
    /// Its clock, when that was last asked.
    moment: Moment,
    /// For how long it was stopped since then.
    stood: Duration,
    /// [`WITNESS`] in the node of each daemon.
    witnesses: Rc<RefCell<[Console; 2]>>,
}

/// The guest's clock, between two moments of the test's.
#[derive(Clone, Copy, Debug)]
struct Moment {
    clock: Duration,
    not_before: Instant,
    not_after: Instant,
}

impl Moment {
    /// How far the clock has gone on since `then`, and how much time has passed, at least and at most.
    fn since(&self, then: &Self) -> (Option<Duration>, [Duration; 2]) {
        let least = self.not_before.saturating_duration_since(then.not_after);
        let most = self.not_after.saturating_duration_since(then.not_before);
        (self.clock.checked_sub(then.clock), [least, most])
    }
}

/// State of a guest in a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    looks: u64,
    /// When its clock was looked at last.
    moment: Moment,
    /// For how long it stood still since.
    stood: Duration,
    /// When it was complete.
    at: Instant,
}

impl<'pair, 'case> Traveller<'pair, 'case> {
    /// Starts a busybox guest at the first daemon.
    pub fn boot(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec);
        let mut console = daemons[0].console(name);
        console.booted();
        Self::watching(name, daemons, console, WATCHER)
    }

    /// Starts a whole Debian, and logs in at its serial console.
    pub fn boot_debian(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec);
        let mut console = daemons[0].console(name);
        for (asked, answer) in [("login:", "root"), ("Password:", "vmmd")] {
            console.until(asked, DEBIAN_BOOT);
            console.type_line(answer);
        }
        console.attached_again();
        // Without editing of lines, whose echo is long.
        console.type_line("exec sh");
        // The files cached during the boot need not be sent.
        console.run("sync; echo 3 >/proc/sys/vm/drop_caches");
        Self {
            no_complaint: NO_WARNING,
            // The guest's load may change memory faster than a slow node encrypts it.
            downtime: "--downtime-limit 5s --force",
            ..Self::watching(name, daemons, console, DEBIAN_WATCHER)
        }
    }

    fn watching(
        name: &'pair str,
        daemons: &'pair [Daemon<'case>; 2],
        mut console: Console,
        watcher: &str,
    ) -> Self {
        // This kernel's boot messages about the node's processor are not complaints about a move.
        for command in [
            "dmesg -c >/dev/null",
            watcher,
            "until [ -s /run/seen ]; do sleep 0.05; done",
            "head -c 2097152 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
        ] {
            console.run(command);
        }
        let (looks, _, moment) = seen(&mut console);
        let witnesses = daemons.each_ref().map(|daemon| daemon.open(WITNESS));
        Self {
            name,
            daemons,
            at: 0,
            console,
            looks,
            no_complaint: NO_COMPLAINT,
            downtime: DOWNTIME,
            blackout: Duration::ZERO,
            moment,
            stood: Duration::ZERO,
            witnesses: Rc::new(RefCell::new(witnesses)),
        }
    }

    /// Takes a snapshot of it while it stands still, and of its disks.
    pub fn snapshot(&mut self, name: &str) -> Saved {
        self.goes_on();
        let command = format!("snapshot create {name} --vm {} --paused", self.name);
        let told = self.home().ctl(&command);
        println!("{told}");
        self.stood_still(&told);
        Saved {
            looks: self.looks,
            moment: self.moment,
            stood: self.stood,
            at: Instant::now(),
        }
    }

    /// Returns the guest that continues from a snapshot in the VM `name`. `restored` is the time
    /// span of the restore.
    pub fn copy(&self, name: &'pair str, saved: &Saved, restored: [Instant; 2]) -> Self {
        let [begun, ended] = restored;
        // Between the snapshot and the restore its time stood still.
        let between = begun.saturating_duration_since(saved.at);
        let moment = Moment {
            clock: saved.moment.clock,
            not_before: saved.moment.not_before + between,
            not_after: saved.moment.not_after + between,
        };
        let mut copy = Self {
            name,
            console: self.home().console(name),
            looks: saved.looks,
            moment,
            stood: saved.stood + ended.saturating_duration_since(begun),
            witnesses: Rc::clone(&self.witnesses),
            ..*self
        };
        copy.goes_on();
        copy
    }

    /// The daemon that has it.
    pub fn home(&self) -> &'pair Daemon<'case> {
        &self.daemons[self.at]
    }

    /// The other one.
    pub fn away(&self) -> &'pair Daemon<'case> {
        &self.daemons[1 - self.at]
    }

    /// Moves the guest to the other daemon. Checks that it continues there and leaves no traces
    /// here.
    pub fn moves(&mut self) {
        let (from, to) = (self.home(), self.away());
        let told = from.migrate(self.name, to, self.downtime);
        println!("{told}");
        self.stood_still(&told);
        let left = from.vms();
        assert!(!left.contains(self.name), "it is not there any more: {left}");
        assert_eq!(from.traces(), "", "nor is anything of it");
        assert!(to.vms().contains(self.name));
        self.at = 1 - self.at;
        self.goes_on();
    }

    /// Records the downtime that a migration or a snapshot reports. The guest's clock may stand
    /// still or continue during it.
    fn stood_still(&mut self, told: &str) {
        let blackout = blackout(told).unwrap_or_else(|| panic!("how long it stood still: {told}"));
        self.blackout = self.blackout.max(blackout);
        self.stood += blackout;
    }

    /// Checks that the guest's clock continues without a step, and that its memory is unchanged.
    pub fn goes_on(&mut self) {
        self.console = self.home().console(self.name);
        let (looks, gap, moment) = seen(&mut self.console);
        let node = self.longest_of_the_nodes();
        println!("{looks} looks at the clock, the longest gap is {gap}0 ms, that of the nodes {node}0 ms");
        assert!(looks >= self.looks, "{looks} is before {}", self.looks);
        let (clock, passed) = moment.since(&self.moment);
        let stood = std::mem::take(&mut self.stood);
        let told = format!(
            "the clock went on by {clock:?} in {passed:?}, of which the guest stood still for {stood:?}"
        );
        println!("{told}");
        assert!(
            clock.is_some_and(|clock| is_no_step(clock, passed, stood + Duration::from_millis(node * 10))),
            "{told}"
        );
        self.moment = moment;
        let blackout = u64::try_from(self.blackout.as_millis() / 10).unwrap_or(u64::MAX);
        let most = LONGEST_GAP + blackout + node;
        assert!(
            gap < most,
            "the guest's clock made a step of {gap}0 ms, not {most}0"
        );
        let on = format!("until [ $(cut -d ' ' -f 1 /run/seen) -gt {looks} ]; do sleep 0.05; done");
        self.console.run(&on);
        self.console.run("md5sum -c /run/sum >/dev/null");
        self.looks = looks;
    }

    /// The longest time for which a node has not run, in hundredths of a second.
    fn longest_of_the_nodes(&self) -> u64 {
        let mut witnesses = self.witnesses.borrow_mut();
        let longest = witnesses.iter_mut().map(|witness| {
            witness.type_line("?");
            witness.until("longest ", PATIENCE);
            let answer = witness.until(";", PATIENCE);
            answer.trim_end_matches(';').parse().expect("hundredths")
        });
        longest.max().unwrap_or(0)
    }

    /// Its kernel has seen no lockup, no stall and no unstable clock; that of a Debian has no warning at all.
    pub fn has_no_complaint(&mut self) {
        let said = self.console.run(self.no_complaint);
        println!("{said}");
    }
}

/// Reads the notes of a guest's watcher, and the guest's current clock.
fn seen(console: &mut Console) -> (u64, u64, Moment) {
    let not_before = Instant::now();
    let text = console.run("cat /run/seen /proc/uptime");
    let not_after = Instant::now();
    let numbers: Vec<u64> = text
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|word| word.parse().ok())
        .collect();
    let [count, gap, seconds, hundredths, ..] = *numbers.as_slice() else {
        panic!("{text:?}");
    };
    let moment = Moment {
        clock: Duration::from_millis(seconds * 1000 + hundredths * 10),
        not_before,
        not_after,
    };
    (count, gap, moment)
}

/// Whether a clock has made no step that has gone on by `clock` while `least` to `most` passed, of which the guest stood still for `stood`. It may have
/// gone on in that time, or stood as well. Two clocks may differ by a hundredth.
fn is_no_step(clock: Duration, [least, most]: [Duration; 2], stood: Duration) -> bool {
    let drift = most / 100;
    clock <= most + drift && clock + stood + HAND_OVER + drift >= least
}

/// Returns the guest's downtime from the output of a migration or a snapshot.
fn blackout(told: &str) -> Option<Duration> {
    let rest = ["stood still for ", "VM paused for "]
        .iter()
        .find_map(|words| Some(told.split_once(words)?.1))?;
    let ms = rest.split(['.', ' ']).next()?;
    Some(Duration::from_millis(ms.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Moment, blackout, is_no_step};

    #[test]
    fn blackout_is_read_from_migration_and_snapshot_output() {
        let told = "the VM runs on 10.78.5.2:7443: 5 bytes were sent, 4 of them memory, in 113482 ms and 7 rounds; the guest stood still for 2474 ms and until \
                    the hand-over was done\nvm/x migrated";
        assert_eq!(blackout(told), Some(Duration::from_millis(2474)));
        let told = "snapshot/x created (100.2Mi written, VM paused for 11516.8 ms)";
        assert_eq!(blackout(told), Some(Duration::from_millis(11516)));
        assert_eq!(blackout("vm/x migrated"), None);
    }

    #[test]
    fn a_clock_goes_on_with_the_time_or_stands_with_the_guest() {
        let ms = Duration::from_millis;
        for (clock, passed, stood, wanted) in [
            (10_000, [9_900, 10_100], 0, true),
            (10_200, [9_900, 10_100], 0, true),
            (10_300, [9_900, 10_100], 0, false),
            // During the downtime the clock continued, or stood still.
            (10_000, [9_900, 10_100], 4_000, true),
            (6_000, [9_900, 10_100], 4_000, true),
            (12_000, [9_900, 10_100], 4_000, false),
            // And it stands in the hand-over.
            (1_000, [9_900, 10_100], 4_000, true),
            (700, [9_900, 10_100], 4_000, false),
            (4_900, [9_900, 10_100], 0, true),
            (4_700, [9_900, 10_100], 0, false),
        ] {
            let found = is_no_step(ms(clock), passed.map(ms), ms(stood));
            assert_eq!(found, wanted, "{clock} {passed:?} {stood}");
        }
    }

    #[test]
    fn time_between_two_moments_has_both_bounds() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let at = |clock, not_before, not_after| Moment {
            clock: second * clock,
            not_before: start + second * not_before,
            not_after: start + second * not_after,
        };
        let (early, late) = (at(100, 10, 11), at(107, 20, 22));
        assert_eq!(late.since(&early), (Some(second * 7), [second * 9, second * 12]));
        assert_eq!(early.since(&late).0, None, "a clock that goes back");
    }
}
