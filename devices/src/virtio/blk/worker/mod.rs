//! The worker of one queue: takes requests, has them carried out, answers.
//!
//! A request is in exactly one place: in a slot that the engine knows (*under way*), in the slot that
//! [`throttle`](super::throttle) names, or among the [kept](super::hold). It is answered when it leaves all of them.

mod answer;
mod take;

use std::{sync::Arc, time::Instant};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES};

use super::{
    OnError,
    control::Shared,
    hold::{Kept, Work},
    pace::{self, Look, Pace, Pile},
    request::{ID_LENGTH, Limits},
    throttle::Throttle,
};
use crate::{
    GuestMemory,
    block::Engine,
    sys::Iovecs,
    virtio::{
        device::{Drained, Progress, QueueHandler},
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// Tokens of events.
const COMPLETIONS: u32 = 0;
const WAKE: u32 = 1;
const TIMER: u32 = 2;

/// Requests that are taken before others have their turn (commands, above all).
const BATCH: usize = 128;

/// The driver is told of answers at the latest when the first of them has waited that long.
const MAX_WAIT: std::time::Duration = std::time::Duration::from_micros(250);

/// What the driver is told the disk is.
pub(super) type Identity = [u8; ID_LENGTH];

/// A request under way; kept for the next one, which saves allocations.
struct Slot {
    work: Work,
    /// `None` while the engine has them.
    buffers: Option<Iovecs>,
}

/// The time, asked for at most once in a round.
#[derive(Default)]
struct Clock(Option<Instant>);

impl Clock {
    fn now(&mut self) -> Instant {
        *self.0.get_or_insert_with(Instant::now)
    }

    fn next_round(&mut self) {
        self.0 = None;
    }
}

/// The back.
pub(super) struct BlkHandler {
    queue: u16,
    engine: Box<dyn Engine>,
    shared: Arc<Shared>,
    limits: Limits,
    identity: Identity,
    on_error: OnError,
    /// By token. Emptied at each start: the buffers hold on to guest memory.
    slots: Vec<Slot>,
    free: Vec<u32>,
    memory: Option<Arc<GuestMemory>>,
    /// Without a negotiated flush the cache is write-through (5.2.6.2): each write is stable when answered.
    stable_writes: bool,
    /// Negotiated.
    discard: bool,
    write_zeroes: bool,
    kept: Kept,
    throttle: Throttle,
    pace: Pace,
    clock: Clock,
    /// Requests taken and not answered.
    unanswered: usize,
    /// Answers that the driver was not told of, and when the first of them was given.
    untold: usize,
    untold_since: Option<Instant>,
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
            stable_writes: true,
            discard: false,
            write_zeroes: false,
            kept: Kept::default(),
            throttle: Throttle::default(),
            pace: Pace::default(),
            clock: Clock::default(),
            unanswered: 0,
            untold: 0,
            untold_since: None,
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
        let mut left = BATCH;
        loop {
            self.clock.next_round();
            let answered = self.complete(session, memory)?;
            self.notice_call();
            let taken = self.take(session, memory, left)?;
            left = left.saturating_sub(taken);
            if left == 0 || self.fault.is_some() {
                self.commit()?;
                self.call_again(session);
                return self.tell(session);
            }
            let busy = answered > 0 || taken > 0;
            if busy {
                self.pace.taken(taken);
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

    /// Whether to hand what was just taken to the host and sleep in one go: when nothing else is to be expected.
    fn sleeps_on(&self, taken: usize) -> bool {
        let under_way = self.engine.in_flight();
        taken > 0 && !self.engine.is_prompt() && !pace::is_many(under_way) && !self.pace.may_look()
    }

    /// Whether the driver is told later; waits a moment for more to tell it.
    fn piles_up(&mut self, session: &mut Session) -> Result<bool, Fault> {
        let under_way = self.engine.in_flight();
        if self.called || !self.pace.may_pile_up(self.untold, under_way) {
            return Ok(false);
        }
        let now = self.clock.now();
        let since = self.untold_since.unwrap_or(now);
        let waited = now.saturating_duration_since(since);
        let (more, limit) = match self.pace.pile_up(self.untold, under_way, waited) {
            Pile::No => return Ok(false),
            Pile::Look => {
                std::hint::spin_loop();
                return Ok(true);
            }
            Pile::Sleep(more, limit) => (more, limit),
        };
        let mut requests = more;
        let mut other = None;
        if under_way < more && !self.waits() {
            let unnotified = u16::try_from(more.saturating_sub(1)).unwrap_or(u16::MAX);
            if session.is_left_after_asking(self.queue, unnotified)? {
                session.suppress_kicks(self.queue)?;
                return Ok(true);
            }
            other = Some(session.events());
            requests = under_way.max(1);
        }
        let slept = self
            .engine
            .sleep_for(requests, other, limit)
            .map_err(|error| Fault::Backend("wait for requests", error))?;
        if other.is_some() {
            session.suppress_kicks(self.queue)?;
        }
        Ok(slept)
    }

    /// Whether requests are expected so soon that the worker stays awake; gives others its processor if they want it.
    fn looks_again(&mut self) -> bool {
        if self.waits() {
            return false;
        }
        if !self.pace.may_look() {
            return false;
        }
        match self.pace.look_again(self.clock.now()) {
            Look::No => return false,
            Look::Now => std::hint::spin_loop(),
            Look::Yield => std::thread::yield_now(),
        }
        true
    }

    /// Whether requests in the ring are left there: completions or the timer make the worker go on.
    fn waits(&self) -> bool {
        self.is_full() || self.throttle.waiting.is_some()
    }

    /// Asks to be notified, and sleeps as long as requests are under way. False when the framework is to sleep, or
    /// something else called. With `fresh`, requests were taken that the host was not handed yet.
    fn sleep(&mut self, session: &mut Session, fresh: bool) -> Result<bool, Fault> {
        let under_way = self.engine.in_flight();
        if !self.waits() {
            let unnotified = pace::unnotified(under_way);
            if session.is_left_after_asking(self.queue, unnotified)? {
                session.suppress_kicks(self.queue)?;
                self.commit()?;
                return Ok(true);
            }
        }
        if under_way == 0 {
            self.engine.forget_other();
            return Ok(false);
        }
        self.publish(session);
        let slept = !self.called
            && self
                .engine
                .commit_and_sleep(session.events())
                .map_err(|error| Fault::Backend("wait for requests", error))?;
        if slept {
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        if fresh {
            // What completes after this is noticed only when it was looked for.
            self.commit()?;
            return Ok(true);
        }
        self.called = false;
        Ok(false)
    }

    /// Something that the session listens to called while the worker slept: most likely the driver.
    fn notice_call(&mut self) {
        if self.engine.other_called() {
            self.called = true;
            self.own_kick = true;
            self.pace.notified(self.clock.now());
        }
    }

    fn untold_too_long(&mut self) -> bool {
        let now = self.clock.now();
        self.untold_since
            .is_some_and(|since| now.saturating_duration_since(since) >= MAX_WAIT)
    }

    /// Tells the driver of answers, if it wants to be told.
    fn tell(&mut self, session: &mut Session) -> Result<(), Fault> {
        let answers = std::mem::take(&mut self.untold);
        self.untold_since = None;
        if answers == 0 {
            return Ok(());
        }
        // A clock read before the answers were given says nothing of the time since.
        self.clock.next_round();
        let before = self.clock.now();
        let sent = session.flush_interrupts()?;
        self.clock.next_round();
        let now = self.clock.now();
        if sent {
            self.pace
                .interrupted(answer::nanos(now.saturating_duration_since(before)));
        }
        self.pace.told(answers, now);
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
        counters.set_in_flight(self.unanswered);
        counters.set_held(self.kept.len());
        let throttled = match self.throttle.waiting {
            // All that is in the ring waits behind it.
            Some(_) => session.available(self.queue).saturating_add(1),
            None => 0,
        };
        counters.set_throttled(throttled);
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
            Some(wake) => session.watch(&**wake, WAKE, edges),
            None => Ok(()),
        }
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
            self.kept.paused();
            // The next session listens elsewhere.
            self.engine.forget_other();
            self.called = false;
        }
        Ok(drained)
    }

    fn reset(&mut self) {
        self.memory = None;
        self.kept.forget(&self.shared);
        self.unanswered = 0;
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_in_flight(0);
            counters.set_held(0);
            counters.set_throttled(0);
        }
    }
}
