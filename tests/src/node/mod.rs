//! A test node: booting it, talking to it, ending it.

mod cable;
mod emulator;
mod image;
mod install;
mod keeper;
mod lost;
mod machine;
mod monitor;
mod packages;
mod ssh;
mod stream;
mod unit;

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};

pub use cable::{CABLE, Cable};
pub use image::NodeImage;
pub use install::{PACKAGE, SCREENS, newest_package};
pub use keeper::{KEEPER_VARIABLE, Keeper};
pub use lost::{RUNNER_VARIABLE, SECOND, guest_lost, retried_log, run_test};
pub use machine::{Machine, Size};
pub use packages::{INSTALL, Packages};
pub use ssh::{Connection, DAEMON_SOCKET, Forward};
pub use stream::Stream;
pub use unit::Killed;

use crate::debian::ssh_key;
pub use crate::guest::{GUESTS_DIR, Guests, Kernel};
use crate::run::Output;
use crate::wait::{Deadline, tail};
use crate::{guest, must, paths};

/// The environment variable that names the folder of the node which tests use.
pub const NODE_VARIABLE: &str = "VMMD_NODE";

/// The name of the node that `node up` keeps running for a developer.
pub const DEFAULT_NAME: &str = "dev";

/// The images of the node and of the guests, built beside each other as far as they are not there yet.
pub fn images() -> Result<(NodeImage, guest::Images)> {
    image_and(guest::images)
}

/// The image of the node, and what `guests` builds beside it.
pub fn image_and<T>(guests: impl FnOnce() -> Result<T>) -> Result<(NodeImage, T)> {
    std::thread::scope(|scope| {
        let node = scope.spawn(NodeImage::get);
        let guests = guests()?;
        let node = node
            .join()
            .map_err(|_| anyhow!("the thread that builds the node image panicked"))??;
        Ok((node, guests))
    })
}

/// A running node.
#[derive(Clone, Debug)]
pub struct Node {
    machine: Machine,
    connection: Connection,
}

impl Node {
    /// The node that the tests are to use: the one that `VMMD_NODE` names, else the developer's. Waits for one that a [`Keeper`] boots.
    pub fn get() -> Result<Node> {
        let dir = match std::env::var_os(NODE_VARIABLE) {
            Some(dir) => PathBuf::from(dir),
            None => paths::run_dir(DEFAULT_NAME),
        };
        let kept = keeper::ask();
        if let Some(node) = Self::attach(&dir)? {
            return Ok(node);
        }
        if let Some(failed) = Machine::failed(&dir)? {
            let why = kept
                .err()
                .map(|error| format!(" ({error:#})"))
                .unwrap_or_default();
            let console = fs::read_to_string(failed.console_log()).unwrap_or_default();
            bail!(
                "the test node {} failed{why}; its console ends with:\n{}",
                failed.name,
                tail(&console, 60)
            );
        }
        kept?;
        bail!(
            "no test node runs in {}: start one with `make node-up`",
            dir.display()
        )
    }

    /// The running node whose folder is `dir`.
    pub fn attach(dir: &Path) -> Result<Option<Node>> {
        Ok(Machine::load(dir)?.map(|machine| Node {
            connection: Connection::of(&machine),
            machine,
        }))
    }

    /// Boots the node `name`, which must not run yet, and first builds its missing images. With
    /// `tied` the node ends with this process. vmmd is not installed yet: see [`Node::install`].
    pub fn boot(name: &str, size: Size, tied: bool) -> Result<Node> {
        Self::boot_with(name, size, tied, || {
            let (image, guests) = images()?;
            Ok((image, guests.disk()))
        })
    }

    /// Like [`Node::boot`], with other images: `images` returns that of the node, and the file system that the node mounts at [`GUESTS_DIR`].
    pub fn boot_with(
        name: &str,
        size: Size,
        tied: bool,
        images: impl FnOnce() -> Result<(NodeImage, PathBuf)>,
    ) -> Result<Node> {
        let dir = paths::run_dir(name);
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        // Held until the node is up or has failed: of two callers one boots it, the other finds it running.
        let lock = File::create(dir.join("lock"))?;
        lock.lock().context("wait for another boot of this node")?;
        let (image, guests) = images()?;
        let start = || Machine::start(name, &dir, &image, Some(&guests), size, tied);
        let mut started = start();
        for _ in 0..keeper::REPLACEMENTS {
            if started.is_ok() {
                break;
            }
            let Some(signature) = keeper::signature(&dir.join("console.log")) else {
                break;
            };
            eprintln!("node: the emulator lost the node while it booted ({signature}): once more");
            started = start();
        }
        let machine = started?;
        let connection = Connection::of(&machine);
        let node = Node { machine, connection };
        if let Err(error) = node.connection.open(&ssh_key()?, &dir.join("ssh.log")) {
            node.stop()?;
            return Err(error);
        }
        Ok(node)
    }

