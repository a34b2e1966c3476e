//! Packets from the host to the guest.
//!
//! The worker reads the host's packets directly into the guest's buffers. The length of the next
//! packet is unknown, so the worker collects buffers for the longest packet and keeps the unused
//! ones for the next packet. If the driver's remaining buffers are too few, the worker reads a
//! packet into its own memory and copies it as soon as it fits. Without VIRTIO_NET_F_MRG_RXBUF a
//! packet must fit into one buffer. A longer packet is dropped, not truncated.
//!
//! The length of a packet is known only after its delivery. Therefore the worker charges the packet
//! (see [`rate`](crate::virtio::rate)) after the delivery, and reads no other packet before the limiter
//! admits the cost.

use std::{collections::VecDeque, io, sync::Arc, time::Instant};

use vmm_base::{GuestMemory, sys::Iovecs};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::{
    control::Shared,
    filter::{Address, Filter, LOOKS_AT},
    header::{HEADER, Header, MAX_FRAME, NUM_BUFFERS, for_driver},
    stats::PairCounters,
};
use crate::{
    net::{NetBackend, Offloads},
    state::{StateError, check, message, narrow},
    virtio::{
        chain::Chain,
        device::Progress,
        fault::Fault,
        rate::{Cost, Throttle},
        session::Session,
    },
};

/// Failures of the host in a row after which only an event makes it be asked again.
const MAX_FAILURES: u32 = 16;

/// Packets that are read and lost in one go while the link is down.
const DISCARDED: u32 = 256;

/// Header and the part of the frame that are looked at.
const FRONT: usize = HEADER as usize + LOOKS_AT;

/// Receiving, from start to drain.
pub(super) struct Receiver {
    memory: Arc<GuestMemory>,
    shared: Arc<Shared>,
    /// The pair of queues, and its receive queue.
    pair: u16,
    queue: u16,
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
    /// Packets of VLANs that were not added are kept out (VIRTIO_NET_F_CTRL_VLAN).
    vlans: bool,
    /// The driver's filter and its address, and which version they are.
    filter: (Arc<Filter>, Address),
    filter_version: u32,
    /// Most bytes that `buffers` ever had. A packet that is longer is not worth waiting for buffers.
    peak: usize,
    /// A packet that waits for buffers, with its header; or nothing.
    pending: Vec<u8>,
    /// The host has not said that there are no packets.
    pub readable: bool,
}

/// How a receiver is set up.
pub(super) struct Setup {
    pub memory: Arc<GuestMemory>,
    pub shared: Arc<Shared>,
    pub pair: u16,
    pub mergeable: bool,
    pub vlans: bool,
}

/// State that survives a pause.
#[derive(Default)]
pub(super) struct Pending {
    /// A packet that waits for buffers, with its header; or nothing.
    packet: Vec<u8>,
    /// Most bytes of buffers that the driver ever had ready.
    peak: usize,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.packet.is_empty()
    }

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

/// Result of a round.
enum Round {
    /// A packet was delivered that counts for that much in a rate limit.
    Packet(Cost),
    /// A packet is kept until there are buffers for it, or was not for the driver.
    Nothing,
    /// No packet is available. The descriptor signals the next one.
    NoPacket,
    NoBuffers,
    /// The host failed, or the packet was no use.
    Failed(io::Error),
}

impl Receiver {
    pub fn new(setup: Setup, pending: Pending) -> Self {
        let filter_version = setup.shared.filter_version();
        let mut receiver = Self {
            buffers: Iovecs::new(Arc::clone(&setup.memory)),
            memory: setup.memory,
            filter: setup.shared.filter(),
            filter_version,
            shared: setup.shared,
            pair: setup.pair,
            queue: setup.pair.wrapping_mul(2),
            taken: VecDeque::new(),
            spare: Vec::new(),
            used: Vec::new(),
            mergeable: setup.mergeable,
            vlans: setup.vlans,
            peak: pending.peak,
            pending: pending.packet,
            readable: true,
        };
        // A restored one may be such that this driver can't get it.
        if !receiver.mergeable || receiver.pending.len() > receiver.longest() {
            receiver.pending.clear();
        }
        receiver
    }

