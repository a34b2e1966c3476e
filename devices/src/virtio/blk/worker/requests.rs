//! The path of a request, from top to bottom: taken from the ring, planned, submitted to the engine, completed.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use block::{Completion, Operation, Request};
use vmm_base::{GuestMemory, ram, sys::Iovecs};

use super::{BlkHandler, Slot, TIMER};
use crate::virtio::{
    blk::{
        OnError,
        plan::{Plan, Status},
        request::{HEADER, Work},
    },
    fault::{Fault, RingError},
    session::Session,
};

/// Completions after which the worker publishes them: one cache line of the used ring. A polling
/// driver continues meanwhile.
const SHOWN: usize = 8;

impl BlkHandler {
    /// Takes up to `most` requests and returns their number. Requests to retry come first.
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
        self.outstanding = self.outstanding.saturating_add(1);
        if self.outstanding > self.size {
            return Err(self.refuse_more(token));
        }
        self.plan(memory, token)?;
        if self.throttle.limits() && self.has_to_wait(session, token)? {
            return Ok(false);
        }
        self.begin(session, memory, token)?;
        Ok(true)
    }

    /// The driver made a chain available again that it does not have: else requests that are kept would have no end.
    fn refuse_more(&mut self, token: u32) -> Fault {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.free.push(token);
        let head = self.slots.get(token as usize).map(|slot| slot.work.chain.head());
        Fault::Ring {
            queue: self.queue,
            error: RingError::Outstanding(head.unwrap_or_default()),
        }
    }

    /// Plans the request in slot `token`, which was just taken from the ring.
    fn plan(&mut self, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let capacity = self.shared.capacity.load(Ordering::Acquire);
        if slot.work.plan(&self.limits, self.negotiated, capacity, memory) {
            return Ok(());
        }
        let head = slot.work.chain.head();
        self.free.push(token);
        self.outstanding = self.outstanding.saturating_sub(1);
        Err(Fault::Guest {
            queue: self.queue,
            head,
            reason: "no place for the status",
        })
    }

    /// Whether the request in slot `token` waits for its rate limit; it is the throttle's then.
    fn has_to_wait(&mut self, session: &Session, token: u32) -> Result<bool, Fault> {
        let Some(slot) = self.slots.get(token as usize) else {
            return Ok(false);
        };
        let clock = &mut self.clock;
        let cost = slot.work.plan.cost(&slot.work.ranges);
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
                let stable = self.negotiated.stable_writes;
                buffers
                    .append(chain.readable(), HEADER, length)
                    .map(|()| Operation::Write { offset, stable })
            }
            (Plan::Flush, _) if self.shared.is_settled() => Ok(Operation::Flush),
            (Plan::Discard { .. }, Some(range)) => Ok(range.operation(false)),
            (Plan::WriteZeroes { .. }, Some(range)) => Ok(range.operation(true)),
            (Plan::Discard { .. } | Plan::WriteZeroes { .. }, None) if work.settles(self.negotiated) => {
                Ok(Operation::Flush)
            }
            (plan, _) => {
                slot.buffers = Some(buffers);
                return self.complete_without_engine(session, memory, token, plan);
            }
        };
        let Ok(operation) = prepared else {
            slot.buffers = Some(buffers);
            return self.finish(session, memory, token, Status::IoError);
        };
        if self.engine.event().is_none() && !matches!(operation, Operation::Read { .. }) {
            // The engine executes the operation immediately, which may take long. Therefore the
            // driver gets its interrupt first.
            self.signal(session)?;
        }
        self.engine.submit(Request {
            token,
            operation,
            buffers,
        });
        Ok(())
    }

    pub(super) fn complete_without_engine(
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
            Plan::Complete(Status::Ok) => Status::Ok,
            Plan::Complete(status) => {
                session.count_guest_fault();
                status
            }
            _ => return Err(Fault::Bug("a request without a range".into())),
        };
        self.finish(session, memory, token, status)
    }

    /// Moves the request out of its slot, which is free then.
    fn take_work(&mut self, token: u32) -> Work {
        let empty = Work::empty();
        self.free.push(token);
        match self.slots.get_mut(token as usize) {
            Some(slot) => std::mem::replace(&mut slot.work, empty),
            None => empty,
        }
    }

    /// Processes completed requests and returns their number. After the first completion, the
    /// worker does not query the host for more. It submits the driver's next requests first, so
    /// that the disk does not run idle.
    pub(super) fn complete(&mut self, session: &mut Session, memory: &GuestMemory) -> Result<usize, Fault> {
        let mut count = 0_usize;
        while let Some(Completion {
            token,
            result,
            buffers,
        }) = if count == 0 {
            self.engine.completed()
        } else {
            self.engine.at_hand()
        } {
            count = count.saturating_add(1);
            let Some(slot) = self.slots.get_mut(token as usize) else {
                continue;
            };
            slot.buffers = Some(buffers);
            let work = &mut slot.work;
            if let Some((offset, length)) = work.changes() {
                // A failed operation may have written a part. The mark must precede the answer to
                // the driver.
                self.shared.tracking.mark(offset, length);
            }
            if let Plan::Read { length, .. } = work.plan {
                // Also after an error: a part may have been written.
                work.chain.mark_written(memory, 0, length);
            }
            match result {
                Ok(()) => {
                    work.range = work.range.saturating_add(1);
                    if work.goes_on(self.negotiated) || work.plan == Plan::Flush {
                        // Its next range, or what makes its ranges stable; or a flush, which may have to be kept now.
                        self.go_on(session, memory, token)?;
                    } else {
                        self.finish(session, memory, token, Status::Ok)?;
                    }
                }
                Err(error) => self.fail(session, memory, token, error)?,
            }
            if count.is_multiple_of(SHOWN) {
                session.show_used(self.queue)?;
            }
        }
        session.show_used(self.queue)?;
        Ok(count)
    }

    fn go_on(&mut self, session: &mut Session, memory: &GuestMemory, token: u32) -> Result<(), Fault> {
        let flush = self
            .slots
            .get(token as usize)
            .is_some_and(|slot| slot.work.plan == Plan::Flush);
        if flush && self.shared.is_settled() {
            return self.finish(session, memory, token, Status::Ok);
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
            return self.finish(session, memory, token, Status::Unsupported);
        }
        match self.on_error {
            OnError::Report => {
                self.fault.get_or_insert(Fault::Backend(what, error));
                self.finish(session, memory, token, Status::IoError)
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
    pub(super) fn finish(
        &mut self,
        session: &mut Session,
        memory: &GuestMemory,
        token: u32,
        status: Status,
    ) -> Result<(), Fault> {
        let now = self.clock.nanos();
        let Some(slot) = self.slots.get_mut(token as usize) else {
            return Ok(());
        };
        let work = &mut slot.work;
        let length = used_length(work, status);
        // Cannot fail: the chain was checked when it was taken.
        let _ = work.chain.write_last(memory, status.byte());
        if let (Some(kind), Some(counters)) = (work.plan.kind(), self.shared.counters(self.queue)) {
            let bytes = match work.plan {
                Plan::Read { length, .. } | Plan::Write { length, .. } => length.into(),
                _ => work.ranges.iter().map(|range| range.length).sum(),
            };
            let took = now.saturating_sub(work.since);
            counters.completed(kind, bytes, took, status == Status::Ok);
        }
        let (head, unsettled) = (work.chain.head(), std::mem::take(&mut work.unsettled));
        self.free.push(token);
        self.outstanding = self.outstanding.saturating_sub(1);
        session.put_used(self.queue, head, length)?;
        self.completions = self.completions.saturating_add(1);
        if unsettled {
            self.shared.remove_unsettled();
        }
        Ok(())
    }

    /// Returns a free slot.
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

/// The length in the used element: bytes that were written from the beginning of the writable part on. At least as many
/// must have been written (virtio 1.3, 2.7.8.2). The status is the last byte, so it counts only when all before it was
/// written; of a failed read nothing is known.
fn used_length(work: &Work, status: Status) -> u32 {
    let written = match work.plan {
        Plan::Read { length, .. } | Plan::Identify { length } if status == Status::Ok => length,
        _ => 0,
    };
    let all = work.chain.writable_len();
    if all.checked_sub(1) == Some(written) {
        all
    } else {
        written
    }
}
