//! A split virtqueue as a device uses it (virtio 1.3, 2.7): buffers are taken, checked, and given back.
//!
//! What lies in guest memory is untrusted at every access. A [`RingError`] means that the ring as such makes no sense
//! any more; the queue is not to be used after one.

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue as SplitQueue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{
    chain::{Chain, GuestSlice, MAX_SEGMENTS, Segment},
    fault::RingError,
};
use crate::GuestMemory;

/// Largest queue that a device may offer.
pub const MAX_SIZE: u16 = 1024;

/// Where a queue is and how far it has been worked off: all there is to know about it while no worker runs. Plain data;
/// untrusted until [`Queue::new`] has checked it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// The queue's number in its device.
    pub index: u16,
    /// Number of descriptors.
    pub size: u16,
    /// Guest-physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest-physical address of the available ring ("driver area").
    pub avail_ring: u64,
    /// Guest-physical address of the used ring ("device area").
    pub used_ring: u64,
    /// Free-running index of the next available entry to take.
    pub next_avail: u16,
    /// Free-running index of the next used entry to fill.
    pub next_used: u16,
}

/// A virtqueue in use.
#[derive(Debug)]
pub struct Queue {
    index: u16,
    ring: SplitQueue,
    memory: GuestMemory,
    event_idx: bool,
    /// The available index when it was last looked at: what is before it can be taken.
    avail_seen: u16,
    /// `next_used` when the driver was last told, or found not to want to be.
    signalled_used: u16,
    /// Whether something was added since then.
    unsignalled: bool,
    /// Chains that may be taken before [`pop`](Self::pop) pretends that there are none.
    budget: u32,
    exhausted: bool,
}

impl Queue {
    /// Checks `state` and makes a queue of it. `max_size` is what the device offers, `event_idx` says whether
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub fn new(
        state: &QueueState,
        max_size: u16,
        event_idx: bool,
        memory: GuestMemory,
    ) -> Result<Self, RingError> {
        let size = state.size;
        let bad_size = |_| RingError::Size(size);
        let mut ring = SplitQueue::new(max_size.min(MAX_SIZE)).map_err(bad_size)?;
        ring.try_set_size(size).map_err(bad_size)?;
        let entries = u64::from(size);
        // Lengths with the event fields behind the rings: 2.7.5 to 2.7.8.
        let parts = [
            (
                "descriptor table",
                state.desc_table,
                16,
                entries.saturating_mul(16),
            ),
            (
                "available ring",
                state.avail_ring,
                2,
                entries.saturating_mul(2).saturating_add(6),
            ),
            (
                "used ring",
                state.used_ring,
                4,
                entries.saturating_mul(8).saturating_add(6),
            ),
        ];
        for (part, address, align, length) in parts {
            let fits = usize::try_from(length)
                .is_ok_and(|length| GuestMemoryBackend::check_range(&memory, GuestAddress(address), length));
            if !address.is_multiple_of(align) || !fits {
                return Err(RingError::Placement { part, address });
            }
        }
        let place = |part, address| move |_| RingError::Placement { part, address };
        ring.try_set_desc_table_address(GuestAddress(state.desc_table))
            .map_err(place("descriptor table", state.desc_table))?;
        ring.try_set_avail_ring_address(GuestAddress(state.avail_ring))
            .map_err(place("available ring", state.avail_ring))?;
        ring.try_set_used_ring_address(GuestAddress(state.used_ring))
            .map_err(place("used ring", state.used_ring))?;
        ring.set_event_idx(event_idx);
        ring.set_next_avail(state.next_avail);
        ring.set_next_used(state.next_used);
        ring.set_ready(true);
        Ok(Self {
            index: state.index,
            ring,
            memory,
            event_idx,
            avail_seen: state.next_avail,
            signalled_used: state.next_used,
            unsignalled: false,
            budget: u32::MAX,
            exhausted: false,
        })
    }

    /// The queue's number in its device.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// What another queue can be made of that goes on where this one is.
    pub fn state(&self) -> QueueState {
        QueueState {
            index: self.index,
            size: self.ring.size(),
            desc_table: self.ring.desc_table(),
            avail_ring: self.ring.avail_ring(),
            used_ring: self.ring.used_ring(),
            next_avail: self.ring.next_avail(),
            next_used: self.ring.next_used(),
        }
    }

