//! The worker of one queue: the rounds in which it completes and takes requests, its sleep, and its life.
//!
//! A request is in exactly one place: in a slot that the engine knows (*in flight*), in the slot that
//! [`throttle`](crate::virtio::throttle) names, or among the [kept](super::hold). It completes when it leaves all of them; until
//! then it is *outstanding*. Its path is in [`requests`].

mod requests;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use block::Engine;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES};
use vmm_base::{GuestMemory, sys::Iovecs};

use super::{
    OnError,
    control::Shared,
    hold::Kept,
    pace::{MANY, Pace},
    plan::{Negotiated, Work},
    request::{ID_LENGTH, Limits},
};
use crate::{
    state::{Section, StateError},
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        gauge::Gauge,
        queue::Queue,
        session::{EventSet, Session},
        throttle::Throttle,
    },
};

/// Tokens of events.
const COMPLETIONS: u32 = 0;
const WAKE: u32 = 1;
const TIMER: u32 = 2;

/// Requests that are taken before others have their turn (commands, above all).
const BATCH: usize = 128;

/// Maximum time that a worker without requests waits in the engine for the next request, which
/// saves system calls. The kernel counts this time as waiting for the disk (in_iowait, and
/// therefore /proc/pressure/io). An idle disk must not appear like that.
const STAY: Duration = Duration::from_millis(5);

/// Identification of the disk that the driver can read.
pub(super) type Identity = [u8; ID_LENGTH];

/// A request in flight; kept for the next one, which saves allocations.
struct Slot {
    work: Work,
    /// `None` while the engine has them.
    buffers: Option<Box<Iovecs>>,
}

/// The time, asked for at most once in a round.
pub(super) struct Clock {
    begin: Instant,
    now: Option<Instant>,
}

impl Clock {
    fn new() -> Self {
        Self {
            begin: Instant::now(),
            now: None,
        }
    }

    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(Instant::now)
    }

    /// Nanoseconds since the worker was made: quicker to compute with than an `Instant`.
    pub(super) fn nanos(&mut self) -> u64 {
        let since = self.now().saturating_duration_since(self.begin);
        since
            .as_secs()
            .saturating_mul(1_000_000_000)
            .saturating_add(since.subsec_nanos().into())
    }

    fn next_round(&mut self) {
        self.now = None;
    }
}

