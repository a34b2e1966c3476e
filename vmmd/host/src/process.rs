//! A `vmm` process, ours or one that an earlier daemon started, named by a pidfd.

use std::{fs::File, io, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal, waitid,
    },
};
use tokio::{io::unix::AsyncFd, time::sleep};

use crate::{failure::Failure, sys, text};

/// After this time a process that could not be waited for is waited for again.
const RETRY: Duration = Duration::from_secs(1);

/// A process that is watched until it ends.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
}

impl Process {
    /// A process whose pidfd is at hand.
    pub fn new(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            pid,
            pidfd: sys::watch(pidfd)?,
        })
    }

    /// The process that has this pid now.
    pub fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = pidfd_open(raw.ok_or(io::ErrorKind::InvalidInput)?, PidfdFlags::empty())?;
        Self::new(pid, pidfd)
    }

    /// The same process, to be watched by somebody else too.
    pub fn again(&self) -> io::Result<Self> {
        Self::new(self.pid, self.pidfd.get_ref().try_clone()?)
    }

    /// Waits for its end without reaping it; [`Self::status`] does that. Cancel-safe.
    pub async fn gone(&self) {
        while let Err(error) = self.pidfd.readable().await {
            // Its end is not known: its claim stays.
            tracing::error!(%error, pid = self.pid, "wait for a process");
            sleep(RETRY).await;
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        // pidfd_open(2): readable when the process has ended.
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for its end and reaps it if it is a child. Returns the signal that ended it, if known.
    pub async fn ended(&self) -> Option<i32> {
        self.status().await?.terminating_signal()
    }

    /// Waits for its end and reaps it if it is a child. Returns its exit status, if known.
    pub async fn status(&self) -> Option<WaitIdStatus> {
        self.gone().await;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = waitid(
            WaitId::PidFd(std::os::fd::AsFd::as_fd(self.pidfd.get_ref())),
            options,
        );
        status.ok().flatten()
    }

    /// Ends it without asking.
    pub fn kill(&self) {
        if let Err(error) = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL) {
            tracing::debug!(%error, pid = self.pid, "kill");
        }
    }
}

/// Opens a program of the installation. Blocking. Refused as VMM_NOT_FOUND on failure.
pub fn open_program(path: &Path, name: &str) -> Result<File, Failure> {
    File::open(path).map_err(|error| {
        let message = format!(
            "the {name} program cannot be opened ({}): install vmmd again",
            text::words(&error)
        );
        Failure::precondition("VMM_NOT_FOUND", message)
    })
}