    /// Ends the node at once. The content of its disk is lost; its console log stays in its folder.
    pub fn stop(&self) -> Result<()> {
        self.connection.close()?;
        self.machine.stop()
    }

    /// The folder of its logs.
    pub fn dir(&self) -> &Path {
        &self.machine.dir
    }

    /// The machine under it.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Runs a shell command in the node and returns its output, for any exit status. Gives up after
    /// five minutes; [`Node::ssh_within`] has another limit.
    pub fn ssh(&self, command: &str) -> Result<Output> {
        self.ssh_within(command, Deadline::seconds(300))
    }

    /// Like [`Node::ssh`], with a deadline.
    pub fn ssh_within(&self, command: &str, deadline: Deadline) -> Result<Output> {
        self.connection.output(command, deadline)
    }

    /// Runs a shell command in the node, which must end with 0, and returns its standard output.
    #[track_caller]
    pub fn sh(&self, command: &str) -> String {
        must(self.try_sh(command))
    }

    /// Like [`Node::sh`], for a caller that handles the failure.
    pub fn try_sh(&self, command: &str) -> Result<String> {
        self.try_sh_within(command, Deadline::seconds(300))
    }

    /// Like [`Node::sh`], with a deadline.
    #[track_caller]
    pub fn sh_within(&self, command: &str, deadline: Deadline) -> String {
        must(self.try_sh_within(command, deadline))
    }

    /// Like [`Node::try_sh`], with a deadline.
    pub fn try_sh_within(&self, command: &str, deadline: Deadline) -> Result<String> {
        let output = self.ssh_within(command, deadline)?;
        ensure!(
            output.success(),
            "`{command}` in the node ended with {}:\n{}{}",
            output.status,
            output.stdout,
            output.stderr
        );
        Ok(output.stdout)
    }

    /// An `ssh` command to this node, to be given a remote command and spawned by the caller.
    pub fn ssh_command(&self) -> Command {
        self.connection.command()
    }

    /// Runs a shell command in the node whose output is followed while it runs. It is ended with the returned value.
    #[track_caller]
    pub fn stream(&self, command: &str) -> Stream {
        must(Stream::spawn(self.ssh_command().args(["--", command])))
    }

    /// Follows a text file in the node from its beginning, such as a serial log. It need not exist yet.
    #[track_caller]
    pub fn follow(&self, file: &str) -> Stream {
        self.stream(&format!("exec tail -n +1 -F '{file}' 2>/dev/null"))
    }

    /// Copies a file into the node, keeping its mode, in one step.
    pub fn copy_in(&self, from: &Path, to: &str) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(from)
            .with_context(|| format!("open {}", from.display()))?
            .permissions()
            .mode();
        self.connection
            .copy_in(from, to, mode & 0o7777, Deadline::seconds(300))
    }

    /// Copies a file out of the node.
    pub fn copy_out(&self, from: &str, to: &Path) -> Result<()> {
        self.connection.copy_out(from, to, Deadline::seconds(300))
    }

    /// A port of this machine that leads to a TCP address in the node.
    pub fn forward(&self, address: &str) -> Result<Forward> {
        self.connection.forward(address)
    }

    /// Makes a port of the node's loopback interface lead to the same one of this machine's, where a test serves something.
    pub fn bring_port(&self, port: u16) -> Result<Forward> {
        self.bring_address(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
    }

    /// Makes a port of the node's loopback interface lead to an address of this machine with the same port.
    pub fn bring_address(&self, here: SocketAddrV4) -> Result<Forward> {
        self.connection.bring_address(here)
    }

    /// A socket on this machine that leads to vmmd's socket in the node: connect the gRPC client to it.
    pub fn grpc_socket(&self) -> PathBuf {
        self.connection.grpc.clone()
    }

    /// Where the kernels, initrds and disks of the guests are in the node.
    pub fn guests(&self) -> Guests {
        Guests
    }
}

/// `text` as one word of a shell command.
pub fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn a_quoted_text_comes_out_of_a_shell_as_it_went_in() {
        let text = "it's $HOME `x` \"y\" \\ \n*";
        let output = std::process::Command::new("sh")
            .args(["-c", &format!("printf %s {}", quote(text))])
            .output()
            .expect("sh");
        assert_eq!(output.stdout, text.as_bytes());
    }
}