/// The device side of one queue.
pub(super) struct BlkHandler {
    pub(super) queue: u16,
    /// Descriptors of the queue. No more requests are outstanding: each has one at least (2.7.5).
    pub(super) size: usize,
    engine: Box<dyn Engine>,
    pub(super) shared: Arc<Shared>,
    pub(super) limits: Limits,
    identity: Identity,
    on_error: OnError,
    /// By token. Emptied at each start: the buffers hold on to guest memory.
    slots: Vec<Slot>,
    free: Vec<u32>,
    memory: Option<Arc<GuestMemory>>,
    /// Gauge of the ring for other threads. Present from a start until the drain.
    gauge: Option<Arc<Gauge>>,
    pub(super) negotiated: Negotiated,
    pub(super) kept: Kept,
    throttle: Throttle<u32>,
    pace: Pace,
    pub(super) clock: Clock,
    /// Requests taken that have not completed.
    pub(super) outstanding: usize,
    /// Requests that completed in this round.
    completions: usize,
    /// The worker has waited in the engine without requests, and has not taken a request since.
    rested: bool,
    /// The session has a command for the framework.
    called: bool,
    /// Fault to report to the framework at the end of a round.
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
            size: 0,
            engine,
            shared,
            limits,
            identity,
            on_error,
            slots: Vec::new(),
            free: Vec::new(),
            memory: None,
            gauge: None,
            negotiated: Negotiated::default(),
            kept: Kept::default(),
            throttle: Throttle::default(),
            pace: Pace::default(),
            clock: Clock::new(),
            outstanding: 0,
            completions: 0,
            rested: false,
            called: false,
            fault: None,
        }
    }

    /// Completes and takes requests until there is nothing to do, then sees to it that it is called again when there is.
    fn run(&mut self, session: &mut Session) -> Result<Progress, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Progress::Done);
        };
        let result = self.rounds(session, &memory);
        self.publish(session);
        if result.is_err() {
            // The next kick continues with the taken requests and with those in the ring.
            session.kick_again(self.queue);
        }
        result?;
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(Progress::Waiting),
        }
    }

    /// Goes over to another limiter if the disk has one now.
    fn refresh_limit(&mut self) {
        let wake = self.shared.wake_of(self.queue);
        self.throttle.refresh(&self.shared.limiter, wake);
    }

    fn rounds(&mut self, session: &mut Session, memory: &Arc<GuestMemory>) -> Result<(), Fault> {
        session.suppress_kicks(self.queue)?;
        self.refresh_limit();
        let mut left = BATCH;
        loop {
            self.clock.next_round();
            let completed = self.complete(session, memory)?;
            self.heed_call(session);
            if self.called && completed == 0 && self.engine.in_flight() == 0 {
                // The framework must handle the command first.
                self.called = false;
                session.kick_again(self.queue);
                return self.signal(session);
            }
            let taken = self.take(session, memory, left)?;
            left = left.saturating_sub(taken);
            if left == 0 || self.fault.is_some() {
                self.commit()?;
                session.kick_again(self.queue);
                return self.signal(session);
            }
            let busy = completed > 0 || taken > 0;
            self.rested &= taken == 0;
            let held = self.holds(taken);
            if !held {
                self.signal(session)?;
            }
            if busy && !self.sleeps_on(taken, held) {
                self.commit()?;
                continue;
            }
            if held && !busy {
                std::hint::spin_loop();
                continue;
            }
            if !busy && self.polls() {
                std::thread::yield_now();
                continue;
            }
            if !self.sleep(session, busy)? {
                return Ok(());
            }
        }
    }

    /// Handles an event of the session. Commands are left to the framework. All other events need
    /// no distinction, because the next round handles their cause: the driver's notification, a
    /// timer, another limiter, or requests settled by other workers.
    fn heed_call(&mut self, session: &mut Session) {
        if !self.engine.other_called() {
            return;
        }
        self.called |= session.has_command();
        self.refresh_limit();
        if session.available(self.queue) > 0 {
            session.count_kick();
        }
    }

    /// Reports the round's results to the policy. Returns whether completions are held back.
    fn holds(&mut self, taken: usize) -> bool {
        let completed = std::mem::take(&mut self.completions);
        if completed == 0 && taken == 0 && self.pace.unsignalled() == 0 {
            return false;
        }
        let now = self.clock.nanos();
        if completed > 0 || taken > 0 {
            self.pace.found(completed, taken, now);
        }
        let in_flight = self.engine.in_flight();
        // Requests that must stay in the ring do not show whether the driver is busy.
        !self.called && !self.waits() && self.pace.holds(in_flight, now)
    }

    /// Whether to stay awake: something is expected soon.
    fn polls(&mut self) -> bool {
        let in_flight = self.engine.in_flight() > 0;
        !self.called && !self.waits() && self.pace.polls(in_flight, self.clock.nanos())
    }

    /// Whether one system call both submits the taken requests and sleeps. This pays only if no
    /// other event is expected soon.
    fn sleeps_on(&self, taken: usize, held: bool) -> bool {
        let in_flight = self.engine.in_flight();
        taken > 0 && !held && !self.engine.is_prompt() && in_flight < MANY && !self.pace.may_poll(true)
    }

    /// Whether the worker leaves requests in the ring. A completion or the timer then makes it
    /// continue.
    fn waits(&self) -> bool {
        self.engine.in_flight() >= self.engine.depth() || self.throttle.waiting.is_some()
    }

    /// Asks to be notified, and sleeps. False when the framework is to sleep, or has something to do. With `fresh`,
    /// requests were taken that the host was not handed yet.
    fn sleep(&mut self, session: &mut Session, fresh: bool) -> Result<bool, Fault> {
        if !self.waits() && session.is_left_after_asking(self.queue)? {
            session.suppress_kicks(self.queue)?;
            self.commit()?;
            return Ok(true);
        }
        self.publish(session);
        let in_flight = self.engine.in_flight();
        self.pace.sleeps(in_flight > 0, self.clock.nanos());
        if !self.called && self.sleeps_in_engine(session, in_flight)? {
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        if fresh {
            // After this commit, the event signals completions only once `completed` has returned
            // `None`. Therefore the loop continues.
            self.commit()?;
            return Ok(true);
        }
        self.called = false;
        if in_flight == 0 {
            self.engine.forget_other();
        }
        Ok(false)
    }

    /// Sleeps where the engine can, without requests only for a while.
    fn sleeps_in_engine(&mut self, session: &Session, in_flight: usize) -> Result<bool, Fault> {
        let limit = (in_flight == 0).then_some(STAY);
        if in_flight == 0 && std::mem::replace(&mut self.rested, true) {
            return Ok(false);
        }
        self.engine
            .commit_and_sleep(session.events(), limit)
            .map_err(|error| Fault::Backend("wait for requests", error))
    }

    /// Raises an interrupt for what completed, if the driver wants one.
    fn signal(&mut self, session: &mut Session) -> Result<(), Fault> {
        let completed = std::mem::take(&mut self.completions);
        if completed > 0 {
            self.pace.found(completed, 0, self.clock.nanos());
        }
        if self.pace.unsignalled() > 0 {
            self.pace.signalled();
            session.flush_interrupts()?;
        }
        Ok(())
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
        counters.set_in_flight(self.outstanding);
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

    /// Publishes a gauge of the ring, or removes it when the queue is not served.
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
            self.outstanding = self.outstanding.saturating_sub(1);
            session.kick_again(self.queue);
        }
    }

    fn wait_for_all(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(Drained::Quiet);
        };
        loop {
            self.commit()?;
            if let Some(event) = self.engine.event() {
                // Clears the event, so that the wait ends only for later completions.
                let _empty = event.read();
            }
            self.clock.next_round();
            self.complete(session, &memory)?;
            self.called |= self.engine.other_called();
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
        self.negotiated = Negotiated {
            stable_writes: !session.has_feature(VIRTIO_BLK_F_FLUSH),
            discard: session.has_feature(VIRTIO_BLK_F_DISCARD),
            write_zeroes: session.has_feature(VIRTIO_BLK_F_WRITE_ZEROES),
        };
        let memory = Arc::new(session.memory().clone());
        self.memory = Some(Arc::clone(&memory));
        let ring = session.queue(self.queue).map(|ring| &*ring);
        self.size = ring.map_or(0, |ring| ring.size().into());
        self.show_ring(ring);
        self.slots.clear();
        self.free.clear();
        self.pace = Pace::default();
        self.completions = 0;
        self.throttle.start();
        self.kept.restart();
        self.read_restored(session, &memory)?;
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if let Some(event) = self.engine.event() {
            session.watch(event, COMPLETIONS, edges)?;
        }
        match self.shared.wake_of(self.queue) {
            Some(wake) => session.watch(&**wake, WAKE, edges),
            None => Ok(()),
        }
    }

    fn kick(&mut self, session: &mut Session, _queue: u16) -> Result<Progress, Fault> {
        self.run(session)
    }

    fn event(&mut self, session: &mut Session, _token: u32) -> Result<(), Fault> {
        self.run(session).map(|_| ())
    }

    fn drain(&mut self, session: &mut Session, deadline: Instant) -> Result<Drained, Fault> {
        self.put_back(session);
        let drained = self.wait_for_all(session, deadline);
        // The session raises the interrupt for what completed.
        self.completions = 0;
        self.pace = Pace::default();
        self.publish(session);
        if drained.is_ok()
            && let Some(fault) = self.fault.take()
        {
            return Err(fault);
        }
        let drained = drained?;
        if drained == Drained::Quiet {
            // From here on, no slot refers to guest memory.
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
        self.outstanding = 0;
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_in_flight(0);
            counters.set_held(0);
            counters.set_throttled(0);
        }
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new(&self.queue.to_string(), &self.kept.save()))
    }

    fn restore(&mut self, section: &Section, _memory: &GuestMemory) -> Result<(), StateError> {
        self.restore_kept(&section.open()?)
    }
}
