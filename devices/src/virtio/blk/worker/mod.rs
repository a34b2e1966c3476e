//! The worker of one queue: takes requests, has them carried out, answers.
//!
//! A request is in exactly one place: in a slot that the engine knows (*under way*), in the slot that
//! [`throttle`](super::throttle) names, or among the [kept](super::hold). It is answered when it leaves all of them.

mod answer;
mod take;
mod wait;

use std::{sync::Arc, time::Instant};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES};

use super::{
    OnError,
    control::Shared,
    hold::{Kept, Work},
    pace::{self, Pace},
    request::{ID_LENGTH, Limits},
    throttle::Throttle,
};
use crate::{
    GuestMemory,
    block::Engine,
    state::{Section, StateError},
    sys::Iovecs,
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        gauge::Gauge,
        queue::Queue,
        session::{EventSet, Session},
    },
};

/// Tokens of events.
const COMPLETIONS: u32 = 0;
const WAKE: u32 = 1;
const TIMER: u32 = 2;

/// Requests that are taken before others have their turn (commands, above all).
const BATCH: usize = 128;

/// What the driver is told the disk is.
pub(super) type Identity = [u8; ID_LENGTH];

/// A request under way; kept for the next one, which saves allocations.
pub(super) struct Slot {
    pub work: Work,
    /// `None` while the engine has them.
    buffers: Option<Box<Iovecs>>,
}

/// The time, asked for at most once in a round.
pub(super) struct Clock {
    begin: Instant,
    now: Option<(Instant, u64)>,
}

impl Clock {
    fn new() -> Self {
        let begin = Instant::now();
        Self { begin, now: None }
    }

    fn now(&mut self) -> Instant {
        self.look().0
    }

    /// Nanoseconds since the worker was made: quicker to compute with than an `Instant`.
    pub fn nanos(&mut self) -> u64 {
        self.look().1
    }

    fn look(&mut self) -> (Instant, u64) {
        let begin = self.begin;
        *self.now.get_or_insert_with(|| {
            let now = Instant::now();
            (now, pace::nanos(now.saturating_duration_since(begin)))
        })
    }

    fn next_round(&mut self) {
        self.now = None;
    }
}

/// The back.
pub(super) struct BlkHandler {
    pub(super) queue: u16,
    engine: Box<dyn Engine>,
    pub(super) shared: Arc<Shared>,
    limits: Limits,
    identity: Identity,
    on_error: OnError,
    /// By token. Emptied at each start: the buffers hold on to guest memory.
    pub(super) slots: Vec<Slot>,
    free: Vec<u32>,
    pub(super) memory: Option<Arc<GuestMemory>>,
    /// Shows others what is in the ring; there from a start until it has drained.
    gauge: Option<Arc<Gauge>>,
    /// Without a negotiated flush the cache is write-through (5.2.6.2): each write is stable when answered.
    stable_writes: bool,
    /// Negotiated.
    discard: bool,
    write_zeroes: bool,
    pub(super) kept: Kept,
    throttle: Throttle,
    pace: Pace,
    pub(super) clock: Clock,
    /// Requests taken and not answered.
    pub(super) unanswered: usize,
    /// Answers that the driver was not told of, and when the first of them was given.
    untold: usize,
    untold_since: Option<Instant>,
    /// It has waited for requests in the ring, in vain.
    rested: bool,
    /// It has dozed, and nothing came of it yet.
    dozed: bool,
    /// The next kick is not the driver's.
    own_kick: bool,
    /// The session has events that the framework is to look after.
    called: bool,
    /// What the framework is told at the end of a round.
    fault: Option<Fault>,
}

impl BlkHandler {
    pub(super) fn new(
        queue: u16,
        engine: Box<dyn Engine>,
        shared: Arc<Shared>,
        limits: Limits,
        identity: Identity,
        on_error: OnError,
    ) -> Self {
        Self {
            queue,
            engine,
            shared,
            limits,
            identity,
            on_error,
            slots: Vec::new(),
            free: Vec::new(),
            memory: None,
            gauge: None,
            stable_writes: true,
            discard: false,
            write_zeroes: false,
            kept: Kept::default(),
            throttle: Throttle::default(),
            pace: Pace::default(),
            clock: Clock::new(),
            unanswered: 0,
            untold: 0,
            untold_since: None,
            rested: false,
            dozed: false,
            own_kick: false,
            called: false,
            fault: None,
        }
    }

    fn is_full(&self) -> bool {
        self.engine.in_flight() >= self.engine.depth()
    }

