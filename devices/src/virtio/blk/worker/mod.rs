//! The worker of one queue: the rounds in which it completes and takes requests, the pacing of these, its sleep, and its
//! life.
//!
//! A request is in exactly one place: in a slot that the engine knows (*in flight*), in the slot that
//! [`Throttle`] names, or among the [kept](super::hold). It completes when it leaves all of them; until
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
    plan::Limits,
    request::{ID_LENGTH, Negotiated, Work},
};
use crate::{
    state::{Section, StateError},
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        queue::{Backlog, Queue},
        rate::Throttle,
        session::{EventSet, Session},
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

/// The smallest window.
const MIN_WINDOW: u64 = 25_000;
/// The largest window: twice the time from interrupt to next request of a guest on a host where an
/// exit takes 40 µs.
const MAX_WINDOW: u64 = 250_000;
/// Threshold for a contended processor: after a longer yield, another thread is busy on it.
const CONTENDED: u64 = 50_000;
/// Sleeps after that from which nothing is learnt.
const REST: u32 = 256;
/// The part of what requests take for which completions may be held back.
pub(super) const HOLD_PART: u64 = 16;
/// With so many requests in flight others complete soon: then submitting and sleeping in one system call does not pay.
const MANY: usize = 8;
/// The longest time between two requests that counts in the average: longer ones are pauses.
const MAX_GAP: u64 = 1_000_000;

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

/// Result of a round: of a completion and a take.
#[derive(Debug)]
pub(super) struct Round {
    /// Requests that the engine completed.
    pub completed: usize,
    /// Requests taken from the ring.
    pub taken: usize,
    /// Requests in the engine after that.
    pub in_flight: usize,
    /// The framework has a command to handle, or requests must stay in the ring, where they do not show whether the driver
    /// is busy. Then the worker neither polls nor holds completions back.
    pub bound: bool,
    /// The engine often has completed a request when it has taken it.
    pub prompt: bool,
}

/// Action after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Submit the taken requests and look again: the round found work.
    Again,
    /// Look again and keep the processor: completions are held back.
    Spin,
    /// Look again after other threads had the processor: something is expected soon.
    Yield,
    /// Sleep until an event.
    Sleep,
}

/// Pacing of a worker: when to poll before sleeping, and when to hold completions back. Learnt from the times of events,
/// in nanoseconds of the worker's clock.
///
/// *Polling.* A notification makes a vCPU leave the guest, and a sleeping thread is slow to wake.
/// Each costs more than all other work for a small request. Therefore notifications are off while
/// the worker is awake, and an idle worker polls for a while before it sleeps. The worker learns
/// the duration. If something arrives soon after the worker went to sleep, its polling window
/// doubles until the window covers that time. If something arrives late, the window closes. One
/// window applies while the worker waits for the device, another while it waits for the driver
/// alone. Between two polls the worker yields its processor. If a yield takes long and nothing
/// arrived meanwhile, the processor is contended. Then the worker neither polls nor holds
/// completions back for a while.
///
/// *Holding back.* Completions that one round finds raise one interrupt. The worker holds
/// completions back only while the driver is provably busy, because an interrupt would stop the
/// driver. The driver is busy if two conditions hold: it has not yet replaced completions that it
/// may have seen, and it added a request within half the average time between two requests. The
/// maximum time is a sixteenth of the duration of a request from the driver's point of view. This
/// duration is the number of the driver's requests times the average time between two (Little's
/// law). The worker keeps its processor meanwhile, otherwise the scheduler would determine the
/// bound.
#[derive(Debug, Default)]
pub(super) struct PollPolicy {
    /// For how long to poll: with no request in flight, and with some.
    windows: [u64; 2],
    /// Since when there is nothing to do, and which window is for that.
    idle: Option<(u64, bool)>,
    /// The worker slept since then.
    slept: bool,
    /// The last poll that found nothing.
    polled: Option<u64>,
    /// Sleeps from which nothing is learnt.
    rest: u32,
    /// When the driver was last seen to have added requests.
    added: u64,
    /// From one request to the next, on average.
    gap: u64,
    /// Completions that the driver has not replaced by new requests yet.
    unreplaced: usize,
    /// Those among them that no interrupt was raised for.
    unsignalled: usize,
    /// When the first of these was found.
    unsignalled_since: u64,
}

impl PollPolicy {
    /// A round found so many completions and took so many requests: one at least.
    pub(super) fn found(&mut self, completed: usize, taken: usize, now: u64) {
        self.polled = None;
        if let (Some((since, in_flight)), true) = (self.idle.take(), std::mem::take(&mut self.slept)) {
            self.learn(in_flight, now.saturating_sub(since));
        }
        if taken > 0 {
            let since = now.saturating_sub(self.added).min(MAX_GAP);
            let each = since.checked_div(taken as u64).unwrap_or(0);
            self.gap = self.gap.saturating_mul(7).saturating_add(each).wrapping_div(8);
            self.added = now;
            self.unreplaced = self.unreplaced.saturating_sub(taken);
        }
        if completed > 0 {
            if self.unsignalled == 0 {
                self.unsignalled_since = now;
            }
            self.unsignalled = self.unsignalled.saturating_add(completed);
            self.unreplaced = self.unreplaced.saturating_add(completed);
        }
    }

