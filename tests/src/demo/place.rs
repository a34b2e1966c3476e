//! Where the demonstration runs: on this machine when it has VT-x or SVM, in a test node otherwise. Two daemons are there, *near* and *far*,
//! which a cable joins.

mod here;
mod node;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::host::Accel;
use crate::two_daemons::tcp_config;
use crate::wait::Deadline;
use crate::{paths, run};

use here::Here;
use node::InNode;
pub use node::images;

/// Addresses of the two daemons on the cable between them (10.78.0.0/30).
const NEAR: &str = "10.78.0.1";
const FAR: &str = "10.78.0.2";
/// Where the far one serves the near one.
pub const FAR_ADDRESS: &str = "10.78.0.2:7443";

/// The network of the guest, which both daemons have, and its gateway.
pub const NETWORK: &str = "10.80.0.0/24";
pub const GATEWAY: &str = "10.80.0.1";

/// Both daemons.
pub enum Place {
    /// In a node that ends with the demonstration.
    Node(InNode),
    /// On this machine: daemons under a temporary folder, in network namespaces of their own.
    Here(Here),
}

/// The folder of the logs and of the picture.
pub fn logs() -> PathBuf {
    paths::run_dir("demo")
}

impl Place {
    /// Chooses and prepares it; in a node the package is installed.
    pub fn choose(package: &Path) -> Result<Place> {
        if Accel::hardware() {
            println!("This machine has hardware virtualization: two daemons under a temporary folder.");
            return Here::start().map(Place::Here);
        }
        println!(
            "This machine has no VT-x or SVM: a test node under QEMU, which emulates SVM, with vmmd's package in it."
        );
        InNode::start(package).map(Place::Node)
    }

    /// The folder there with the image and its kernel.
    pub fn guest(&self) -> String {
        match self {
            Place::Node(_) => crate::node::GUESTS_DIR.to_owned(),
            Place::Here(here) => here.guest.display().to_string(),
        }
    }

    /// Options of `vmmctl` for the far daemon.
    pub fn far(&self) -> String {
        match self {
            Place::Node(_) => format!("--socket {}/run/vmmd.sock", node::FAR_FOLDER),
            Place::Here(here) => format!("--socket {}/far/run/vmmd.sock", here.dir.path().display()),
        }
    }

    /// Options of `vmmctl ssh`: the key that the guest accepts.
    pub fn key(&self) -> Result<String> {
        Ok(match self {
            // root's own key there.
            Place::Node(_) => String::new(),
            Place::Here(_) => format!("-i {} ", crate::debian::ssh_key()?.display()),
        })
    }

    /// A shell command to be run there. `vmmctl` speaks to the near daemon.
    pub fn command(&self, command: &str) -> Command {
        match self {
            Place::Node(InNode { node, .. }) => {
                let mut ssh = node.ssh_command();
                ssh.args(["--", command]);
                ssh
            }
            Place::Here(here) => here.command(command),
        }
    }

    /// The same on the caller's terminal.
    pub fn terminal(&self, command: &str) -> Command {
        match self {
            Place::Node(InNode { node, .. }) => {
                let mut ssh = node.ssh_command();
                ssh.args(["-t", "--", command]);
                ssh
            }
            Place::Here(here) => here.command(command),
        }
    }

    /// Runs a shell command there, which must end with 0, and returns its output.
    pub fn sh(&self, command: &str) -> Result<String> {
        let output = run::output(&mut self.command(command), Deadline::seconds(300))?;
        ensure!(
            output.success(),
            "it ended with {}:\n{}{}",
            output.status,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }

    /// Brings a file from there to this machine.
    pub fn fetch(&self, from: &str, to: &Path) -> Result<()> {
        match self {
            Place::Node(InNode { node, .. }) => node.copy_out(from, to),
            Place::Here(here) => {
                std::fs::copy(here.dir.path().join(from), to)?;
                Ok(())
            }
        }
    }

    /// Writes the logs of the daemons and of the VM to [`logs`].
    pub fn keep_logs(&self) {
        let script = match self {
            Place::Node(_) => format!(
                "journalctl --no-pager -o short-precise -u 'vmmd*'; tail -n +1 $(find /var/log/vmmd {}/log -name '*.log')",
                node::FAR_FOLDER
            ),
            Place::Here(here) => format!("tail -n +1 $(find {} -name '*.log')", here.dir.path().display()),
        };
        // A report of a failure: its own failure would hide that one.
        if let Ok(output) = run::output(&mut self.command(&script), Deadline::seconds(60)) {
            let _ = std::fs::write(logs().join("vmmd.log"), output.stdout);
        }
    }

    /// Ends the node or the daemons.
    pub fn end(self) -> Result<()> {
        match self {
            Place::Node(InNode { node, .. }) => node.stop(),
            Place::Here(_) => Ok(()),
        }
    }
}
