//! Saved state of a queue of a disk: the requests that are kept after an error of the host.
//!
//! A kept request was taken from the ring, so the queue's progress does not show it. Its head is saved. Which writes the flushes of
//! all queues wait for is known when the device is restored, before any worker starts; the chains are read at the first start, and
//! then the requests are tried again as after a pause.

use std::sync::atomic::Ordering;

use vmm_base::GuestMemory;

use super::{
    hold::{Kept, Restored},
    plan::Work,
    worker::BlkHandler,
};
use crate::{
    state::{StateError, check, message, narrow},
    virtio::{
        fault::{Fault, RingError},
        queue::MAX_SIZE,
        session::Session,
    },
};

impl Kept {
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
