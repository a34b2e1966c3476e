//! Dealing with what has completed, and answering.

use std::io;

use super::BlkHandler;
use crate::{
    GuestMemory,
    block::Completion,
    virtio::{
        blk::{
            OnError,
            hold::Work,
            request::{Plan, Status},
        },
        fault::Fault,
        session::Session,
    },
};

/// After so many answers the driver may see them, and goes on meanwhile if it looks: a cache line of the used ring.
const SHOWN: usize = 8;

impl BlkHandler {
    pub(super) fn answer_without_engine(
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
        let empty = Work::empty();
        self.free.push(token);
        match self.slots.get_mut(token as usize) {
            Some(slot) => std::mem::replace(&mut slot.work, empty),
            None => empty,
        }
    }

    /// Deals with what has completed; gives how many requests. With some, there may be others that the host has not been
    /// asked for: first the driver's next requests are handed over, so that the disk does not run dry meanwhile.
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
    pub(super) fn answer(
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
            counters.answered(kind, bytes, took, status == Status::Ok);
        }
        let (head, unsettled) = (work.chain.head(), std::mem::take(&mut work.unsettled));
        self.free.push(token);
        self.unanswered = self.unanswered.saturating_sub(1);
        session.put_used(self.queue, head, length)?;
        self.pace.answered();
        self.untold = self.untold.saturating_add(1);
        if self.untold_since.is_none() {
            self.untold_since = Some(self.clock.now());
        }
        if unsettled {
            self.shared.remove_unsettled();
        }
        Ok(())
    }
}

/// The length in the used element: bytes that were written from the beginning of the writable part on, at least (virtio 1.3,
/// 2.7.8.2). The status is the last byte, so it counts only when all before it was written; of a failed read nothing is
/// known.
fn used_length(work: &Work, status: Status) -> u32 {
    let data = match work.plan {
        Plan::Read { length, .. } | Plan::Identify { length } if status == Status::Ok => length,
        _ => 0,
    };
    let all = work.chain.writable_len();
    if all.checked_sub(1) == Some(data) {
        all
    } else {
        data
    }
}
