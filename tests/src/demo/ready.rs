//! Waiting for a daemon's READY=1 (sd_notify(3)) as systemd does.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::wait::{Deadline, Process, Which, either_readable};

/// Environment variable with the path of the socket.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// Where a daemon says that it is ready.
pub struct Readiness {
    socket: UnixDatagram,
    /// To be given to the daemon as [`VARIABLE`].
    pub path: PathBuf,
}

impl Readiness {
    /// A socket in `folder`.
    pub fn new(folder: &Path) -> Result<Readiness> {
        let path = folder.join("notify.sock");
        let socket = UnixDatagram::bind(&path).with_context(|| format!("bind {}", path.display()))?;
        socket.set_nonblocking(true).context("notify socket")?;
        Ok(Readiness { socket, path })
    }

    /// Waits until `daemon` is ready; fails when it ends or the deadline passes first.
    pub fn wait(&self, daemon: &Process, deadline: Deadline) -> Result<()> {
        let mut message = [0; 4096];
        loop {
            match either_readable(&self.socket, daemon, deadline)? {
                Some(Which::First) => {}
                Some(Which::Second) => bail!("it ended"),
                None => bail!("it was not ready within {deadline}"),
            }
            let length = match self.socket.recv(&mut message) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                received => received.context("notify socket")?,
            };
            let lines = message.get(..length).unwrap_or_default();
            if lines.split(|byte| *byte == b'\n').any(|line| line == b"READY=1") {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn start(program: &str, argument: &str) -> (Child, Process) {
        let child = Command::new(program).arg(argument).spawn().unwrap();
        let process = Process::open(child.id()).unwrap().unwrap();
        (child, process)
    }

    #[test]
    fn only_ready_is_ready() {
        let folder = tempfile::tempdir().unwrap();
        let readiness = Readiness::new(folder.path()).unwrap();
        let (mut child, process) = start("sleep", "600");
        let say = |text: &[u8]| {
            let socket = UnixDatagram::unbound().unwrap();
            socket.send_to(text, &readiness.path).unwrap();
        };
        say(b"STATUS=READY=1 soon");
        let error = readiness
            .wait(&process, Deadline::after(std::time::Duration::from_millis(20)))
            .unwrap_err();
        assert!(error.to_string().contains("not ready"), "{error}");
        say(b"STATUS=serving\nREADY=1\n");
        readiness.wait(&process, Deadline::seconds(60)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_daemon_that_ends_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let readiness = Readiness::new(folder.path()).unwrap();
        let (mut child, process) = start("sleep", "0");
        let error = readiness.wait(&process, Deadline::seconds(60)).unwrap_err();
        assert_eq!(error.to_string(), "it ended");
        child.wait().unwrap();
    }
}
