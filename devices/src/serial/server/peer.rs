//! Who types and reads: the terminal, and clients.

use std::{os::fd::OwnedFd, sync::Arc};

use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use super::super::{output::Output, port::Port};

/// A sender and reader: the terminal or a client. What an edge-triggered event said is noted here until it is used up.
pub(super) struct Peer {
    pub(super) id: u64,
    pub(super) input: Option<Input>,
    /// Gone when nobody reads any more.
    pub(super) output: Option<Output>,
    pub(super) client: bool,
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
