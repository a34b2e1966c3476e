//! The worker of one queue: takes requests, has them carried out, answers.
//!
//! A request is in exactly one place: in a slot that the engine knows (*under way*), in the slot that
//! [`throttle`](super::throttle) names, or among the [kept](super::hold). It is answered when it leaves all of them.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES};

use super::{
    OnError,
    control::Shared,
    hold::{Kept, Work},
    pace::{self, Pace},
    request::{HEADER, Header, ID_LENGTH, Limits, Plan, RANGE, RangeHeader, Status, few_enough},
    throttle::Throttle,
};
use crate::{
    GuestMemory,
    block::{Completion, Engine, Operation, Request},
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
            fault: None,
        }
    }

    fn is_full(&self) -> bool {
        self.engine.in_flight() >= self.engine.depth()
    }

    /// A slot that nobody uses.
    fn free_slot(&mut self, memory: &Arc<GuestMemory>) -> u32 {
        if let Some(token) = self.free.pop() {
            return token;
        }
        let token = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let now = self.clock.now();
        self.slots.push(Slot {
            work: Work::new(now),
            buffers: Some(Iovecs::new(Arc::clone(memory))),
        });
        token
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
            let taken = self.take(session, memory, left)?;
            self.commit()?;
            left = left.saturating_sub(taken);
            if left == 0 || self.fault.is_some() {
                self.call_again(session);
                return self.tell(session);
            }
            if answered > 0 || taken > 0 {
                self.pace.taken(taken);
                if self.engine.event().is_none() && self.untold_too_long() {
                    self.tell(session)?;
                }
                continue;
            }
            if pace::may_pile_up(self.untold, self.engine.in_flight()) {
                let now = self.clock.now();
                let since = self.untold_since.unwrap_or(now);
                if pace::pile_up(self.untold, self.engine.in_flight(), since, now) {
                    std::hint::spin_loop();
                    continue;
                }
            }
            self.tell(session)?;
            if self.is_full() || self.throttle.waiting.is_some() {
                // The driver need not notify: completions or the timer will call.
                return Ok(());
            }
            // A clock read before the interrupt was sent says nothing of the time since.
            self.clock.next_round();
            if self.pace.may_look() && self.pace.look_again(self.clock.now()) {
                std::thread::yield_now();
                continue;
            }
            let unnotified = pace::unnotified(self.engine.in_flight());
            return session.ask_for_kick_after(self.queue, unnotified);
        }
    }

    /// Takes up to `most` requests; gives how many. Those that are to be done again come first.
    fn take(
        &mut self,
        session: &mut Session,
        memory: &Arc<GuestMemory>,
        most: usize,
    ) -> Result<usize, Fault> {
        let mut taken = 0_usize;
        while taken < most && !self.is_full() {
            let Some(work) = self.kept.next(&self.shared) else {
                break;
            };
            taken = taken.saturating_add(1);
            let token = self.free_slot(memory);
            if let Some(slot) = self.slots.get_mut(token as usize) {
                slot.work = work;
            }
            self.begin(session, memory, token)?;
        }
        if let Some(token) = self.throttle.waiting {
            if self.is_full() || self.has_to_wait(session, token)? {
                return Ok(taken);
            }
            taken = taken.saturating_add(1);
            self.begin(session, memory, token)?;
        }
        while taken < most && !self.is_full() {
            let token = self.free_slot(memory);
            let Some(slot) = self.slots.get_mut(token as usize) else {
                break;
            };
            let popped = session.pop(self.queue, &mut slot.work.chain);
            if !matches!(popped, Ok(true)) {
                self.free.push(token);
                popped?;
                break;
            }
            slot.work.since = self.clock.now();
            taken = taken.saturating_add(1);
            self.unanswered = self.unanswered.saturating_add(1);
            self.plan(memory, token)?;
            if self.has_to_wait(session, token)? {
                break;
            }
            self.begin(session, memory, token)?;
        }
        Ok(taken)
    }

    /// Decides what is to be done for the request in slot `token`, which was just taken from the ring.
    fn plan(&mut self, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let work = &mut slot.work;
        let chain = &work.chain;
        work.ranges.clear();
        work.range = 0;
        work.unsettled = false;
        let Some(incoming) = chain.writable_len().checked_sub(1) else {
            self.free.push(token);
            self.unanswered = self.unanswered.saturating_sub(1);
            return Err(Fault::Guest {
                queue: self.queue,
                head: chain.head(),
                reason: "no place for the status",
            });
        };
        let capacity = self.shared.capacity.load(Ordering::Acquire);
        let header = chain.read_obj::<Header>(memory, 0);
        let outgoing = chain.readable_len().checked_sub(HEADER);
        work.plan = match (header, outgoing) {
            (Ok(header), Some(outgoing)) => self.limits.plan(capacity, &header, outgoing, incoming),
            _ => Plan::Answer(Status::IoError),
        };
        let refused = match work.plan {
            Plan::Read { length, .. } => !few_enough(chain.writable(), 0, length),
            Plan::Write { length, .. } => !few_enough(chain.readable(), HEADER, length),
            _ => false,
        };
        if refused {
            work.plan = Plan::Answer(Status::IoError);
        }
        let (zeroes, ranges) = match work.plan {
            Plan::Discard { .. } if !self.discard => (false, Err(Status::Unsupported)),
            Plan::WriteZeroes { .. } if !self.write_zeroes => (true, Err(Status::Unsupported)),
            Plan::Discard { ranges } => (false, Ok(ranges)),
            Plan::WriteZeroes { ranges } => (true, Ok(ranges)),
            _ => return Ok(()),
        };
        // All of it is copied and checked before any of it is done.
        let result = ranges.and_then(|length| {
            let mut at = HEADER;
            let end = HEADER.saturating_add(length);
            while at < end {
                let range = chain
                    .read_obj::<RangeHeader>(memory, at)
                    .map_err(|_| Status::IoError)?;
                work.ranges.extend(self.limits.range(capacity, zeroes, &range)?);
                at = at.saturating_add(RANGE);
            }
            Ok(())
        });
        match result {
            Ok(()) if work.ranges.is_empty() => work.plan = Plan::Answer(Status::Ok),
            Ok(()) => {}
            Err(status) => work.plan = Plan::Answer(status),
        }
        Ok(())
    }

    /// Whether the request in slot `token` waits for its rate limit; it is the throttle's then.
    fn has_to_wait(&mut self, session: &Session, token: u32) -> Result<bool, Fault> {
        let Some(slot) = self.slots.get(token as usize) else {
            return Ok(false);
        };
        let clock = &mut self.clock;
        match self.throttle.wait_for(slot.work.plan.cost(), || clock.now()) {
            None => {
                self.throttle.waiting = None;
                Ok(false)
            }
            Some(wait) => {
                self.throttle.waiting = Some(token);
                self.throttle.arm(session, TIMER, wait)?;
                Ok(true)
            }
        }
    }

    /// Has the request in slot `token` carried out as planned.
    fn begin(&mut self, session: &mut Session, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let Some(mut buffers) = slot.buffers.take() else {
            return Err(Fault::Bug("a free slot without buffers".into()));
        };
        buffers.clear();
        let work = &slot.work;
        let (chain, range) = (&work.chain, work.ranges.get(work.range));
        let prepared = match (work.plan, range) {
            (Plan::Read { offset, length }, _) => buffers
                .append(chain.writable(), 0, length)
                .map(|()| Operation::Read { offset }),
            (Plan::Write { offset, length }, _) => {
                let stable = self.stable_writes;
                buffers
                    .append(chain.readable(), HEADER, length)
                    .map(|()| Operation::Write { offset, stable })
            }
            (Plan::Flush, _) if self.shared.is_settled() => Ok(Operation::Flush),
            (Plan::Discard { .. }, Some(range)) => Ok(range.operation(false)),
            (Plan::WriteZeroes { .. }, Some(range)) => Ok(range.operation(true)),
            (plan, _) => {
                slot.buffers = Some(buffers);
                return self.answer_without_engine(session, memory, token, plan);
            }
        };
        let Ok(operation) = prepared else {
            slot.buffers = Some(buffers);
            return self.answer(session, memory, token, Status::IoError);
        };
        if self.engine.event().is_none() && !matches!(operation, Operation::Read { .. }) {
            // It is done now and may take long: the driver is told of what is ready.
            self.tell(session)?;
        }
        self.engine.submit(Request {
            token,
            operation,
            buffers,
        });
        Ok(())
    }

    fn answer_without_engine(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
        plan: Plan,
    ) -> Result<(), Fault> {
        let status = match plan {
            Plan::Flush => {
                let work = self.take_work(token);
                self.kept.wait(work);
                return Ok(());
            }
            Plan::Identify { length } => {
                let id = self.identity.get(..length as usize).unwrap_or(&self.identity);
                let written = self
                    .slots
                    .get(token as usize)
                    .is_some_and(|slot| slot.work.chain.write(memory, 0, id).is_ok());
                if written { Status::Ok } else { Status::IoError }
            }
            Plan::Answer(Status::Ok) => Status::Ok,
            Plan::Answer(status) => {
                session.count_guest_fault();
                status
            }
            _ => return Err(Fault::Bug("a request without a range".into())),
        };
        self.answer(session, memory, token, status)
    }

    /// Moves the request out of its slot, which is free then.
    fn take_work(&mut self, token: u32) -> Work {
        let empty = Work::new(self.clock.now());
        self.free.push(token);
        match self.slots.get_mut(token as usize) {
            Some(slot) => std::mem::replace(&mut slot.work, empty),
            None => empty,
        }
    }

    /// Deals with what has completed; gives how many requests.
    fn complete(&mut self, session: &mut Session, memory: &GuestMemory) -> Result<usize, Fault> {
        let mut count = 0_usize;
        while let Some(Completion {
            token,
            result,
            buffers,
        }) = self.engine.completed()
        {
            count = count.saturating_add(1);
            let Some(slot) = self.slots.get_mut(token as usize) else {
                continue;
            };
            slot.buffers = Some(buffers);
            let work = &mut slot.work;
            if let Plan::Read { length, .. } = work.plan {
                // Also after an error: a part may have been written.
                work.chain.mark_written(memory, 0, length);
            }
            match result {
                Ok(()) => {
                    work.range = work.range.saturating_add(1);
                    if work.range < work.ranges.len() || work.plan == Plan::Flush {
                        // Its next range; or a flush, which may have to be kept now.
                        self.go_on(session, memory, token)?;
                    } else {
                        self.answer(session, memory, token, Status::Ok)?;
                    }
                }
                Err(error) => self.fail(session, memory, token, error)?,
            }
        }
        Ok(count)
    }

    fn go_on(&mut self, session: &mut Session, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let flush = self
            .slots
            .get(token as usize)
            .is_some_and(|slot| slot.work.plan == Plan::Flush);
        if flush && self.shared.is_settled() {
            return self.answer(session, memory, token, Status::Ok);
        }
        self.begin(session, memory, token)
    }

    /// The host could not carry a request out.
    fn fail(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
        error: io::Error,
    ) -> Result<(), Fault> {
        let plan = self.slots.get(token as usize).map(|slot| slot.work.plan);
        let what = plan.map_or("use the image", |plan| plan.failure());
        let ranged = matches!(plan, Some(Plan::Discard { .. } | Plan::WriteZeroes { .. }));
        if ranged && error.kind() == io::ErrorKind::Unsupported {
            // Trying again would not help.
            return self.answer(session, memory, token, Status::Unsupported);
        }
        match self.on_error {
            OnError::Report => {
                self.fault.get_or_insert(Fault::Backend(what, error));
                self.answer(session, memory, token, Status::IoError)
            }
            OnError::Hold => {
                let work = self.take_work(token);
                if self.kept.fail(work, &self.shared) {
                    self.fault = Some(Fault::Held(what, error));
                }
                Ok(())
            }
        }
    }

    /// Writes the status into the last writable byte and gives the request back.
    fn answer(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
        status: Status,
    ) -> Result<(), Fault> {
        let now = self.clock.now();
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let work = &mut slot.work;
        let length = work.chain.writable_len();
        // Cannot fail: the chain was checked when it was taken.
        let _ = work.chain.write_last(memory, status.byte());
        if let (Some(kind), Some(counters)) = (work.plan.kind(), self.shared.counters(self.queue)) {
            let bytes = match work.plan {
                Plan::Read { length, .. } | Plan::Write { length, .. } => length.into(),
                _ => work.ranges.iter().map(|range| range.length).sum(),
            };
            let took = now.saturating_duration_since(work.since);
            counters.answered(kind, bytes, took, status == Status::Ok);
        }
        let (head, unsettled) = (work.chain.head(), std::mem::take(&mut work.unsettled));
        self.free.push(token);
        self.unanswered = self.unanswered.saturating_sub(1);
        session.add_used(self.queue, head, length)?;
        self.untold = self.untold.saturating_add(1);
        self.untold_since.get_or_insert(now);
        if unsettled {
            self.shared.remove_unsettled();
        }
        Ok(())
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
        let now = self.clock.now();
        self.pace.told(answers, now);
        session.flush_interrupts()
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
