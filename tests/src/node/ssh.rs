//! One ssh connection to a node, shared by everything that talks to it: a command costs a round trip, no handshake.

use std::fs::{self, File};
use std::net::{SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::machine::Machine;
use crate::run::{self, Output};
use crate::wait::{Deadline, tail};

/// Where the daemon listens in the node.
pub const DAEMON_SOCKET: &str = "/run/vmmd/vmmd.sock";

/// The connection. The `ssh` process behind it lives as long as the node does.
#[derive(Clone, Debug)]
pub struct Connection {
    control: PathBuf,
    /// A socket here that leads to the daemon's in the node.
    pub grpc: PathBuf,
    port: u16,
}

impl Connection {
    /// The connection of a running node, whether it is open or not.
    pub fn of(machine: &Machine) -> Connection {
        Connection {
            control: machine.sockets.join("ssh.sock"),
            grpc: machine.sockets.join("vmmd.sock"),
            port: machine.ssh_port,
        }
    }

    /// Opens it, with the forward to the daemon's socket.
    pub fn open(&self, key: &Path, log: &Path) -> Result<()> {
        let mut forward = self.grpc.clone().into_os_string();
        forward.push(":");
        forward.push(DAEMON_SOCKET);
        let log_file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        // With -f ssh goes to the background when the connection and the forward stand.
        let status = self
            .base()
            .args([
                "-f",
                "-N",
                "-M",
                "-o",
                "ControlPersist=yes",
                "-o",
                "ExitOnForwardFailure=yes",
            ])
            .args([
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                "UserKnownHostsFile=/dev/null",
            ])
            .args([
                "-o",
                "IdentitiesOnly=yes",
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=30",
                "-o",
                "LogLevel=ERROR",
            ])
            .arg("-i")
            .arg(key)
            .arg("-L")
            .arg(forward)
            .args(["-p", &self.port.to_string(), "root@127.0.0.1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log_file)
            .status()
            .context("start ssh")?;
        ensure!(
            status.success(),
            "ssh to the node: {}",
            fs::read_to_string(log).unwrap_or_default().trim()
        );
        Ok(())
    }

    fn base(&self) -> Command {
        let mut command = Command::new("ssh");
        command.args(["-F", "none", "-S"]).arg(&self.control);
        command
    }

    /// `ssh` on this connection, without a remote command yet.
    pub fn command(&self) -> Command {
        let mut command = self.base();
        // Only the shared connection: when it is gone, the node is.
        command.args([
            "-o",
            "ControlMaster=no",
            "-o",
            "ProxyCommand=false",
            "-p",
            &self.port.to_string(),
        ]);
        command.arg("root@127.0.0.1");
        command
    }

    /// Runs a shell command in the node.
    pub fn output(&self, command: &str, deadline: Deadline) -> Result<Output> {
        let output = run::output(self.command().args(["--", command]), deadline)?;
        self.lost(&output)?;
        Ok(output)
    }

    /// Writes `from` to the file `to` in the node with mode `mode`, replacing it in one step.
    pub fn copy_in(&self, from: &Path, to: &str, mode: u32, deadline: Deadline) -> Result<()> {
        let input = File::open(from).with_context(|| format!("open {}", from.display()))?;
        let script =
            // Two tests may bring the same file at once.
            format!("part=$(mktemp '{to}.XXXXXX') && cat > $part && chmod {mode:o} $part && mv -f $part '{to}'");
        let output = run::output_with_input(
            self.command().args(["--", &script]),
            Some(Box::new(input)),
            deadline,
        )?;
        self.lost(&output)?;
        ensure!(
            output.success(),
            "copy {} to {to} in the node: {}",
            from.display(),
            output.stderr.trim()
        );
        Ok(())
    }

    /// Reads the file `from` in the node into `to`.
    pub fn copy_out(&self, from: &str, to: &Path, deadline: Deadline) -> Result<()> {
        let file = File::create(to).with_context(|| format!("create {}", to.display()))?;
        let mut child = self
            .command()
            .args(["--", &format!("cat '{from}'")])
            .stdin(Stdio::null())
            .stdout(file)
            .spawn()?;
        let process = crate::wait::Process::open(child.id())?.context("ssh ended at once")?;
        if !process.wait_exit(deadline)? {
            child.kill()?;
            child.wait()?;
            bail!("copying {from} out of the node did not end within {deadline}");
        }
        ensure!(child.wait()?.success(), "copying {from} out of the node failed");
        Ok(())
    }

    /// ssh ends with 255 when it has no connection (and when the command did).
    fn lost(&self, output: &Output) -> Result<()> {
        if output.status.code() == Some(255) && !self.is_open() {
            bail!(
                "the connection to the node is gone: {}",
                tail(&output.stderr, 5).trim()
            );
        }
        Ok(())
    }

    /// Whether the shared connection answers.
    pub fn is_open(&self) -> bool {
        run::output(
            self.base().args(["-O", "check", "root@127.0.0.1"]),
            Deadline::seconds(10),
        )
        .is_ok_and(|output| output.success())
    }

    /// Makes a port of this machine lead to a TCP address in the node.
    pub fn forward(&self, address: &str) -> Result<Forward> {
        // ssh cannot choose a port for this direction: one that is free now is asked for.
        let free = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
        let here = free.local_addr()?;
        drop(free);
        self.route("-L", format!("{here}:{address}"), here.port())
    }

    /// Makes a port of the node's loopback interface lead to this address of this machine, which has the same port.
    pub fn bring_address(&self, here: SocketAddrV4) -> Result<Forward> {
        let port = here.port();
        self.route("-R", format!("127.0.0.1:{port}:{here}"), port)
    }

    fn route(&self, direction: &'static str, route: String, port: u16) -> Result<Forward> {
        let forward = Forward {
            connection: self.clone(),
            direction,
            route,
            port,
        };
        let output = forward.control("forward")?;
        ensure!(
            output.success(),
            "forward {}: {}",
            forward.route,
            output.stderr.trim()
        );
        Ok(forward)
    }

    /// Closes it.
    pub fn close(&self) -> Result<()> {
        run::output(
            self.base().args(["-O", "exit", "root@127.0.0.1"]),
            Deadline::seconds(10),
        )
        .map(drop)
    }
}

/// A port of 127.0.0.1 that leads to an address in the node, or one there that leads to this machine, until this is dropped.
#[derive(Debug)]
pub struct Forward {
    connection: Connection,
    /// ssh's option.
    direction: &'static str,
    /// Route in ssh's notation.
    route: String,
    /// The port.
    pub port: u16,
}

impl Forward {
    fn control(&self, command: &str) -> Result<Output> {
        let mut ssh = self.connection.base();
        ssh.args(["-O", command, self.direction, &self.route, "root@127.0.0.1"]);
        run::output(&mut ssh, Deadline::seconds(30))
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // It ends with the connection at the latest.
        let _ = self.control("cancel");
    }
}
