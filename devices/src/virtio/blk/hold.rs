//! Kept requests: requests that the host could not carry out and that are retried, and flushes that
//! wait for them.
//!
//! ```text
//!            host's error                 next start
//!  engine ────────────────▶ failed ──────────────────────▶ again ──▶ engine
//!         ────────────────▶ flushes ─────────────────────▶ again
//!            writes are kept          no write is kept
//! ```
//!
//! A kept request holds its descriptors and its copied parts, but nothing of guest memory, so the
//! lists survive a pause. It was taken from the ring, so the queue's progress does not show it, and its head is saved.
//! After a restore, only the heads are known. The worker reads their chains
//! at the first start, before it takes anything from the ring. A request is kept at most once, so a
//! queue keeps at most as many requests as it has descriptors.
//!
//! A driver may read a successful flush as a promise about all earlier requests. Some file systems
//! report a write error only once, at a flush. A failed write, discard or zeroing of *any* queue is
//! *unsettled* until it succeeds. While an unsettled request exists, no flush starts. A flush that
//! was in progress when the request failed does not complete, but is repeated. The flushes of all
//! queues wait until all unsettled requests have succeeded. A failed flush is kept like any other
//! request.

use std::{collections::VecDeque, sync::atomic::Ordering};

use vmm_base::GuestMemory;

use super::{control::Shared, request::Work, worker::BlkHandler};
use crate::{
    state::{StateError, check, message, narrow},
    virtio::{
        fault::{Fault, RingError},
        queue::MAX_SIZE,
        session::Session,
    },
};

/// A kept request of a device that was restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Restored {
    /// Index of its first descriptor.
    pub head: u16,
    /// It is counted as unsettled.
    pub unsettled: bool,
}

/// Kept requests of one worker.
#[derive(Debug, Default)]
pub(super) struct Kept {
    failed: Vec<Work>,
    flushes: Vec<Work>,
    /// To be submitted before anything new.
    again: VecDeque<Work>,
    /// To be read at the next start; they come before all others.
    restored: VecDeque<Restored>,
    /// The worker has reported kept requests since the last pause.
    reported: bool,
}

impl Kept {
    /// Keeps a request that failed; says whether that has to be reported.
    pub(super) fn fail(&mut self, mut work: Work, shared: &Shared) -> bool {
        if work.plan.is_write() && !work.unsettled {
            work.unsettled = true;
            shared.add_unsettled();
        }
        self.failed.push(work);
        !std::mem::replace(&mut self.reported, true)
    }

    /// Keeps a flush until nothing is unsettled.
    pub(super) fn wait(&mut self, flush: Work) {
        self.flushes.push(flush);
    }

    /// The next one to submit again.
    pub(super) fn next(&mut self, shared: &Shared) -> Option<Work> {
        if !self.flushes.is_empty() && shared.is_settled() {
            self.again.extend(self.flushes.drain(..));
        }
        self.again.pop_front()
    }

    /// Schedules failed requests for a retry when the device continues.
    pub(super) fn restart(&mut self) {
        self.again.extend(self.failed.drain(..));
    }

    /// The device pauses.
    pub(super) fn paused(&mut self) {
        self.reported = false;
    }

    pub(super) fn len(&self) -> usize {
        self.failed
            .len()
            .saturating_add(self.flushes.len())
            .saturating_add(self.again.len())
            .saturating_add(self.restored.len())
    }

    /// All of them, in the order in which they are tried again.
    pub(super) fn all(&self) -> impl Iterator<Item = Restored> {
        let read = self.again.iter().chain(&self.failed).chain(&self.flushes);
        let read = read.map(|work| Restored {
            head: work.chain.head(),
            unsettled: work.unsettled,
        });
        read.chain(self.restored.iter().copied())
    }

    /// Takes over what another worker kept.
    pub(super) fn restore(&mut self, kept: Vec<Restored>, shared: &Shared) {
        for _ in kept.iter().filter(|kept| kept.unsettled) {
            shared.add_unsettled();
        }
        self.restored = kept.into();
    }

    /// The next one that was restored, to be read and given to [`read_again`](Self::read_again).
    pub(super) fn restored(&self) -> Option<Restored> {
        self.restored.front().copied()
    }

    /// [`restored`](Self::restored) was read.
    pub(super) fn read_again(&mut self, work: Work) {
        self.restored.pop_front();
        self.again.push_back(work);
    }

    /// The driver wants none of them any more.
    pub(super) fn forget(&mut self, shared: &Shared) {
        for _ in self.all().filter(|kept| kept.unsettled) {
            shared.remove_unsettled();
        }
        *self = Self::default();
    }

    pub(super) fn save(&self) -> message::VirtioBlkQueue {
        let kept = self
            .all()
            .map(|Restored { head, unsettled }| message::VirtioBlkKept {
                head: head.into(),
                unsettled,
            });
        message::VirtioBlkQueue { kept: kept.collect() }
    }
}

impl BlkHandler {
    /// Takes over what another worker kept. Whether the heads are any of this queue's is found out when they are read.
    pub(super) fn restore_kept(&mut self, saved: &message::VirtioBlkQueue) -> Result<(), StateError> {
        check(
            saved.kept.len() <= usize::from(MAX_SIZE),
            "kept",
            "more than a queue has descriptors",
        )?;
        let kept = saved.kept.iter().map(|kept| {
            Ok(Restored {
                head: narrow("kept.head", kept.head)?,
                unsettled: kept.unsettled,
            })
        });
        let kept = kept.collect::<Result<Vec<_>, StateError>>()?;
        self.outstanding = kept.len();
        self.kept.restore(kept, &self.shared);
        if let Some(counters) = self.shared.counters(self.queue) {
            counters.set_in_flight(self.outstanding);
            counters.set_held(self.kept.len());
        }
        Ok(())
    }

    /// Reads the restored requests. The driver must not change them, so an unreadable request means
    /// a corrupt ring.
    pub(super) fn read_restored(&mut self, session: &mut Session, memory: &GuestMemory) -> Result<(), Fault> {
        let capacity = self.shared.capacity.load(Ordering::Acquire);
        while let Some(Restored { head, unsettled }) = self.kept.restored() {
            let ring = |error| Fault::Ring {
                queue: self.queue,
                error,
            };
            let mut work = Work::empty();
            session.read_chain(self.queue, head, &mut work.chain)?;
            if self.outstanding > self.size {
                return Err(ring(RingError::Outstanding(head)));
            }
            if !work.plan(&self.limits, self.negotiated, capacity, memory) {
                return Err(ring(RingError::Chain(head)));
            }
            work.since = self.clock.nanos();
            work.unsettled = unsettled;
            self.kept.read_again(work);
        }
        Ok(())
    }
}
