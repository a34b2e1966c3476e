//! Saved state of a disk: the size that its driver knows, and the requests that are kept for an error.
//!
//! A kept request was taken from the ring, so the queue's progress does not show it. Its head is saved; the restored
//! worker reads the descriptor chain anew at its first start and tries the request again. Which writes flushes have to
//! wait for is known before any worker starts.

use std::sync::atomic::Ordering;

use super::{
    Blk,
    hold::{Kept, Restored, Work},
    worker::BlkHandler,
};
use crate::{
    state::{Section, StateError, check, message, narrow},
    virtio::{
        fault::{Fault, RingError},
        queue::MAX_SIZE,
        session::Session,
    },
};

impl Blk {
    pub(super) fn saved(&self) -> Section {
        let capacity = self.shared.capacity.load(Ordering::SeqCst);
        Section::new(&self.name, &message::VirtioBlk { capacity })
    }

    /// An image that is larger than the driver knows keeps the size that the driver knows until it is grown.
    pub(super) fn take_over(&self, section: &Section) -> Result<(), StateError> {
        let message::VirtioBlk { capacity } = section.open()?;
        let block = u64::from(self.limits.block);
        check(
            capacity.is_multiple_of(block),
            "capacity",
            "no multiple of the logical block",
        )?;
        check(
            capacity <= self.shared.capacity.load(Ordering::SeqCst),
            "capacity",
            "the image is smaller",
        )?;
        self.shared.capacity.store(capacity, Ordering::SeqCst);
        Ok(())
    }
}

impl BlkHandler {
    pub(super) fn saved(&self) -> Result<Section, StateError> {
        let kept: Vec<_> = self
            .kept
            .heads()
            .map(|Restored { head, unsettled }| message::VirtioBlkKept {
                head: head.into(),
                unsettled,
            })
            .collect();
        if kept.len() > usize::from(MAX_SIZE) {
            // It reuses descriptors of requests that are not completed.
            let why = "its driver has more requests under way than a ring holds";
            return Err(StateError::not_migratable("disk", why));
        }
        Ok(Section::new(
            &self.queue.to_string(),
            &message::VirtioBlkQueue { kept },
        ))
    }

    pub(super) fn take_over(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::VirtioBlkQueue = section.open()?;
        check(
            saved.kept.len() <= usize::from(MAX_SIZE),
            "kept",
            "more than a ring holds",
        )?;
        let kept = saved.kept.iter().map(|kept| {
            Ok(Restored {
                head: narrow("kept.head", kept.head)?,
                unsettled: kept.unsettled,
            })
        });
        let kept = kept.collect::<Result<Vec<_>, StateError>>()?;
        self.kept.restore(kept, &self.shared);
        Ok(())
    }

    /// Reads the requests anew that a restored device keeps. A chain that can't be read, or has no place for a status,
    /// is one that the driver changed although it is the device's.
    pub(super) fn read_restored(&mut self, session: &mut Session) -> Result<(), Fault> {
        let Some(memory) = self.memory.clone() else {
            return Ok(());
        };
        while let Some(Restored { head, unsettled }) = self.kept.restored() {
            let token = self.free_slot(&memory);
            let since = self.clock.nanos();
            if let Some(slot) = self.slots.get_mut(token as usize) {
                slot.work.since = since;
                session.read_chain(self.queue, head, &mut slot.work.chain)?;
            }
            self.unanswered = self.unanswered.saturating_add(1);
            self.plan(&memory, token).map_err(|_| Fault::Ring {
                queue: self.queue,
                error: RingError::Chain(head),
            })?;
            let work = self.take_work(token);
            self.kept.is_read(Work { unsettled, ..work });
        }
        Ok(())
    }
}

impl Kept {
    /// Heads of all requests, in the order in which they are tried again.
    fn heads(&self) -> impl Iterator<Item = Restored> {
        let read = self.all().map(|work| Restored {
            head: work.chain.head(),
            unsettled: work.unsettled,
        });
        read.chain(self.restored.iter().copied())
    }

    fn restore(&mut self, kept: Vec<Restored>, shared: &super::control::Shared) {
        for _ in kept.iter().filter(|kept| kept.unsettled) {
            shared.add_unsettled();
        }
        self.restored = kept.into();
    }

    /// The next one to be read anew.
    fn restored(&self) -> Option<Restored> {
        self.restored.front().copied()
    }

    /// [`restored`](Self::restored) was read.
    fn is_read(&mut self, work: Work) {
        self.restored.pop_front();
        self.again.push_back(work);
    }
}