    /// Whether no packet waits for buffers.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Longest packet with its header that the host may give.
    fn longest(&self) -> usize {
        let large = Offloads::TSO4 | Offloads::TSO6 | Offloads::USO;
        let frame = if self.shared.offloads().intersects(large) {
            MAX_FRAME
        } else {
            // Ethernet header with a VLAN tag.
            u32::from(self.shared.mtu).saturating_add(18)
        };
        frame.saturating_add(HEADER) as usize
    }

    /// Gives the guest what there is, as fast as `throttle` allows. It has a timer call with `timer` for its token.
    pub fn run(
        &mut self,
        session: &mut Session,
        backend: &dyn NetBackend,
        throttle: &mut Throttle<Cost>,
        timer: u32,
    ) -> Result<Progress, Fault> {
        if let Some(cost) = throttle.waiting.take()
            && !pays(session, throttle, cost, timer)?
        {
            return Ok(Progress::Waiting);
        }
        let mut failures = 0_u32;
        while self.readable {
            if !self.shared.is_link_up() {
                self.discard(session, backend);
                return Ok(Progress::Waiting);
            }
            match self.round(session, backend)? {
                Round::Packet(cost) => {
                    failures = 0;
                    if throttle.limits() && !pays(session, throttle, cost, timer)? {
                        return Ok(Progress::Waiting);
                    }
                }
                Round::Nothing => failures = 0,
                Round::NoPacket => self.readable = false,
                Round::NoBuffers => return Ok(Progress::Done),
                Round::Failed(error) => {
                    self.count(|counters| PairCounters::add(&counters.receive_dropped, 1));
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

    /// Reads the host's packets and drops them, because the link is down.
    fn discard(&mut self, session: &mut Session, backend: &dyn NetBackend) {
        let mut lost = u64::from(!self.pending.is_empty());
        self.pending.clear();
        let mut packet = [0; 64];
        for _ in 0..DISCARDED {
            // The rest of a longer packet is lost too.
            if backend.receive_into(&mut packet).is_err() {
                self.readable = false;
                break;
            }
            lost = lost.saturating_add(1);
        }
        self.count(|counters| PairCounters::add(&counters.receive_dropped, lost));
        if self.readable {
            session.kick_again(self.queue);
        }
    }

    fn round(&mut self, session: &mut Session, backend: &dyn NetBackend) -> Result<Round, Fault> {
        if !self.pending.is_empty() {
            return self.deliver_pending(session);
        }
        let longest = self.longest();
        self.gather(session, longest)?;
        if self.taken.is_empty() {
            return Ok(Round::NoBuffers);
        }
        let direct = self.buffers.len() >= longest;
        let received = if direct {
            backend.receive(&self.buffers)
        } else {
            self.receive_pending(backend, longest)
        };
        match received {
            Ok(length) if length <= HEADER as usize || length > longest.max(self.buffers.len()) => {
                self.pending.clear();
                Ok(Round::Failed(io::ErrorKind::UnexpectedEof.into()))
            }
            Ok(length) => self.received(session, length, direct),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Round::NoPacket),
            Err(error) => Ok(Round::Failed(error)),
        }
    }

    fn receive_pending(&mut self, backend: &dyn NetBackend, longest: usize) -> io::Result<usize> {
        self.pending.resize(longest, 0);
        let received = backend.receive_into(&mut self.pending);
        self.pending.truncate(*received.as_ref().unwrap_or(&0));
        received
    }

    /// Looks at a packet of `length` bytes, which lies in the guest's buffers (`direct`) or is pending: it is delivered, kept, or
    /// not for the driver.
    fn received(&mut self, session: &mut Session, length: usize, direct: bool) -> Result<Round, Fault> {
        let mut front = [0; FRONT];
        if direct {
            let room = front.len().min(length);
            self.buffers.peek(front.get_mut(..room).unwrap_or_default());
        } else {
            for (to, from) in front.iter_mut().zip(&self.pending) {
                *to = *from;
            }
        }
        let Some((header, frame)) = split(&front) else {
            return Ok(Round::Nothing);
        };
        if !self.wants(frame) {
            self.pending.clear();
            self.count(|counters| PairCounters::add(&counters.receive_filtered, 1));
            return Ok(Round::Nothing);
        }
        let Some(shown) = for_driver(&header, self.shared.offloads()) else {
            self.pending.clear();
            self.count(|counters| PairCounters::add(&counters.receive_dropped, 1));
            return Ok(Round::Nothing);
        };
        if !direct {
            if let Some(place) = self.pending.get_mut(..HEADER as usize) {
                place.copy_from_slice(shown.as_bytes());
            }
            return Ok(Round::Nothing);
        }
        if shown != header
            && let Some(first) = self.taken.front()
        {
            // Cannot fail: there is room for a header.
            let _ = first.write(&self.memory, 0, shown.as_bytes());
        }
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.deliver(session, length)?;
        Ok(Round::Packet(shown.cost(length.saturating_sub(HEADER))))
    }

    /// Whether the driver's filter lets a frame through that begins with `start`.
    fn wants(&mut self, start: &[u8; LOOKS_AT]) -> bool {
        let version = self.shared.filter_version();
        if version != self.filter_version {
            self.filter = self.shared.filter();
            self.filter_version = version;
        }
        let (filter, mac) = &self.filter;
        filter.accepts(start, mac, self.vlans)
    }

    fn deliver_pending(&mut self, session: &mut Session) -> Result<Round, Fault> {
        let length = self.pending.len();
        self.gather(session, length)?;
        if self.buffers.len() < length {
            if self.mergeable && length <= self.peak {
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
        let header = Header::read_from_prefix(&self.pending);
        let header = header.map(|(header, _)| header).unwrap_or_default();
        self.pending.clear();
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        self.deliver(session, length)?;
        Ok(Round::Packet(header.cost(length.saturating_sub(HEADER))))
    }

    /// Takes chains until they have room for `wanted` bytes, or one chain when packets are not merged; fewer when the
    /// driver has no more.
    fn gather(&mut self, session: &mut Session, wanted: usize) -> Result<(), Fault> {
        while self.taken.is_empty() || self.mergeable && self.buffers.len() < wanted {
            let mut chain = self.spare.pop().unwrap_or_default();
            if !session.pop(self.queue, &mut chain)? {
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
                    queue: self.queue,
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
        // Before the driver sees it: a packet that the guest has is one that was counted.
        self.count(|counters| {
            PairCounters::add(&counters.received, 1);
            PairCounters::add(&counters.received_bytes, length.saturating_sub(HEADER).into());
        });
        let queue = self.queue;
        if let Some(ring) = session.queue(queue) {
            ring.add_used_together(&self.used)
                .map_err(|error| Fault::Ring { queue, error })?;
        }
        Ok(())
    }

    fn count(&self, add: impl FnOnce(&PairCounters)) {
        if let Some(counters) = self.shared.counters(self.pair) {
            add(counters);
        }
    }

    /// Puts unused buffers back into the queue; gives what stays over a pause.
    pub fn put_back(mut self, session: &mut Session) -> Pending {
        let count = u16::try_from(self.taken.len()).unwrap_or(u16::MAX);
        if let Some(queue) = session.queue(self.queue) {
            queue.unpop(count);
        }
        Pending {
            packet: std::mem::take(&mut self.pending),
            peak: self.peak,
        }
    }
}

/// Whether a packet that was delivered is paid for; if not, `throttle` waits with it, and a timer comes.
fn pays(session: &Session, throttle: &mut Throttle<Cost>, cost: Cost, timer: u32) -> Result<bool, Fault> {
    let Some(wait) = throttle.wait_for(cost, Instant::now) else {
        return Ok(true);
    };
    throttle.waiting = Some(cost);
    throttle.arm(session, timer, wait)?;
    Ok(false)
}

/// Header and the beginning of the frame.
fn split(front: &[u8; FRONT]) -> Option<(Header, &[u8; LOOKS_AT])> {
    let (header, frame) = Header::read_from_prefix(front).ok()?;
    Some((header, frame.first_chunk()?))
}
