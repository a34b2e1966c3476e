//! From the guest to the host: each packet is sent straight from the guest's buffers, behind a checked copy of its
//! header.

use std::{io, sync::Arc};

use zerocopy::IntoBytes as _;

use super::{
    config::TRANSMIT,
    header::{HEADER, Header, check},
    stats::NetStats,
};
use crate::{
    GuestMemory,
    net::NetBackend,
    sys::Iovecs,
    virtio::{chain::Chain, device::Progress, fault::Fault, session::Session},
};

/// Sending, from start to drain.
pub(super) struct Sender {
    memory: Arc<GuestMemory>,
    stats: Arc<NetStats>,
    chain: Chain,
    buffers: Iovecs,
    /// The host takes no packets at present; the descriptor will tell.
    pub blocked: bool,
}

impl Sender {
    pub fn new(memory: Arc<GuestMemory>, stats: Arc<NetStats>) -> Self {
        let buffers = Iovecs::new(Arc::clone(&memory));
        Self {
            memory,
            stats,
            chain: Chain::new(),
            buffers,
            blocked: false,
        }
    }

    /// Sends what the guest has, until the host takes no more. After errors of the host (the packets are dropped) the
    /// last one is given, when all is sent.
    pub fn run(&mut self, session: &mut Session, backend: &dyn NetBackend) -> Result<Progress, Fault> {
        let mut failed = None;
        while !self.blocked && session.pop(TRANSMIT, &mut self.chain)? {
            match self.send(session, backend) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    if let Some(queue) = session.queue(TRANSMIT) {
                        queue.unpop(1);
                    }
                    break;
                }
                Ok(()) => {}
                Err(error) => {
                    NetStats::add(&self.stats.send_dropped, 1);
                    failed = Some(error);
                }
            }
            session.add_used(TRANSMIT, self.chain.head(), 0)?;
        }
        match failed {
            Some(error) => Err(Fault::Backend("send a packet", error)),
            None if self.blocked => Ok(Progress::Waiting),
            None => Ok(Progress::Done),
        }
    }

    /// Sends the packet at hand, or drops it because it makes no sense.
    fn send(&mut self, session: &Session, backend: &dyn NetBackend) -> io::Result<()> {
        let length = self.chain.readable_len().saturating_sub(HEADER);
        let checked = match self.chain.read_obj::<Header>(&self.memory, 0) {
            Ok(header) => check(&header, length, session.features()),
            Err(_) => Err("no header"),
        };
        self.buffers.clear();
        let gathered = self.buffers.append(self.chain.readable(), HEADER, length);
        match checked {
            Ok(header) if gathered.is_ok() && self.buffers.fits_one_call() => {
                match backend.send(header.as_bytes(), &mut self.buffers) {
                    // What the host finds wrong with a packet is the guest's doing.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.refuse(session),
                    Err(error) => return Err(error),
                    Ok(()) => {
                        NetStats::add(&self.stats.sent, 1);
                        NetStats::add(&self.stats.sent_bytes, u64::from(length));
                    }
                }
            }
            _ => self.refuse(session),
        }
        Ok(())
    }

    fn refuse(&self, session: &Session) {
        session.count_guest_fault();
        NetStats::add(&self.stats.send_dropped, 1);
    }
}