    /// Takes the next available chain into `chain`; says whether there was one. All its buffers lie in guest memory.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let Some(budget) = self.budget.checked_sub(1) else {
            self.exhausted = true;
            return Ok(false);
        };
        let next = self.ring.next_avail();
        if next == self.avail_seen {
            // Also orders what is read of the ring and the buffers after it.
            let index = self.avail_index()?;
            if index.wrapping_sub(next) > self.ring.size() {
                return Err(RingError::AvailableIndex(next));
            }
            if index == next {
                return Ok(false);
            }
            self.avail_seen = index;
        }
        let slot = u64::from(next.checked_rem(self.ring.size()).unwrap_or(0));
        let place = slot.wrapping_mul(2).wrapping_add(4);
        let head = self.load(self.ring.avail_ring().wrapping_add(place))?;
        if head >= self.ring.size() {
            return Err(RingError::HeadIndex(head));
        }
        self.fill(chain, head)?;
        self.ring.set_next_avail(next.wrapping_add(1));
        self.budget = budget;
        Ok(true)
    }

    /// Walks the chain once.
    fn fill(&self, chain: &mut Chain, head: u16) -> Result<(), RingError> {
        chain.clear(head);
        let broken = || RingError::Chain(head);
        let mut table = Table::new(&self.memory, self.ring.desc_table(), self.ring.size());
        let (mut index, mut indirect, mut total) = (head, false, 0_u32);
        let (mut left, mut count) = (table.entries, 0_usize);
        loop {
            // As many steps as there are descriptors: more is a loop.
            left = left.checked_sub(1).ok_or_else(broken)?;
            let descriptor = table.get(index).ok_or_else(broken)?;
            let Descriptor {
                address,
                length,
                flags,
                next,
            } = descriptor;
            if flags & VRING_DESC_F_INDIRECT != 0 {
                // One level, whole descriptors (2.7.5.3).
                let entries = length.checked_div(DESCRIPTOR).unwrap_or(0);
                let entries = u16::try_from(entries).map_err(|_| broken())?;
                if indirect || !length.is_multiple_of(DESCRIPTOR) {
                    return Err(broken());
                }
                table = Table::new(&self.memory, address, entries);
                (index, indirect, left) = (0, true, entries);
                continue;
            }
            total = total.checked_add(length).ok_or_else(broken)?;
            count = count.saturating_add(1);
            if count > MAX_SEGMENTS {
                return Err(RingError::ChainLength(head));
            }
            let writable = flags & VRING_DESC_F_WRITE != 0;
            if !writable && chain.segments.len() > chain.readable {
                return Err(RingError::Order(head));
            }
            if length > 0 {
                let place = GuestAddress(address);
                if !GuestMemoryBackend::check_range(&self.memory, place, length as usize) {
                    return Err(RingError::Buffer { address, length });
                }
                chain.segments.push(Segment {
                    address: place,
                    length,
                });
                if writable {
                    chain.writable_len = chain.writable_len.saturating_add(length);
                } else {
                    chain.readable = chain.segments.len();
                    chain.readable_len = chain.readable_len.saturating_add(length);
                }
            }
            if flags & VRING_DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = next;
        }
    }

    /// Puts the `count` chains taken last back, to be taken again. Only chains that were not given back by
    /// [`add_used`](Self::add_used) may be.
    pub fn unpop(&mut self, count: u16) {
        self.ring
            .set_next_avail(self.ring.next_avail().wrapping_sub(count));
    }

    /// Gives the chain with that head back to the driver, with `written` bytes written to its writable part from the
    /// beginning.
    pub fn add_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        self.ring
            .add_used(&self.memory, head, written)
            .map_err(|_| RingError::HeadIndex(head))?;
        self.unsignalled = true;
        Ok(())
    }

    /// Gives several chains back so that the driver sees all of them or none (a packet in merged buffers).
    pub fn add_used_together(&mut self, used: &[(u16, u32)]) -> Result<(), RingError> {
        let Some(((last_head, last_written), first)) = used.split_last() else {
            return Ok(());
        };
        let (size, begin) = (self.ring.size(), self.ring.next_used());
        let mut next = begin;
        for (head, written) in first {
            if *head >= size || next.wrapping_sub(begin) >= size {
                return Err(RingError::HeadIndex(*head));
            }
            let slot = u64::from(next.checked_rem(size).unwrap_or(0));
            let address = self
                .ring
                .used_ring()
                .wrapping_add(slot.wrapping_mul(8))
                .wrapping_add(4);
            let element = u64::from(*head) | u64::from(*written) << 32;
            self.memory
                .write_obj(element.to_le(), GuestAddress(address))
                .map_err(|_| RingError::Memory)?;
            next = next.wrapping_add(1);
        }
        self.ring.set_next_used(next);
        self.add_used(*last_head, *last_written)
    }

    /// Whether the driver wants an interrupt for what was added since the last call (2.7.7.2).
    pub fn needs_interrupt(&mut self) -> Result<bool, RingError> {
        if !std::mem::take(&mut self.unsignalled) {
            return Ok(false);
        }
        let (old, new) = (self.signalled_used, self.ring.next_used());
        self.signalled_used = new;
        // The used index must be visible before the driver's wish is read: it writes its wish, then looks at the index.
        fence(Ordering::SeqCst);
        let avail = self.ring.avail_ring();
        if self.event_idx {
            let offset = u64::from(self.ring.size()).wrapping_mul(2).wrapping_add(4);
            let event = self.load(avail.wrapping_add(offset))?;
            return Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old));
        }
        let flags = self.load(avail)?;
        Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Asks the driver to notify when it makes the next buffer available. When this says true, there are some
    /// already, and a notification may not come.
    pub fn enable_notification(&mut self) -> Result<bool, RingError> {
        self.ring
            .enable_notification(&self.memory)
            .map_err(|_| RingError::Memory)
    }

    /// The same, but a driver with EVENT_IDX is asked to notify only when it has added more than `unnotified` buffers
    /// to those taken (2.7.10).
    pub fn enable_notification_after(&mut self, unnotified: u16) -> Result<bool, RingError> {
        if !self.event_idx || unnotified == 0 {
            return self.enable_notification();
        }
        self.set_avail_event(self.ring.next_avail().wrapping_add(unnotified))?;
        // The wish must be visible before the index is read: the driver writes its index, then reads the wish.
        fence(Ordering::SeqCst);
        Ok(self.avail_index()? != self.ring.next_avail())
    }

    /// Tells the driver that no notifications are needed.
    pub fn disable_notification(&mut self) -> Result<(), RingError> {
        if self.event_idx {
            // At a buffer that was taken already.
            return self.set_avail_event(self.ring.next_avail().wrapping_sub(1));
        }
        self.ring
            .disable_notification(&self.memory)
            .map_err(|_| RingError::Memory)
    }

    /// How many chains are available; 0 if the ring makes no sense, which [`pop`](Self::pop) tells.
    pub fn available(&self) -> u16 {
        let available = self
            .avail_index()
            .map_or(0, |index| index.wrapping_sub(self.ring.next_avail()));
        if available > self.ring.size() {
            0
        } else {
            available
        }
    }

    fn avail_index(&self) -> Result<u16, RingError> {
        let address = GuestAddress(self.ring.avail_ring().wrapping_add(2));
        let value: u16 = self
            .memory
            .load(address, Ordering::Acquire)
            .map_err(|_| RingError::Memory)?;
        Ok(u16::from_le(value))
    }

    /// Writes the field behind the used ring that says when to notify.
    fn set_avail_event(&self, index: u16) -> Result<(), RingError> {
        let offset = u64::from(self.ring.size()).wrapping_mul(8).wrapping_add(4);
        let address = GuestAddress(self.ring.used_ring().wrapping_add(offset));
        self.memory
            .store(index.to_le(), address, Ordering::Relaxed)
            .map_err(|_| RingError::Memory)
    }

    /// Lets `pop` take that many chains, no more.
    pub(super) fn set_budget(&mut self, budget: u32) {
        self.budget = budget;
        self.exhausted = false;
    }

    /// Whether `pop` gave none because the budget was used up.
    pub(super) fn exhausted(&self) -> bool {
        self.exhausted
    }

    fn load(&self, address: u64) -> Result<u16, RingError> {
        let value: u16 = self
            .memory
            .load(GuestAddress(address), Ordering::Relaxed)
            .map_err(|_| RingError::Memory)?;
        Ok(u16::from_le(value))
    }
}