    /// After a sleep, something came when there had been nothing to do for that long.
    fn learn(&mut self, in_flight: bool, gap: u64) {
        if let Some(rest) = self.rest.checked_sub(1) {
            self.rest = rest;
            return;
        }
        let [without, with] = &mut self.windows;
        let window = if in_flight { with } else { without };
        if gap > MAX_WINDOW {
            *window = 0;
        } else if gap > *window {
            *window = window.saturating_mul(2).clamp(MIN_WINDOW, MAX_WINDOW);
        }
    }

    fn window(&self, in_flight: bool) -> u64 {
        let [without, with] = self.windows;
        if in_flight { with } else { without }
    }

    /// Whether completions that no interrupt was raised for are held back, with so many requests in flight.
    pub(super) fn holds(&self, in_flight: usize, now: u64) -> bool {
        if self.rest > 0 || self.unsignalled == 0 || self.unreplaced <= self.unsignalled {
            return false;
        }
        let all = self.unreplaced.saturating_add(in_flight);
        let limit = self.gap.saturating_mul(all as u64).wrapping_div(HOLD_PART);
        let silent = now.saturating_sub(self.added) >= self.gap.wrapping_div(2);
        !silent && now.saturating_sub(self.unsignalled_since) < limit
    }

    /// Completions that no interrupt was raised for.
    pub(super) fn unsignalled(&self) -> usize {
        self.unsignalled
    }

    /// An interrupt was raised for them, if the driver wanted one.
    pub(super) fn signalled(&mut self) {
        self.unsignalled = 0;
    }

    /// Decides what follows a round. `held`: the worker holds completions back. `now` is called at most once.
    pub(super) fn next(&mut self, round: &Round, held: bool, now: impl FnOnce() -> u64) -> Next {
        if round.completed > 0 || round.taken > 0 {
            // One system call both submits the taken requests and sleeps. This pays only if no other
            // event is expected soon.
            let few = !round.prompt && round.in_flight < MANY && self.window(true) == 0;
            return if round.taken > 0 && !held && few {
                Next::Sleep
            } else {
                Next::Again
            };
        }
        if held {
            return Next::Spin;
        }
        if !round.bound && self.polls(round.in_flight > 0, now()) {
            return Next::Yield;
        }
        Next::Sleep
    }

    /// Whether to poll again instead of going to sleep. There is nothing to do, with requests in flight or not.
    fn polls(&mut self, in_flight: bool, now: u64) -> bool {
        let (since, _) = *self.idle.get_or_insert((now, in_flight));
        let last = self.polled.replace(now).unwrap_or(now);
        if now.saturating_sub(last) > CONTENDED {
            self.windows = [0; 2];
            self.rest = REST;
        }
        now.saturating_sub(since) < self.window(in_flight)
    }

    /// The worker goes to sleep.
    pub(super) fn sleeps(&mut self, in_flight: bool, now: u64) {
        self.idle.get_or_insert((now, in_flight));
        self.slept = true;
        self.polled = None;
        // A driver that adds nothing until then has fewer requests than before.
        self.unreplaced = self.unreplaced.wrapping_div(2);
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
    /// Backlog of the ring for other threads. Present from a start until the drain.
    backlog: Option<Arc<Backlog>>,
    pub(super) negotiated: Negotiated,
    pub(super) kept: Kept,
    throttle: Throttle<u32>,
    policy: PollPolicy,
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
            backlog: None,
            negotiated: Negotiated::default(),
            kept: Kept::default(),
            throttle: Throttle::default(),
            policy: PollPolicy::default(),
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
                break;
            }
            let taken = self.take(session, memory, left)?;
            left = left.saturating_sub(taken);
            if left == 0 || self.fault.is_some() {
                self.commit()?;
                break;
            }
            self.rested &= taken == 0;
            let round = Round {
                completed,
                taken,
                in_flight: self.engine.in_flight(),
                bound: self.called || self.waits(),
                prompt: self.engine.is_prompt(),
            };
            let held = self.holds(&round);
            if !held {
                self.signal(session)?;
            }
            let clock = &mut self.clock;
            match self.policy.next(&round, held, || clock.nanos()) {
                Next::Again => self.commit()?,
                Next::Spin => std::hint::spin_loop(),
                Next::Yield => std::thread::yield_now(),
                Next::Sleep => {
                    if !self.sleep(session, completed > 0 || taken > 0)? {
                        return Ok(());
                    }
                }
            }
        }
        session.kick_again(self.queue);
        self.signal(session)
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

    /// Reports the round to the policy. Returns whether completions are held back.
    fn holds(&mut self, round: &Round) -> bool {
        let completed = std::mem::take(&mut self.completions);
        let found = completed > 0 || round.taken > 0;
        if !found && self.policy.unsignalled() == 0 {
            return false;
        }
        let now = self.clock.nanos();
        if found {
            self.policy.found(completed, round.taken, now);
        }
        !round.bound && self.policy.holds(round.in_flight, now)
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
        self.policy.sleeps(in_flight > 0, self.clock.nanos());
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
            self.policy.found(completed, 0, self.clock.nanos());
        }
        if self.policy.unsignalled() > 0 {
            self.policy.signalled();
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
        if let (Some(backlog), Some(ring)) = (&self.backlog, session.queue(self.queue)) {
            backlog.set_taken(ring.state().next_avail);
        }
    }

    /// Publishes the backlog of the ring, or removes it when the queue is not served.
    fn show_ring(&mut self, ring: Option<&Queue>) {
        self.backlog = ring.map(|ring| Arc::new(ring.backlog()));
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_ring(self.backlog.clone());
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
        self.policy = PollPolicy::default();
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
        self.policy = PollPolicy::default();
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

#[cfg(test)]
mod tests;
