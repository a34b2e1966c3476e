//! From the host to the guest.
//!
//! The host's packets are read straight into the guest's buffers. How long the next one is can't be known before, so
//! as many buffers are put together as the longest one needs; those that it did not need are kept for the next. When the
//! driver has buffers left, but not that many, a packet is read into memory of our own first and copied when it fits.

use std::{collections::VecDeque, io, sync::Arc};

use super::{
    config::RECEIVE,
    header::{HEADER, MAX_FRAME, NUM_BUFFERS},
    stats::NetStats,
};
use crate::{
    GuestMemory,
    net::NetBackend,
    state::{StateError, check, message, narrow},
    sys::Iovecs,
    virtio::{chain::Chain, device::Progress, fault::Fault, session::Session},
};

/// Failures of the host in a row after which only an event makes it be asked again.
const MAX_FAILURES: u32 = 16;

/// Receiving, from start to drain.
pub(super) struct Receiver {
    memory: Arc<GuestMemory>,
    stats: Arc<NetStats>,
    /// Chains taken from the queue, in order, all unused. Invariant: they are the last ones taken, so that they can be
    /// put back.
    taken: VecDeque<Chain>,
    /// The writable parts of `taken`.
    buffers: Iovecs,
    /// Chains not in use, which saves allocations.
    spare: Vec<Chain>,
    /// Chains of the packet at hand, and how much was written to each.
    used: Vec<(u16, u32)>,
    /// A packet may use several chains (VIRTIO_NET_F_MRG_RXBUF).
    mergeable: bool,
    /// Longest packet with its header.
    longest: usize,
    /// Most bytes that `buffers` ever had. A packet that is longer is not worth waiting for buffers.
    peak: usize,
    /// A packet that waits for buffers, with its header; or nothing.
    pending: Vec<u8>,
    /// The host has not said that there are no packets.
    pub readable: bool,
}

/// What stays over a pause.
#[derive(Default)]
pub(super) struct Pending {
    /// A packet that waits for buffers, with its header; or nothing.
    packet: Vec<u8>,
    /// Most bytes of buffers that the driver ever had ready.
    peak: usize,
}

impl Pending {
    pub(super) fn save(&self) -> message::VirtioNetQueues {
        message::VirtioNetQueues {
            pending: self.packet.clone(),
            peak: u64::try_from(self.peak).unwrap_or(u64::MAX),
        }
    }

    pub(super) fn restored(saved: &message::VirtioNetQueues) -> Result<Self, StateError> {
        let (header, longest) = (HEADER as usize, HEADER.saturating_add(MAX_FRAME) as usize);
        let length = saved.pending.len();
        check(
            length == 0 || length > header && length <= longest,
            "pending",
            "no packet is that long",
        )?;
        Ok(Self {
            packet: saved.pending.clone(),
            peak: narrow("peak", saved.peak)?,
        })
    }
}

/// What a round achieved.
enum Round {
    Packet,
    /// No packet; the descriptor will tell.
    NoPacket,
    NoBuffers,
    /// The host failed, or the packet was no use.
    Failed(io::Error),
}

impl Receiver {
    /// `large` when the host may give packets beyond the MTU.
    pub fn new(
        memory: Arc<GuestMemory>,
        stats: Arc<NetStats>,
        mergeable: bool,
        large: bool,
        mtu: u16,
        pending: Pending,
    ) -> Self {
        // Ethernet header with a VLAN tag.
        let frame = if large {
            MAX_FRAME
        } else {
            u32::from(mtu).saturating_add(18)
        };
        Self {
            buffers: Iovecs::new(Arc::clone(&memory)),
            memory,
            stats,
            taken: VecDeque::new(),
            spare: Vec::new(),
            used: Vec::new(),
            mergeable,
            longest: frame.saturating_add(HEADER) as usize,
            peak: pending.peak,
            pending: pending.packet,
            readable: true,
        }
    }

    /// Gives the guest what there is.
    pub fn run(&mut self, session: &mut Session, backend: &dyn NetBackend) -> Result<Progress, Fault> {
        let mut failures = 0_u32;
        while self.readable {
            match self.round(session, backend)? {
                Round::Packet => failures = 0,
                Round::NoPacket => self.readable = false,
                Round::NoBuffers => return Ok(Progress::Done),
                Round::Failed(error) => {
                    NetStats::add(&self.stats.receive_dropped, 1);
                    failures = failures.saturating_add(1);
                    if failures >= MAX_FAILURES {
                        self.readable = false;
                        return Err(Fault::Backend("receive packets", error));
                    }
                }
            }
        }
        Ok(Progress::Waiting)
    }

