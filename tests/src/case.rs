//! Context of one end-to-end test: a unique name, and a report on a failure.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;

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
}

impl Case {
    /// A test on the node that the environment names. `topic` becomes part of [`Case::name`]: lower-case letters,
    /// digits and dashes.
    pub fn new(topic: &str) -> Result<Case> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let node = Node::get()?;
        let since = node.sh("date +'%F %T.%6N'")?.trim().to_owned();
        let name = format!(
            "{topic}-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        Ok(Case { node, name, since })
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
    pub fn debian_disk(&self) -> Result<String> {
        self.disk(&self.node.guests().debian_disk())
    }

    /// The same of the desktop's.
    pub fn desktop_disk(&self) -> Result<String> {
        self.disk(&self.node.guests().desktop("disk.raw"))
    }

    fn disk(&self, from: &str) -> Result<String> {
        let copy = format!("{}/root.raw", self.folder()?);
        self.node.sh(&format!("cp --sparse=always {from} {copy}"))?;
        Ok(copy)
    }

    /// A folder in the node for this test's files; it is removed with the case.
    pub fn folder(&self) -> Result<String> {
        let folder = self.folder_path();
        self.node.sh(&format!("mkdir -p {folder}"))?;
        Ok(folder)
    }

    /// A bridge in the node, up, for this test's NICs; it is removed with the case.
    pub fn bridge(&self) -> Result<String> {
        let name = self.bridge_name();
        self.node.sh(&format!(
            "ip link add {name} type bridge && ip link set {name} up"
        ))?;
        Ok(name)
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
        // A node that does not answer has been reported, or fails the next test.
        let _ = self.node.ssh(&format!(
            "rm -rf {}; ip link del {} 2>/dev/null",
            self.folder_path(),
            self.bridge_name()
        ));
    }
}
