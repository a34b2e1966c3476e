//! Delegation of a pair of queues: either its worker or the kernel (vhost-net) serves the pair.
//!
//! ```text
//!              no obstacle
//!   worker ─────────────────────────────▶ kernel
//!     ▲                                     │ a limit, a link that is down, a dirty log, a pause, a reset, a corrupt ring, the pair out of use
//!     └─────────────────────────────────────┘
//! ```
//!
//! The kernel does not support limits and links, and marks no pages in a dirty log. While one of
//! these applies, the worker serves the pair, so a NIC has the same functions with and without
//! vhost-net. The change is invisible to the driver: the rings contain the progress. The kernel
//! does not apply the driver's filters: a device may let more packets through (virtio 1.3,
//! 5.1.6.5.1).

use std::{io, os::fd::BorrowedFd, sync::Arc};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::control::Shared;
use crate::{
    net::{PairServer, ServedRing},
    virtio::{
        fault::{Fault, RingError},
        session::{EventSet, Session},
        signals::Signals,
    },
};

/// Tokens of events.
pub(super) const VECTORS: u32 = 16;
pub(super) const RING_ERROR: u32 = 17;
/// Plus 0 for the receive queue, 1 for the transmit queue.
pub(super) const RELAY: u32 = 18;

const START: &str = "have the kernel serve a network interface (vhost-net)";
const STOP: &str = "take queues back from the kernel (vhost-net)";

/// A pair of queues that the kernel can serve.
pub(super) struct Delegation {
    server: Box<dyn PairServer>,
    signals: Arc<Signals>,
    shared: Arc<Shared>,
    /// The number of the receive queue.
    first: u16,
    serving: bool,
    /// It failed: until the driver resets the device the worker serves.
    failed: bool,
    /// Where interrupts go that have no eventfd; the worker raises them.
    relays: [EventFd; 2],
    /// Signalled when the kernel finds a ring corrupt.
    ring_error: EventFd,
}

impl Delegation {
    pub(super) fn new(
        server: Box<dyn PairServer>,
        signals: &Arc<Signals>,
        shared: &Arc<Shared>,
        pair: u16,
    ) -> io::Result<Self> {
        let event = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK);
        // Made here, by a thread that may.
        signals.vector_changes()?;
        Ok(Self {
            server,
            signals: Arc::clone(signals),
            shared: Arc::clone(shared),
            first: pair.wrapping_mul(2),
            serving: false,
            failed: false,
            relays: [event()?, event()?],
            ring_error: event()?,
        })
    }

    /// The kernel serves the pair at present.
    pub(super) fn is_serving(&self) -> bool {
        self.serving
    }

    /// Whether the kernel may serve the pair, as far as it is known here.
    pub(super) fn may_serve(&self) -> bool {
        !self.failed && self.shared.is_link_up() && !self.shared.keeps_queues()
    }

    /// A session begins.
    pub(super) fn watch(&self, session: &Session) -> Result<(), Fault> {
        // Drops reports about rings of an earlier session. A ring that is still corrupt will be
        // reported again.
        let _read = self.ring_error.read();
        session.watch(&self.ring_error, RING_ERROR, EventSet::IN)?;
        let changes = self.signals.vector_changes();
        let changes = changes.map_err(|error| Fault::Backend("watch the vectors", error))?;
        // All pairs watch the same one. Nobody reads it: each change is an edge.
        session.watch(changes, VECTORS, EventSet::IN | EventSet::EDGE_TRIGGERED)?;
        for (relay, token) in self.relays.iter().zip(RELAY..) {
            session.watch(relay, token, EventSet::IN)?;
        }
        Ok(())
    }

    /// Has the kernel serve both queues. The worker holds no buffers of them.
    pub(super) fn begin(&mut self, session: &mut Session, tap: BorrowedFd<'_>) -> Result<(), Fault> {
        if self.serving || !self.shared.begin_serving() {
            return Ok(());
        }
        self.serving = true;
        // Sends pending interrupts, because the kernel cannot send them later.
        session.flush_interrupts()?;
        let started = self.try_begin(session, tap);
        started.or_else(|error| {
            self.failed = true;
            self.shared.end_serving();
            self.serving = false;
            for queue in [self.first, self.first.wrapping_add(1)] {
                session.reclaim(queue, None)?;
            }
            Err(Fault::Backend(START, error))
        })
    }

    fn try_begin(&mut self, session: &mut Session, tap: BorrowedFd<'_>) -> io::Result<()> {
        let [receive, transmit] = [self.first, self.first.wrapping_add(1)];
        let mut delegate = |queue| session.delegate(queue).map_err(io::Error::other);
        let states = delegate(receive)?.zip(delegate(transmit)?);
        let (receive_state, transmit_state) = states.ok_or_else(missing)?;
        let [receive_relay, transmit_relay] = &self.relays;
        let ring = |state, queue, relay| {
            Some(ServedRing {
                state,
                kick: session.kick_event(queue)?,
                call: self.signals.queue_event(queue).unwrap_or(relay),
                error: &self.ring_error,
            })
        };
        let rings = [
            ring(&receive_state, receive, receive_relay).ok_or_else(missing)?,
            ring(&transmit_state, transmit, transmit_relay).ok_or_else(missing)?,
        ];
        self.server
            .start(session.memory(), session.features(), rings, tap)?;
        // The driver does not notify again of requests that are already available.
        rings.iter().try_for_each(|ring| ring.kick.write(1))
    }

    /// Takes both queues back.
    pub(super) fn end(&mut self, session: &mut Session) -> Result<(), Fault> {
        if !self.serving {
            return Ok(());
        }
        let next = self.server.stop().map_err(|error| Fault::Backend(STOP, error))?;
        self.serving = false;
        self.shared.end_serving();
        let [receive, transmit] = next;
        session.reclaim(self.first, Some(receive))?;
        session.reclaim(self.first.wrapping_add(1), Some(transmit))
    }

    /// The driver has reset the device: what failed is tried again.
    pub(super) fn reset(&mut self) {
        self.failed = false;
    }

    /// One of the events of [`watch`](Self::watch) has come.
    pub(super) fn event(&mut self, token: u32) -> Result<(), Fault> {
        match token {
            VECTORS => self.vectors_changed(),
            RING_ERROR => {
                let _read = self.ring_error.read();
                Err(Fault::Ring {
                    queue: self.first,
                    error: RingError::Delegated,
                })
            }
            _ => {
                for (relay, queue) in self.relays.iter().zip(self.first..) {
                    if relay.read().is_ok() {
                        self.signals.queue_interrupt(queue);
                    }
                }
                Ok(())
            }
        }
    }

    fn vectors_changed(&mut self) -> Result<(), Fault> {
        if !self.serving {
            return Ok(());
        }
        for (ring, (relay, queue)) in (0..).zip(self.relays.iter().zip(self.first..)) {
            let call = self.signals.queue_event(queue).unwrap_or(relay);
            let set = self.server.set_call(ring, call);
            set.map_err(|error| Fault::Backend("give the kernel another interrupt (vhost-net)", error))?;
            // An interrupt that went the old way meanwhile is sent once more; one too many is harmless.
            self.signals.queue_interrupt(queue);
        }
        Ok(())
    }
}

fn missing() -> io::Error {
    io::Error::other("the driver has not set up both queues")
}
