//! A guest that looks at its clock, has something in its memory, and may be moved.

use super::Daemon;
use crate::Case;
use crate::node::Stream;
use crate::vm::{BOOT, Console, VmSpec};
use crate::wait::Deadline;

/// How long the guest's shell may take to answer, in a slow node.
pub const PATIENCE: u64 = 60;
/// A whole Debian takes one to three minutes to boot in an emulated node.
const DEBIAN_BOOT: u64 = 300;
/// Longest time between two looks at its clock that the guest may see beside a blackout, in hundredths of a second: it has to share the node's
/// processors with what encrypts its memory.
const LONGEST_GAP: u64 = 300;
/// What a guest that rewrites its memory may be stopped for.
pub const DOWNTIME: &str = "--downtime-limit 2s";
/// For its kernel's command line. Memory that is free is zero, and not sent: an emulated node encrypts and decrypts a megabyte or two in a second.
pub const SMALL: &str = "init_on_free=1";

/// Looks at its clock without end, and writes down how often, and the longest time between two looks in hundredths of a second. A clock that goes back
/// counts as one that made a large step.
const WATCHER: &str = "{ (n=0; last=0; max=0; while :; do \
     read now rest </proc/uptime; now=${now%.*}${now#*.}; gap=$((now-last)); [ $gap -lt 0 ] && gap=99999; \
     [ $last -gt 0 ] && [ $gap -gt $max ] && max=$gap; last=$now; n=$((n+1)); \
     echo $n $max >/run/seen.new; mv /run/seen.new /run/seen; sleep 0.02; done) >/dev/null 2>&1 & }";

/// Fails when the guest's kernel has said that something is wrong with it.
const NO_COMPLAINT: &str = "! dmesg | grep -iE 'lockup|stall|unstable|BUG:|WARNING:|hung'";
/// The same for a Debian, whose dmesg knows what is a warning and what is worse.
const NO_WARNING: &str =
    "dmesg -l emerg,alert,crit,err,warn >/run/warnings; cat /run/warnings; [ ! -s /run/warnings ]";

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
    /// What it may be stopped for by a move, and whether it may be slowed.
    downtime: &'static str,
    /// The longest time for which it was stopped, in hundredths of a second.
    blackout: u64,
}