    fn round(&mut self, session: &mut Session, backend: &dyn NetBackend) -> Result<Round, Fault> {
        if !self.pending.is_empty() {
            return self.deliver_pending(session);
        }
        self.gather(session, self.longest)?;
        if self.taken.is_empty() {
            return Ok(Round::NoBuffers);
        }
        let direct = !self.mergeable || self.buffers.len() >= self.longest;
        let received = if direct {
            backend.receive(&self.buffers)
        } else {
            self.receive_pending(backend)
        };
        match received {
            Ok(length) if length <= HEADER as usize || length > self.longest.max(self.buffers.len()) => {
                self.pending.clear();
                Ok(Round::Failed(io::ErrorKind::UnexpectedEof.into()))
            }
            Ok(length) => {
                if direct {
                    self.deliver(session, u32::try_from(length).unwrap_or(u32::MAX))?;
                }
                Ok(Round::Packet)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Round::NoPacket),
            Err(error) => Ok(Round::Failed(error)),
        }
    }

    fn receive_pending(&mut self, backend: &dyn NetBackend) -> io::Result<usize> {
        self.pending.resize(self.longest, 0);
        let received = backend.receive_into(&mut self.pending);
        self.pending.truncate(*received.as_ref().unwrap_or(&0));
        received
    }

    fn deliver_pending(&mut self, session: &mut Session) -> Result<Round, Fault> {
        let length = self.pending.len();
        self.gather(session, length)?;
        if self.buffers.len() < length {
            if length <= self.peak {
                return Ok(Round::NoBuffers);
            }
            self.pending.clear();
            return Ok(Round::Failed(io::ErrorKind::OutOfMemory.into()));
        }
        let mut left = self.pending.as_slice();
        for chain in &self.taken {
            let (now, rest) = left
                .split_at_checked(chain.writable_len() as usize)
                .unwrap_or((left, &[]));
            // Cannot fail: it is as long as the chain at most.
            let _ = chain.write(&self.memory, 0, now);
            left = rest;
        }
        self.pending.clear();
        self.deliver(session, u32::try_from(length).unwrap_or(u32::MAX))?;
        Ok(Round::Packet)
    }

    /// Takes chains until they have room for `wanted` bytes, or one chain when packets are not merged; fewer when the
    /// driver has no more.
    fn gather(&mut self, session: &mut Session, wanted: usize) -> Result<(), Fault> {
        while self.taken.is_empty() || self.mergeable && self.buffers.len() < wanted {
            let mut chain = self.spare.pop().unwrap_or_default();
            if !session.pop(RECEIVE, &mut chain)? {
                self.spare.push(chain);
                break;
            }
            // Cannot fail: the chain was checked when it was taken.
            let _ = self.buffers.append(chain.writable(), 0, chain.writable_len());
            self.taken.push_back(chain);
        }
        self.peak = self.peak.max(self.buffers.len());
        match self.taken.front() {
            Some(first) if first.writable_len() < HEADER => {
                let head = first.head();
                self.let_go();
                Err(Fault::Guest {
                    queue: RECEIVE,
                    head,
                    reason: "no place for a packet's header",
                })
            }
            _ => Ok(()),
        }
    }

    /// Forgets the first chain taken.
    fn let_go(&mut self) {
        if let Some(chain) = self.taken.pop_front() {
            self.buffers.skip(chain.writable_len() as usize);
            self.spare.push(chain);
        }
    }

    /// Gives the chains back that a packet of `length` bytes with its header lies in.
    fn deliver(&mut self, session: &mut Session, length: u32) -> Result<(), Fault> {
        let mut left = length;
        self.used.clear();
        for chain in &self.taken {
            let written = left.min(chain.writable_len());
            chain.mark_written(&self.memory, 0, written);
            self.used.push((chain.head(), written));
            left = left.saturating_sub(written);
            if left == 0 {
                break;
            }
        }
        let count = u16::try_from(self.used.len()).unwrap_or(u16::MAX);
        if let Some(first) = self.taken.front() {
            // Cannot fail: there is room for a header.
            let _ = first.write(&self.memory, NUM_BUFFERS, &count.to_le_bytes());
        }
        for _ in 0..count {
            self.let_go();
        }
        if let Some(queue) = session.queue(RECEIVE) {
            queue.add_used_together(&self.used).map_err(|error| Fault::Ring {
                queue: RECEIVE,
                error,
            })?;
        }
        NetStats::add(&self.stats.received, 1);
        NetStats::add(
            &self.stats.received_bytes,
            u64::from(length.saturating_sub(HEADER)),
        );
        Ok(())
    }

    /// Puts unused buffers back into the queue; gives what stays over a pause.
    pub fn put_back(mut self, session: &mut Session) -> Pending {
        let count = u16::try_from(self.taken.len()).unwrap_or(u16::MAX);
        if let Some(queue) = session.queue(RECEIVE) {
            queue.unpop(count);
        }
        Pending {
            packet: std::mem::take(&mut self.pending),
            peak: self.peak,
        }
    }
}