    /// Takes and answers until there is nothing to do, then sees to it that it is called again when there is.
    fn run(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Progress::Done);
        };
        let result = self.rounds(session, &memory);
        self.publish(session);
        if result.is_err() {
            // What was taken is not forgotten, nor what is left in the ring.
            self.call_again(session);
        }
        result?;
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(Progress::Waiting),
        }
    }

    fn rounds(&mut self, session: &mut Session, memory: &Arc<GuestMemory>) -> Result<(), Fault> {
        session.suppress_kicks(self.queue)?;
        self.throttle.refresh(&self.shared, self.queue);
        // Whatever it slept for, it was called.
        self.dozed = false;
        let mut left = BATCH;
        loop {
            self.clock.next_round();
            let answered = self.complete(session, memory)?;
            self.notice_call();
            if self.called && answered == 0 && self.engine.in_flight() == 0 {
                // What there is to do is the framework's to say.
                self.called = false;
                self.call_again(session);
                return self.tell(session);
            }
            let taken = self.take(session, memory, left)?;
            left = left.saturating_sub(taken);
            if left == 0 || self.fault.is_some() {
                self.commit()?;
                self.call_again(session);
                return self.tell(session);
            }
            let busy = answered > 0 || taken > 0;
            if self.dozed && answered == 0 && !self.called {
                self.pace.overslept(taken);
            }
            self.dozed &= !busy;
            if taken > 0 {
                self.rested = false;
                self.pace.taken(taken, self.clock.now());
            }
            if self.pace.is_enough(self.untold, self.engine.in_flight()) {
                // Handing requests over may take longer than the driver needs to begin with these.
                self.tell(session)?;
            }
            if busy && !self.sleeps_on(taken) {
                self.commit()?;
                if self.engine.event().is_none() && self.untold_too_long() {
                    self.tell(session)?;
                }
                continue;
            }
            if !busy && self.piles_up(session)? {
                continue;
            }
            self.tell(session)?;
            if !busy && self.looks_again() {
                continue;
            }
            if !self.sleep(session, busy)? {
                return Ok(());
            }
        }
    }

    fn commit(&mut self) -> Result<(), Fault> {
        self.engine
            .commit()
            .map_err(|error| Fault::Backend("submit requests", error))
    }

    /// Shows where requests are.
    fn publish(&mut self, session: &mut Session) {
        let Some(counters) = self.shared.counters(self.queue) else {
            return;
        };
        counters.set_in_flight(self.unanswered);
        counters.set_held(self.kept.len());
        let throttled = match self.throttle.waiting {
            // All that is in the ring waits behind it.
            Some(_) => session.available(self.queue).saturating_add(1),
            None => 0,
        };
        counters.set_throttled(throttled);
        if let (Some(gauge), Some(ring)) = (&self.gauge, session.queue(self.queue)) {
            gauge.set_taken(ring.state().next_avail);
        }
    }

    /// Shows others what is in the ring, or that it is not served.
    fn show_ring(&mut self, ring: Option<&Queue>) {
        self.gauge = ring.map(|ring| Arc::new(ring.gauge()));
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_ring(self.gauge.clone());
        }
    }

    /// The request that waits for its rate limit goes back into the ring: it is the one taken last.
    fn put_back(&mut self, session: &mut Session) {
        if let Some(token) = self.throttle.give_up() {
            session.unpop(self.queue);
            self.free.push(token);
            self.unanswered = self.unanswered.saturating_sub(1);
            self.call_again(session);
        }
    }

    fn call_again(&mut self, session: &mut Session) {
        self.own_kick = true;
        session.kick_again(self.queue);
    }

    fn wait_for_all(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Drained::Quiet);
        };
        loop {
            self.commit()?;
            if let Some(event) = self.engine.event() {
                // So that a wait ends for what comes after this only.
                let _empty = event.read();
            }
            self.clock.next_round();
            self.complete(session, &memory)?;
            self.notice_call();
            // Ranges may follow each other.
            self.commit()?;
            if self.engine.in_flight() == 0 {
                return Ok(Drained::Quiet);
            }
            if Instant::now() >= deadline {
                return Ok(Drained::Late);
            }
            self.engine
                .wait(deadline)
                .map_err(|error| Fault::Backend("wait for requests", error))?;
        }
    }
}

impl QueueHandler for BlkHandler {
    fn start(&mut self, session: &mut Session) -> Result<(), Fault> {
        self.stable_writes = !session.has_feature(VIRTIO_BLK_F_FLUSH);
        self.discard = session.has_feature(VIRTIO_BLK_F_DISCARD);
        self.write_zeroes = session.has_feature(VIRTIO_BLK_F_WRITE_ZEROES);
        self.memory = Some(Arc::new(session.memory().clone()));
        self.show_ring(session.queue(self.queue).map(|ring| &*ring));
        self.slots.clear();
        self.free.clear();
        self.pace.forget();
        self.throttle.start();
        self.kept.restart();
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Some(event) = self.engine.event() {
            session.watch(event, COMPLETIONS, edges)?;
        }
        match self.shared.wake_of(self.queue) {
            Some(wake) => session.watch(&**wake, WAKE, edges)?,
            None => {}
        }
        self.read_restored(session)
    }

    fn kick(&mut self, session: &mut Session, _queue: u16) -> Result<Progress, Fault> {
        if !std::mem::take(&mut self.own_kick) {
            self.clock.next_round();
            self.pace.notified(self.clock.now());
        }
        self.run(session)
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        self.run(session).map(|_| ())
    }

    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        self.put_back(session);
        let drained = self.wait_for_all(session, deadline);
        self.untold = 0;
        self.untold_since = None;
        self.publish(session);
        if drained.is_ok()
            && let Some(fault) = self.fault.take()
        {
            return Err(fault);
        }
        let drained = drained?;
        if drained == Drained::Quiet {
            // Nothing holds on to guest memory any more.
            self.slots.clear();
            self.free.clear();
            self.show_ring(None);
            self.kept.paused();
            // The next session listens elsewhere.
            self.engine.forget_other();
            self.called = false;
        }
        Ok(drained)
    }

    fn reset(&mut self) {
        self.memory = None;
        self.show_ring(None);
        self.kept.forget(&self.shared);
        self.unanswered = 0;
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_in_flight(0);
            counters.set_held(0);
            counters.set_throttled(0);
        }
    }

    fn save(&self) -> Result<Section, StateError> {
        self.saved()
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.take_over(section)
    }
}
