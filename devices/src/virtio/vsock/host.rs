//! The host's side: ends of connections that other threads give to the worker.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::virtio::stream::is_hung_up;

/// Most ends that wait for the worker, which is quiet while the guest has no driver.
const MAX_WAITING: usize = 64;

/// Role of the host's end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It connects to a port of the guest.
    Connect,
    /// It waits for one connection of the guest to a port of the host.
    Accept,
}

/// The host's end of a connection.
#[derive(Debug)]
pub(super) struct HostEnd {
    pub direction: Direction,
    pub port: u32,
    pub socket: OwnedFd,
}

/// Gives ends of connections to the worker.
#[derive(Debug)]
pub struct VsockHost {
    waiting: Mutex<Vec<HostEnd>>,
    /// Readable while ends wait.
    event: EventFd,
}

impl VsockHost {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            event: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
        })
    }

    /// Opens one connection. `port` is the guest's, or the one of the host that accepts. `socket` is a
    /// connected stream socket that does not block.
    ///
    /// The socket sends one byte of zero when the connection is established, and then the guest's data.
    /// It is closed when the guest refuses the connection, and when there are too many. The other end
    /// is closed to give up.
    ///
    /// # Errors
    ///
    /// Fails when too many connections wait for a driver in the guest.
    pub fn open(&self, direction: Direction, port: u32, socket: OwnedFd) -> io::Result<()> {
        let mut waiting = self.lock();
        waiting.retain(|end| !is_hung_up(&end.socket));
        if waiting.len() >= MAX_WAITING {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        waiting.push(HostEnd {
            direction,
            port,
            socket,
        });
        self.event.write(1)
    }

    /// Takes the ends that wait.
    pub(super) fn take(&self) -> Vec<HostEnd> {
        let mut waiting = self.lock();
        // An empty counter is no failure.
        let _empty = self.event.read();
        std::mem::take(&mut *waiting)
    }

    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    fn lock(&self) -> MutexGuard<'_, Vec<HostEnd>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
