//! Taking requests from the ring, deciding what is to be done, and having it begun.

use std::sync::{Arc, atomic::Ordering};

use super::{BlkHandler, Slot, TIMER};
use crate::{
    GuestMemory,
    block::{Operation, Request},
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
        let now = self.clock.now();
        self.slots.push(Slot {
            work: Work::new(now),
            buffers: Some(Iovecs::new(Arc::clone(memory))),
        });
        token
    }
}
