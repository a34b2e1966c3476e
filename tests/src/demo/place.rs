//! Where the demonstration runs: on this machine when it has VT-x or SVM, in the test node otherwise.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::ready::{self, Readiness};
use crate::host::Accel;
use crate::node::{NODE_VARIABLE, Size, newest_package};
use crate::wait::{Deadline, Process};
use crate::{Node, guest, paths};

/// Where commands are run.
pub enum Place {
    /// A test node; with `ours` it was booted for the demonstration and ends with it.
    Node { node: Box<Node>, ours: bool },
    /// This machine: a daemon of our own under a temporary folder, in a network namespace of its own.
    Here(Here),
}

/// The daemon on this machine.
pub struct Here {
    dir: TempDir,
    guests: PathBuf,
    daemon: Child,
}

impl Place {
    /// Chooses and prepares it.
    pub fn choose(mut say: impl FnMut(&str)) -> Result<Place> {
        let guests = guest::images()?;
        if Accel::hardware() {
            say("This machine has hardware virtualization: a private vmmd under a temporary folder");
            return Here::start(guests.tree().join("debian")).map(Place::Here);
        }
        if std::env::var_os(NODE_VARIABLE).is_some() {
            let node = Box::new(Node::get()?);
            return Ok(Place::Node { node, ours: false });
        }
        say(
            "This machine has no VT-x or SVM: booting the test node, which has (emulated), with vmmd's package in it",
        );
        let node = Node::boot("demo", Size::default(), true)?;
        let package = newest_package()?.context("there is no package yet: run `make deb`")?;
        node.install(&package)?;
        Ok(Place::Node {
            node: Box::new(node),
            ours: true,
        })
    }

    /// A folder there that is ours.
    pub fn folder(&self) -> String {
        match self {
            Place::Node { .. } => "/var/tmp/vmmd-demo".into(),
            Place::Here(here) => here.dir.path().join("demo").display().to_string(),
        }
    }

    /// The folder of the Debian guest: disk.raw, vmlinuz, initrd.
    pub fn guests(&self) -> String {
        match self {
            Place::Node { .. } => format!("{}/debian", crate::node::GUESTS_DIR),
            Place::Here(here) => here.guests.display().to_string(),
        }
    }

    /// A shell command to be run there.
    pub fn command(&self, command: &str) -> Command {
        match self {
            Place::Node { node, .. } => {
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
            Place::Node { node, .. } => {
                let mut ssh = node.ssh_command();
                ssh.args(["-t", "--", command]);
                ssh
            }
            Place::Here(here) => here.command(command),
        }
    }

    /// Ends the node or the daemon that the demonstration started.
    pub fn end(self) -> Result<()> {
        match self {
            Place::Node { node, ours: true } => node.stop(),
            Place::Node { .. } => Ok(()),
            Place::Here(here) => here.end(),
        }
    }
}

impl Here {
    fn start(guests: PathBuf) -> Result<Here> {
        let dir = tempfile::Builder::new().prefix("vmmd-demo.").tempdir()?;
        let programs = paths::target_dir().join("release");
        let root = dir.path().display();
        let config = dir.path().join("config.toml");
        fs::write(
            &config,
            format!(
                "state_dir = \"{root}/state\"\nrun_dir = \"{root}/run\"\nlog_dir = \"{root}/log\"\n\
                 vmm = \"{}\"\n",
                programs.join("vmm").display()
            ),
        )?;
        let readiness = Readiness::new(dir.path())?;
        let log = fs::File::create(dir.path().join("vmmd.log"))?;
        // The VM's process has a uid of its own and must reach its program.
        let daemon = Command::new("unshare")
            .arg("--net")
            .arg("--")
            .arg(programs.join("vmmd"))
            .arg("--config")
            .arg(&config)
            .env(ready::VARIABLE, &readiness.path)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("start vmmd")?;
        let here = Here { dir, guests, daemon };
        here.wait_until_it_serves(&readiness)?;
        Ok(here)
    }

    fn wait_until_it_serves(&self, readiness: &Readiness) -> Result<()> {
        // Until it is waited for, a process that has ended keeps its number.
        let daemon = Process::open(self.daemon.id())?.context("vmmd is not there")?;
        readiness.wait(&daemon, Deadline::seconds(60)).with_context(|| {
            let log = fs::read_to_string(self.dir.path().join("vmmd.log")).unwrap_or_default();
            format!("vmmd does not serve: {log}")
        })
    }

    fn command(&self, command: &str) -> Command {
        let mut path = std::ffi::OsString::from(paths::target_dir().join("release"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let mut nsenter = Command::new("nsenter");
        nsenter
            .arg(format!("--net=/proc/{}/ns/net", self.daemon.id()))
            .args(["sh", "-c", command])
            .env("PATH", path)
            .env("VMMD_SOCKET", self.dir.path().join("run/vmmd.sock"));
        nsenter
    }

    fn end(mut self) -> Result<()> {
        self.daemon.kill().context("end vmmd")?;
        self.daemon.wait().context("end vmmd")?;
        Ok(())
    }
}