impl<'pair, 'case> Traveller<'pair, 'case> {
    /// Starts a busybox guest at the first daemon.
    pub fn boot(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec).expect("start");
        let mut console = daemons[0].console(name).expect("console");
        console.until("GUEST-READY", BOOT).expect("boot");
        Self::watching(name, daemons, console)
    }

    /// Starts a whole Debian, and logs in at its serial console.
    pub fn boot_debian(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], spec: &VmSpec) -> Self {
        daemons[0].start_vm(name, spec).expect("start");
        let mut console = daemons[0].console(name).expect("console");
        for (asked, answer) in [("login:", "root"), ("Password:", "vmmd")] {
            console.until(asked, DEBIAN_BOOT).expect(asked);
            console.type_line(answer).expect("log in");
        }
        console.attached_again(PATIENCE).expect("a shell");
        // Without editing of lines, whose echo is long.
        console.type_line("exec sh").expect("a plain shell");
        // What it has read to boot need not be sent.
        console
            .run("sync; echo 3 >/proc/sys/vm/drop_caches", PATIENCE)
            .expect("less memory in use");
        Self {
            no_complaint: NO_WARNING,
            // What it is busy with may change memory faster than a slow node encrypts it.
            downtime: "--downtime-limit 5s --force",
            ..Self::watching(name, daemons, console)
        }
    }

    fn watching(name: &'pair str, daemons: &'pair [Daemon<'case>; 2], mut console: Console) -> Self {
        // What this kernel says of the node's processor when it boots is no complaint about a move.
        for command in [
            "dmesg -c >/dev/null",
            WATCHER,
            "until [ -s /run/seen ]; do sleep 0.05; done",
            "head -c 2097152 /dev/urandom >/run/data; md5sum /run/data >/run/sum",
        ] {
            console.run(command, PATIENCE).expect(command);
        }
        Self {
            name,
            daemons,
            at: 0,
            console,
            looks: 0,
            no_complaint: NO_COMPLAINT,
            downtime: DOWNTIME,
            blackout: 0,
        }
    }

    /// How often it has looked at its clock, as far as that is known here.
    pub fn looks(&self) -> u64 {
        self.looks
    }

    /// What it was after so many looks at its clock, in the VM of that name.
    pub fn copy(&self, name: &'pair str, looks: u64) -> Self {
        let mut copy = Self {
            name,
            console: self.home().console(name).expect("console"),
            looks,
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

    /// Moves it to the other daemon, where it goes on; nothing stays behind.
    pub fn moves(&mut self) {
        let (from, to) = (self.home(), self.away());
        let told = from.migrate(self.name, to, self.downtime).expect("migrate");
        println!("{told}");
        self.stood_still(&told);
        let left = from.vms().expect("list");
        assert!(!left.contains(self.name), "it is not there any more: {left}");
        assert_eq!(from.traces().expect("look"), "", "nor is anything of it");
        assert!(to.vms().expect("list").contains(self.name));
        self.at = 1 - self.at;
        self.goes_on();
    }

    /// Takes note of for how long it was stopped, as a migration or a snapshot tells it: its clock may go on by as much.
    pub fn stood_still(&mut self, told: &str) {
        let blackout = blackout(told).unwrap_or_else(|| panic!("how long it stood still: {told}"));
        self.blackout = self.blackout.max(blackout);
    }

    /// Its clock goes on from where it was, and its memory is what it was.
    pub fn goes_on(&mut self) {
        self.console = self.home().console(self.name).expect("console");
        let (looks, gap) = self.seen();
        println!("{looks} looks at the clock, the longest gap is {gap}0 ms");
        assert!(looks >= self.looks, "{looks} is before {}", self.looks);
        let most = LONGEST_GAP + self.blackout;
        assert!(
            gap < most,
            "the guest's clock made a step of {gap}0 ms, not {most}0"
        );
        let on = format!("until [ $(cut -d ' ' -f 1 /run/seen) -gt {looks} ]; do sleep 0.05; done");
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

    /// Its kernel has seen no lockup, no stall and no unstable clock; that of a Debian has no warning at all.
    pub fn has_no_complaint(&mut self) {
        self.console
            .run(self.no_complaint, PATIENCE)
            .expect("the guest has no complaint");
    }
}

/// For how long a guest stood still, as a migration or a snapshot tells it, in hundredths of a second.
fn blackout(told: &str) -> Option<u64> {
    let rest = ["stood still for ", "VM paused for "]
        .iter()
        .find_map(|words| Some(told.split_once(words)?.1))?;
    let ms = rest.split(['.', ' ']).next()?;
    Some(ms.parse::<u64>().ok()? / 10)
}

/// The node's end of a connection to a guest: each line that it sends has to come back.
pub struct Connection<'case> {
    case: &'case Case,
    folder: String,
    stream: Stream,
}

impl<'case> Connection<'case> {
    /// Where the node is on the bridge.
    pub const NODE: &'static str = "10.78.200.1/24";
    /// Where the guest is.
    pub const GUEST: &'static str = "10.78.200.2";

    /// To a guest at this console.
    pub fn open(case: &'case Case, console: &mut Console) -> Self {
        let echo = "busybox mkfifo /tmp/echo; { (nc -l -p 7 </tmp/echo | cat >/tmp/echo) >/dev/null 2>&1 & }; \
                    until busybox netstat -lnt | grep -q :7; do sleep 0.1; done";
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
    pub fn goes_on(&self) {
        let count = format!("$(cat {}/count 2>/dev/null || echo 0)", self.folder);
        let on = format!(
            "before={count}; timeout {PATIENCE} sh -c 'until [ {count} -gt $0 ]; do sleep 0.1; done' $before && echo {count} lines came back"
        );
        let told = self.case.node().sh(&on).expect("what the node says comes back");
        println!("{}", told.trim());
    }

    /// Ends it; each line has come back.
    pub fn hang_up(mut self) {
        self.case
            .node()
            .sh(&format!("touch {}/hang-up", self.folder))
            .expect("hang up");
        let deadline = Deadline::seconds(PATIENCE);
        self.stream.until("CONNECTION: ", deadline).expect("the end");
        assert_eq!(self.stream.until(";", deadline).expect("how it ended"), "whole;");
    }
}

#[cfg(test)]
mod tests {
    use super::blackout;

    #[test]
    fn a_blackout_is_read_from_what_is_told_of_a_migration_or_a_snapshot() {
        let told = "the VM runs on 10.78.5.2:7443: 5 bytes were sent, 4 of them memory, in 113482 ms and 7 rounds, the guest stood still for 2474 ms and the \
                    hand-over\nvm/x migrated";
        assert_eq!(blackout(told), Some(247));
        let told = "snapshot/x created (100.2Mi written, VM paused for 11516.8 ms)";
        assert_eq!(blackout(told), Some(1151));
        assert_eq!(blackout("vm/x migrated"), None);
    }
}