/// Bytes of a descriptor (2.7.5).
const DESCRIPTOR: u32 = 16;
const VRING_DESC_F_NEXT: u16 = 1;
const VRING_DESC_F_WRITE: u16 = 2;
const VRING_DESC_F_INDIRECT: u16 = 4;

struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

/// A descriptor table; found in memory once, if it is in one piece.
struct Table<'a> {
    memory: &'a GuestMemory,
    address: u64,
    entries: u16,
    slice: Option<GuestSlice<'a>>,
}

impl<'a> Table<'a> {
    fn new(memory: &'a GuestMemory, address: u64, entries: u16) -> Self {
        let length = usize::from(entries).saturating_mul(DESCRIPTOR as usize);
        Self {
            memory,
            address,
            entries,
            slice: GuestMemoryBackend::get_slice(memory, GuestAddress(address), length).ok(),
        }
    }

    /// `None` when there is none with that index, or its memory is not there.
    fn get(&self, index: u16) -> Option<Descriptor> {
        if index >= self.entries {
            return None;
        }
        let offset = u64::from(index).wrapping_mul(DESCRIPTOR.into());
        let [address, rest]: [u64; 2] = match &self.slice {
            Some(slice) => slice.read_obj(usize::try_from(offset).ok()?).ok()?,
            None => {
                let place = GuestAddress(self.address.checked_add(offset)?);
                self.memory.read_obj(place).ok()?
            }
        };
        let rest = u64::from_le(rest);
        Some(Descriptor {
            address: u64::from_le(address),
            length: u32::try_from(rest & u64::from(u32::MAX)).ok()?,
            flags: u16::try_from(rest >> 32 & 0xffff).ok()?,
            next: u16::try_from(rest >> 48).ok()?,
        })
    }
}
