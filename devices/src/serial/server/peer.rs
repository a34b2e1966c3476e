//! Peers of the server: the terminal, and clients.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use rustix::io::Errno;
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
};

use super::super::{history::History, output::Output, port::Port};

/// A sender and reader: the terminal or a client. It records the state of edge-triggered events
/// until they are handled.
pub(super) struct Peer {
    pub(super) id: u64,
    pub(super) input: Option<Input>,
    /// `None` when the reader is gone.
    pub(super) output: Option<Output>,
    pub(super) room: Room,
    pub(super) client: bool,
}

/// Registration for writability of an output's descriptor. The kernel is asked for it only while
/// the output is full: otherwise each read of a client would wake the thread.
pub(super) struct Room {
    /// How the descriptor is watched.
    token: u64,
    interest: EventSet,
    /// The kernel watches for writability.
    awaited: bool,
}

impl Room {
    /// Creates the registration of a descriptor that is watched by `token` for `interest`.
    pub(super) fn new(token: u64, interest: EventSet) -> Self {
        Self {
            token,
            interest,
            awaited: false,
        }
    }

    fn wait_for(&mut self, output: &Output, epoll: &Epoll) -> io::Result<()> {
        if self.awaited != output.writable {
            return Ok(());
        }
        let interest = match output.writable {
            true => self.interest,
            false => self.interest | EventSet::OUT,
        };
        epoll.ctl(
            ControlOperation::Modify,
            output.fd().as_raw_fd(),
            EpollEvent::new(interest, self.token),
        )?;
        self.awaited = !output.writable;
        Ok(())
    }
}

pub(super) struct Input {
    pub(super) fd: Arc<OwnedFd>,
    /// The last read did not say that it would block.
    pub(super) readable: bool,
    pub(super) escape: Option<(u8, EventFd)>,
}

impl Peer {
    pub(super) fn covers(&self, id: u64) -> bool {
        id == self.id || id == self.id.saturating_add(1)
    }

    /// Writes the output before `until`, as far as the descriptor takes it.
    pub(super) fn pump(&mut self, history: &History, scratch: &mut [u8], until: u64, epoll: &Epoll) {
        let Some(output) = &mut self.output else { return };
        let pumped = output.pump(history, scratch, until);
        if pumped.and_then(|()| self.room.wait_for(output, epoll)).is_err() {
            self.output = None;
        }
    }
}

impl Input {
    /// Reads once into `space`, which the port has room for; says whether more may come.
    pub(super) fn pump(&mut self, space: &mut [u8], port: &dyn Port) -> bool {
        let count = match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut *space)) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(Errno::AGAIN) => {
                self.readable = false;
                return true;
            }
            Err(_) => return false,
        };
        let typed = space.get(..count).unwrap_or_default();
        match &self.escape {
            Some((escape, event)) if typed.contains(escape) => {
                // It can only fail when the counter is full, and then it is readable.
                let _ = event.write(1);
                for part in typed.split(|byte| byte == escape) {
                    port.receive(part);
                }
            }
            _ => {
                port.receive(typed);
            }
        }
        true
    }
}
