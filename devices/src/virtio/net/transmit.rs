//! From the guest to the host: each packet is sent straight from the guest's buffers, behind a checked copy of its
//! header.

use std::{io, sync::Arc, time::Instant};

use vmm_base::{GuestMemory, sys::Iovecs};
use zerocopy::IntoBytes as _;

use super::{
    control::Shared,
    header::{HEADER, Header, Refusal, check},
    stats::PairCounters,
};
use crate::{
    net::NetBackend,
    virtio::{
        chain::Chain,
        device::Progress,
        fault::Fault,
        rate::{Cost, Throttle},
        session::Session,
    },
};

/// Maximum number of completions per interrupt. A driver with a full ring requests an interrupt
/// after a number of completions. If the interrupt came only at the end of a batch, the driver
/// would idle while this thread sends. Then this thread would idle while the driver fills the ring.
const TOLD_TOGETHER: u32 = 16;

/// Sending, from start to drain.
pub(super) struct Sender {
    memory: Arc<GuestMemory>,
    shared: Arc<Shared>,
    /// The pair of queues, and its transmit queue.
    pair: u16,
    queue: u16,
    chain: Chain,
    buffers: Iovecs,
    /// The packet that is taken next was paid for already (see [`rate`](crate::virtio::rate)).
    paid: bool,
    /// The host takes no packets at present. The descriptor signals when it does again.
    pub blocked: bool,
}

/// Result for a packet.
enum Outcome {
    Sent,
    /// Dropped: its header or length is invalid.
    Invalid,
    /// It is lost: the link is down.
    Lost,
}

impl Sender {
    pub fn new(memory: Arc<GuestMemory>, shared: Arc<Shared>, pair: u16) -> Self {
        let buffers = Iovecs::new(Arc::clone(&memory));
        Self {
            memory,
            shared,
            pair,
            queue: pair.wrapping_mul(2).wrapping_add(1),
            chain: Chain::new(),
            buffers,
            paid: false,
            blocked: false,
        }
    }

    /// Sends the guest's packets until the host takes no more or `throttle` requires a wait. For a
    /// wait, arms a timer with the token `timer`. Packets with a host error are dropped. The last
    /// such error is returned after all packets are sent.
    pub fn run(
        &mut self,
        session: &mut Session,
        backend: &dyn NetBackend,
        throttle: &mut Throttle<Cost>,
        timer: u32,
    ) -> Result<Progress, Fault> {
        let mut failed = None;
        let mut untold = 0_u32;
        throttle.waiting = None;
        while !self.blocked && session.pop(self.queue, &mut self.chain)? {
            let length = self.chain.readable_len().saturating_sub(HEADER);
            let checked = match self.chain.read_obj::<Header>(&self.memory, 0) {
                Ok(header) => check(&header, length, session.features()),
                Err(_) => Err("no header"),
            };
            if let Ok(header) = &checked
                && self.waits(session, throttle, header.cost(length), timer)?
            {
                break;
            }
            match self.send(backend, length, checked) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    session.unpop(self.queue);
                    break;
                }
                Ok(outcome) => self.count(session, &outcome, length),
                Err(error) => {
                    self.count(session, &Outcome::Lost, length);
                    failed = Some(error);
                }
            }
            self.paid = false;
            session.put_used(self.queue, self.chain.head(), 0)?;
            untold = untold.saturating_add(1);
            if untold >= TOLD_TOGETHER {
                untold = 0;
                session.flush_interrupts()?;
            }
        }
        match failed {
            Some(error) => Err(Fault::Backend("send a packet", error)),
            None if self.blocked || throttle.waiting.is_some() => Ok(Progress::Waiting),
            None => Ok(Progress::Done),
        }
    }

    /// Whether the packet at hand has to wait; it is back in the ring then, and a timer comes. It is paid for otherwise.
    fn waits(
        &mut self,
        session: &mut Session,
        throttle: &mut Throttle<Cost>,
        cost: Cost,
        timer: u32,
    ) -> Result<bool, Fault> {
        if self.paid || !throttle.limits() {
            return Ok(false);
        }
        let Some(wait) = throttle.wait_for(cost, Instant::now) else {
            self.paid = true;
            return Ok(false);
        };
        session.unpop(self.queue);
        throttle.waiting = Some(cost);
        throttle.arm(session, timer, wait)?;
        Ok(true)
    }

    /// Sends the packet at hand, or drops it because it makes no sense or the link is down.
    fn send(
        &mut self,
        backend: &dyn NetBackend,
        length: u32,
        checked: Result<Header, Refusal>,
    ) -> io::Result<Outcome> {
        self.buffers.clear();
        let gathered = self.buffers.append(self.chain.readable(), HEADER, length);
        match checked {
            Ok(header) if gathered.is_ok() && self.buffers.fits_one_call() => {
                if !self.shared.is_link_up() {
                    return Ok(Outcome::Lost);
                }
                match backend.send(header.as_bytes(), &mut self.buffers) {
                    // The host rejects only packets that the guest made invalid.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(Outcome::Invalid),
                    Err(error) => Err(error),
                    Ok(()) => Ok(Outcome::Sent),
                }
            }
            _ => Ok(Outcome::Invalid),
        }
    }

    fn count(&self, session: &Session, outcome: &Outcome, length: u32) {
        let Some(counters) = self.shared.counters(self.pair) else {
            return;
        };
        match outcome {
            Outcome::Sent => {
                PairCounters::add(&counters.sent, 1);
                PairCounters::add(&counters.sent_bytes, length.into());
            }
            Outcome::Lost => PairCounters::add(&counters.send_dropped, 1),
            Outcome::Invalid => {
                session.count_guest_fault();
                PairCounters::add(&counters.send_dropped, 1);
                PairCounters::add(&counters.send_invalid, 1);
            }
        }
    }
}
