//! Taking requests from the ring, deciding what is to be done, and having it begun.

use std::sync::{Arc, atomic::Ordering};

use super::{BlkHandler, Slot, TIMER};
use crate::{
    GuestMemory,
    block::{Operation, Request},
    ram,
    sys::Iovecs,
    virtio::{
        blk::{
            hold::Work,
            request::{HEADER, Header, Plan, RANGE, RangeHeader, Status, few_enough},
        },
        fault::Fault,
        session::Session,
    },
};

impl BlkHandler {
    /// Takes up to `most` requests; gives how many. Those that are to be done again come first.
    pub(super) fn take(
        &mut self,
        session: &mut Session,
        memory: &Arc<GuestMemory>,
        most: usize,
    ) -> Result<usize, Fault> {
        // None completes meanwhile.
        let room = self.engine.depth().saturating_sub(self.engine.in_flight());
        let most = most.min(room);
        let mut taken = 0_usize;
        while taken < most {
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
            if taken == most || self.has_to_wait(session, token)? {
                return Ok(taken);
            }
            taken = taken.saturating_add(1);
            self.begin(session, memory, token)?;
        }
        let new = self.take_new(session, memory, most.saturating_sub(taken))?;
        Ok(taken.saturating_add(new))
    }

    /// Takes up to `most` requests from the ring; gives how many.
    ///
    /// Each is taken before the one ahead of it is looked at: its header, which another processor wrote, is on its way
    /// meanwhile.
    fn take_new(
        &mut self,
        session: &mut Session,
        memory: &Arc<GuestMemory>,
        most: usize,
    ) -> Result<usize, Fault> {
        let mut taken = 0_usize;
        let mut next = if most > 0 {
            self.pop(session, memory)?
        } else {
            None
        };
        while let Some(token) = next {
            taken = taken.saturating_add(1);
            let following = if taken < most {
                self.pop(session, memory)
            } else {
                Ok(None)
            };
            let goes_on = self.plan_and_begin(session, memory, token);
            if !matches!(goes_on, Ok(true)) {
                if let Ok(Some(token)) = following {
                    session.unpop(self.queue);
                    self.free.push(token);
                }
                return goes_on.map(|_| taken);
            }
            next = following?;
        }
        Ok(taken)
    }

    /// Takes a request from the ring into a slot, if there is one.
    fn pop(&mut self, session: &mut Session, memory: &Arc<GuestMemory>) -> Result<Option<u32>, Fault> {
        let token = self.free_slot(memory);
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(None);
        };
        let popped = session.pop(self.queue, &mut slot.work.chain);
        if !matches!(popped, Ok(true)) {
            self.free.push(token);
            return popped.map(|_| None);
        }
        if let Some(header) = slot.work.chain.readable().first() {
            ram::fetch_to_change(memory, header.address);
        }
        slot.work.since = self.clock.nanos();
        Ok(Some(token))
    }

    /// Has the request in slot `token`, which was just taken from the ring, carried out; false when it has to wait.
    fn plan_and_begin(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
    ) -> Result<bool, Fault> {
        self.unanswered = self.unanswered.saturating_add(1);
        self.plan(memory, token)?;
        if self.throttle.limits() && self.has_to_wait(session, token)? {
            return Ok(false);
        }
        self.begin(session, memory, token)?;
        Ok(true)
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
        let header: Result<Header, _> = chain.read_front(memory).map(|front| zerocopy::transmute!(front));
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
        let cost = slot.work.plan.cost(&slot.work.ranges);
        let clock = &mut self.clock;
        match self.throttle.wait_for(cost, || clock.now()) {
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
    pub(super) fn begin(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
    ) -> Result<(), Fault> {
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

    /// A slot that nobody uses.
    fn free_slot(&mut self, memory: &Arc<GuestMemory>) -> u32 {
        if let Some(token) = self.free.pop() {
            return token;
        }
        let token = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.slots.push(Slot {
            work: Work::empty(),
            buffers: Some(Box::new(Iovecs::new(Arc::clone(memory)))),
        });
        token
    }
}
