//! Context of one end-to-end test: a unique name, and a report on a failure.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::must;
use crate::node::Node;
use crate::wait::{Deadline, tail};

/// How many lines of each log a report shows.
const LINES: usize = 60;

/// One test on a node. When dropped during a panic, it prints diagnostics: the VMs as the daemon
/// reports them, their serial logs, the daemon's journal, and the end of the node's own console.
pub struct Case {
    node: Node,
    name: String,
    /// The journal up to here is another test's.
    since: String,
    /// Commands that [`Self::at_end`] was given.
    at_end: Mutex<Vec<String>>,
}

impl Case {
    /// A test on the node that the environment names. `topic` becomes part of [`Case::name`]: lower-case letters,
    /// digits and dashes.
    #[track_caller]
    pub fn new(topic: &str) -> Case {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let node = must(Node::get());
        let since = node.sh("date +'%F %T.%6N'").trim().to_owned();
        let name = format!(
            "{topic}-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        Case {
            node,
            name,
            since,
            at_end: Mutex::default(),
        }
    }

    /// The node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// A name that no other test uses, for a VM, a file, a bridge.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A copy of the Debian guest's root disk that may be written to; it is removed with the case. The copy takes
    /// some seconds.
    #[track_caller]
    pub fn debian_disk(&self) -> String {
        self.disk(&self.node.guests().debian_disk())
    }

    /// The same of the desktop's.
    #[track_caller]
    pub fn desktop_disk(&self) -> String {
        self.disk(&self.node.guests().desktop("disk.raw"))
    }

    #[track_caller]
    fn disk(&self, from: &str) -> String {
        let copy = format!("{}/root.raw", self.folder());
        self.node.sh(&format!("cp --sparse=always {from} {copy}"));
        copy
    }

    /// Runs a shell command in the node when this is dropped, after a failed test as well: the last one first. Its failure is ignored.
    pub fn at_end(&self, command: impl Into<String>) {
        let mut commands = self.at_end.lock().unwrap_or_else(PoisonError::into_inner);
        commands.push(command.into());
    }

    /// A folder in the node for this test's files; it is removed with the case.
    #[track_caller]
    pub fn folder(&self) -> String {
        let folder = self.folder_path();
        self.node.sh(&format!("mkdir -p {folder}"));
        folder
    }

    /// A bridge in the node, up, for this test's NICs; it is removed with the case.
    #[track_caller]
    pub fn bridge(&self) -> String {
        let name = self.bridge_name();
        self.node.sh(&format!(
            "ip link add {name} type bridge && ip link set {name} up"
        ));
        name
    }

    /// Name of its [`bridge`](Self::bridge), of the two numbers in the case's name: an interface's has at most 15 characters.
    pub fn bridge_name(&self) -> String {
        let mut numbers = self.name.rsplit('-');
        let (count, pid) = (numbers.next().unwrap_or("0"), numbers.next().unwrap_or("0"));
        format!("br{pid}x{count}")
    }

    fn folder_path(&self) -> String {
        format!("/var/tmp/vmmd-tests/{}", self.name)
    }

    /// Returns the report of a failed test.
    pub fn report(&self) -> String {
        let console = std::fs::read_to_string(self.node.machine().console_log()).unwrap_or_default();
        let mut report = format!(
            "── node console ({})\n",
            self.node.machine().console_log().display()
        );
        report.push_str(tail(&console, LINES));
        let script = format!(
            "for log in $(find /var/log/vmmd/vms -name serial.log -newermt '{since}' 2>/dev/null); do \
                 printf '\\n── %s\\n' $log; tail -n {LINES} $log; done; \
             printf '\\n── VMs\\n'; command -v vmmctl >/dev/null && timeout 10 vmmctl get vm -o yaml; \
             printf '\\n── journal of vmmd and its VMs\\n'; \
             journalctl --no-pager -o short-precise --since '{since}' -u 'vmmd*' | tail -n {LINES}; \
             printf '\\n── kernel\\n'; journalctl --no-pager -k --since '{since}' | tail -n {LINES}; true",
            since = self.since
        );
        match self.node.ssh_within(&script, Deadline::seconds(60)) {
            Ok(output) => report.push_str(&output.stdout),
            Err(error) => report.push_str(&format!("\nthe node does not answer: {error:#}\n")),
        }
        report
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("\n══ {} failed\n{}", self.name, self.report());
        }
        // A node that does not answer has been reported, or fails the next test. The test of leftovers reports remains.
        let commands = std::mem::take(self.at_end.get_mut().unwrap_or_else(PoisonError::into_inner));
        for command in commands.iter().rev() {
            let _ = self.node.ssh(command);
        }
        let _ = self.node.ssh(&format!(
            "rm -rf {}; ip link del {} 2>/dev/null",
            self.folder_path(),
            self.bridge_name()
        ));
    }
}
