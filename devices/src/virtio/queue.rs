//! Split virtqueue from the device's side (virtio 1.3, 2.7): takes, checks and returns buffers.
//!
//! All content of guest memory is untrusted at every access. A [`RingError`] means that the ring
//! itself is invalid. The queue must not be used after such an error.
//!
//! Driver and device access the fields of a ring (`Field`) concurrently (2.7.6 to 2.7.10, 2.7.13). Each
//! side publishes its entries and then reads the other side's notification wish. Each side also
//! writes its own wish and then reads the other side's entries. A full fence separates the write from
//! the read, so that at least one side sees the other's write and no interrupt or notification is
//! lost. These functions are generic, so the same code runs on guest memory and in loom's memory model
//! (`tests/order_model.rs`).

use std::sync::atomic::{AtomicU16, Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use vmm_base::{GuestMemory, ram};

use super::{
    chain::{Chain, Extent, Window, descriptor, place, walk},
    fault::RingError,
};

pub use crate::queue_state::QueueState;

/// Largest queue that a device may offer.
pub const MAX_SIZE: u16 = 1024;

/// So many entries are read at a time. Processors fetch about ten cache lines at once.
const AHEAD: usize = 8;

/// Names of a queue's parts in errors.
const DESC: &str = "descriptor table";
const AVAIL: &str = "available ring";
const USED: &str = "used ring";

/// A virtqueue in use.
#[derive(Debug)]
pub struct Queue {
    /// Checked; how far it has been worked off.
    state: QueueState,
    memory: GuestMemory,
    extent: Extent,
    desc: Window,
    avail: Window,
    used: Window,
    event_idx: bool,
    /// Last value read from the available index. All entries before it can be taken.
    avail_seen: u16,
    heads: Heads,
    /// `next_used` when the driver was last told, or found not to want to be.
    signalled_used: u16,
    /// Whether something was added since then.
    unsignalled: bool,
    /// Whether something was added that the used index does not show yet.
    unshown: bool,
    /// Chains that may be taken before [`pop`](Self::pop) pretends that there are none.
    budget: u32,
    exhausted: bool,
}

impl Queue {
    /// Checks `state` and creates a queue from it. `max_size` is the device's limit. `event_idx` is
    /// true if VIRTIO_F_EVENT_IDX was negotiated.
    pub fn new(
        state: &QueueState,
        max_size: u16,
        event_idx: bool,
        memory: GuestMemory,
    ) -> Result<Self, RingError> {
        check(state, max_size, event_idx)?;
        let entries = u64::from(state.size);
        // Lengths with the event fields behind the rings: 2.7.5 to 2.7.8.
        let window = |part, address, length| {
            Window::new(&memory, address, length).ok_or(RingError::Placement { part, address })
        };
        let desc = window(DESC, state.desc_table, entries.saturating_mul(16))?;
        let avail = window(
            AVAIL,
            state.avail_ring,
            entries.saturating_mul(2).saturating_add(6),
        )?;
        let used = window(USED, state.used_ring, entries.saturating_mul(8).saturating_add(6))?;
        Ok(Self {
            state: *state,
            extent: Extent::of(&memory),
            memory,
            desc,
            avail,
            used,
            event_idx,
            avail_seen: state.next_avail,
            heads: Heads::default(),
            signalled_used: state.next_used,
            unsignalled: false,
            unshown: false,
            budget: u32::MAX,
            exhausted: false,
        })
    }

    /// The queue's number in its device.
    pub fn index(&self) -> u16 {
        self.state.index
    }

    /// Continues after another server of the queue stopped. Without `next_avail`, continues with as
    /// many available entries as the driver has used entries. In this case, chains that were
    /// returned out of order are an error.
    pub(super) fn go_on(&mut self, next_avail: Option<u16>) -> Result<(), RingError> {
        let next_used = self.load(Field::UsedIndex, Ordering::Acquire)?;
        if next_avail.is_none() {
            self.check_order(next_used)?;
        }
        let next_avail = next_avail.unwrap_or(next_used);
        self.state.next_avail = next_avail;
        self.state.next_used = next_used;
        self.avail_seen = next_avail;
        self.heads = Heads::default();
        self.signalled_used = next_used;
        self.unsignalled = false;
        self.unshown = false;
        Ok(())
    }

    /// Compares the heads in the used ring since [`state`](Self::state) with the heads in the same places of the available ring. Older
    /// entries are overwritten.
    fn check_order(&self, next_used: u16) -> Result<(), RingError> {
        let open = available(self)?.wrapping_sub(next_used);
        let since = next_used.wrapping_sub(self.state.next_used);
        let both = self.state.size.saturating_sub(open).min(since);
        for back in 1..=both {
            let slot = self.slot(next_used.wrapping_sub(back));
            let available = self
                .avail
                .load(slot.wrapping_mul(2).wrapping_add(4), Ordering::Relaxed);
            // The lower half of a word: heads have 16 bits.
            let used = self
                .used
                .load(slot.wrapping_mul(8).wrapping_add(4), Ordering::Relaxed);
            match (available, used) {
                (Some(available), Some(used)) if available == used => {}
                (Some(_), Some(_)) => return Err(RingError::Disordered),
                _ => return Err(RingError::Memory),
            }
        }
        Ok(())
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.state.size
    }

    /// Returns the state from which another queue can continue.
    pub fn state(&self) -> QueueState {
        self.state
    }

    /// Takes the next available chain into `chain`; says whether there was one. All its buffers lie in guest memory.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let Some(budget) = self.budget.checked_sub(1) else {
            self.exhausted = true;
            return Ok(false);
        };
        let next = self.state.next_avail;
        if next == self.avail_seen {
            // The load also orders the later reads of the ring and the buffers.
            let index = available(self)?;
            if index.wrapping_sub(next) > self.state.size {
                return Err(RingError::AvailableIndex(next));
            }
            if index == next {
                return Ok(false);
            }
            self.avail_seen = index;
        }
        let head = match self.heads.get(next) {
            Some(head) => head,
            None => self.read_heads(next)?,
        };
        self.read_chain(head, chain)?;
        self.state.next_avail = next.wrapping_add(1);
        self.budget = budget;
        Ok(true)
    }

    /// Reads the chain with that head into `chain`: one that is being taken, or was taken from this queue before it was saved.
    pub fn read_chain(&self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        if head >= self.state.size {
            return Err(RingError::HeadIndex(head));
        }
        walk(
            chain,
            &self.desc,
            self.state.size,
            head,
            &self.memory,
            &self.extent,
        )
    }

    /// Reads the head of the next chain, and some after it.
    fn read_heads(&mut self, next: u16) -> Result<u16, RingError> {
        let available = self.avail_seen.wrapping_sub(next);
        let rings = [&self.avail, &self.desc];
        self.heads
            .read(next, available, self.state.size, rings, &self.memory);
        self.heads.get(next).ok_or(RingError::Memory)
    }

    /// Where in a ring the entry with that free-running index is.
    fn slot(&self, index: u16) -> u64 {
        // The size is a power of two.
        u64::from(index & self.state.size.wrapping_sub(1))
    }

    /// Puts the `count` chains taken last back, to be taken again. Only chains that were not given back by
    /// [`add_used`](Self::add_used) may be. They do not count as taken.
    pub fn unpop(&mut self, count: u16) {
        self.state.next_avail = self.state.next_avail.wrapping_sub(count);
        self.budget = self.budget.saturating_add(count.into());
    }

    /// Gives the chain with that head back to the driver, with `written` bytes written to its writable part from the
    /// beginning.
    pub fn add_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        self.put_used(head, written)?;
        self.show_used()
    }

    /// The same, but the driver sees it only at the next [`show_used`](Self::show_used): one write of the index that its
    /// processor watches, for several chains.
    pub fn put_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        if head >= self.state.size {
            return Err(RingError::HeadIndex(head));
        }
        let next = self.state.next_used;
        let element = self.slot(next).wrapping_mul(8).wrapping_add(4);
        // The driver does not look at it before the used index says so.
        let stored = self
            .used
            .write(element, [u32::from(head).to_le(), written.to_le()]);
        stored.ok_or(RingError::Memory)?;
        self.state.next_used = next.wrapping_add(1);
        self.unshown = true;
        Ok(())
    }

    /// Publishes the entries put into the used ring.
    pub fn show_used(&mut self) -> Result<(), RingError> {
        if std::mem::take(&mut self.unshown) {
            publish(self, self.state.next_used)?;
            self.unsignalled = true;
        }
        Ok(())
    }

    /// Gives several chains back so that the driver sees all of them or none (a packet in merged buffers).
    pub fn add_used_together(&mut self, used: &[(u16, u32)]) -> Result<(), RingError> {
        let (begin, unshown) = (self.state.next_used, self.unshown);
        let most = usize::from(self.state.size);
        let result = used.iter().enumerate().try_for_each(|(at, (head, written))| {
            if at >= most {
                return Err(RingError::HeadIndex(*head));
            }
            self.put_used(*head, *written)
        });
        if result.is_err() {
            self.state.next_used = begin;
            self.unshown = unshown;
        }
        result?;
        self.show_used()
    }

    /// Whether the driver wants an interrupt for the entries added since the last call (2.7.7.2).
    pub fn needs_interrupt(&mut self) -> Result<bool, RingError> {
        self.show_used()?;
        if !std::mem::take(&mut self.unsignalled) {
            return Ok(false);
        }
        let (old, new) = (self.signalled_used, self.state.next_used);
        self.signalled_used = new;
        wants_interrupt(self, self.event_idx, old, new)
    }

    /// Asks the driver to notify when it makes the next buffer available. When this says true, there are some
    /// already, and a notification may not come.
    pub fn enable_notification(&mut self) -> Result<bool, RingError> {
        ask_to_notify(self, self.event_idx, self.state.next_avail)
    }

    /// Asks the driver not to send notifications.
    pub fn disable_notification(&mut self) -> Result<(), RingError> {
        ask_not_to_notify(self, self.event_idx, self.state.next_avail)
    }

    /// Number of available chains; 0 if the ring is invalid, which [`pop`](Self::pop) reports.
    pub fn available(&self) -> u16 {
        let available = available(self).map_or(0, |index| index.wrapping_sub(self.state.next_avail));
        if available > self.state.size { 0 } else { available }
    }

    /// Returns the backlog of available chains for other threads.
    pub(super) fn backlog(&self) -> Backlog {
        Backlog::new(self.avail.clone(), self.state.size, self.state.next_avail)
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
}

/// Checks the size and how the parts are aligned, as the crate virtio-queue checks the state of a queue that it is to make.
fn check(state: &QueueState, max_size: u16, event_idx_enabled: bool) -> Result<(), RingError> {
    let QueueState {
        size,
        desc_table,
        avail_ring,
        used_ring,
        next_avail,
        next_used,
        index: _,
    } = *state;
    let checked = virtio_queue::Queue::try_from(virtio_queue::QueueState {
        max_size: max_size.min(MAX_SIZE),
        size,
        ready: true,
        event_idx_enabled,
        desc_table,
        avail_ring,
        used_ring,
        next_avail,
        next_used,
    });
    let misplaced = |part, address| Err(RingError::Placement { part, address });
    match checked {
        Ok(_) => Ok(()),
        Err(virtio_queue::Error::InvalidDescTableAlign) => misplaced(DESC, desc_table),
        Err(virtio_queue::Error::InvalidAvailRingAlign) => misplaced(AVAIL, avail_ring),
        Err(virtio_queue::Error::InvalidUsedRingAlign) => misplaced(USED, used_ring),
        Err(_) => Err(RingError::Size(size)),
    }
}

/// Heads of the next chains, read ahead.
///
/// To take a chain, a device reads the ring's entry, the descriptor, and usually an indirect table.
/// The driver's processor has just written all three, so each read fetches a cache line from the
/// driver's cache. Each such fetch costs about a hundred instructions, as much as all other work
/// for taking the chain. Therefore several entries are read at a time, and meanwhile the memory that
/// they refer to is fetched.
#[derive(Debug, Default)]
struct Heads {
    list: [u16; AHEAD],
    /// Free-running index of the first of them.
    first: u16,
    count: u16,
}

impl Heads {
    /// The head that was read for the chain with that free-running index.
    #[inline]
    fn get(&self, index: u16) -> Option<u16> {
        let at = index.wrapping_sub(self.first);
        if at >= self.count {
            return None;
        }
        self.list.get(usize::from(at)).copied()
    }

    /// Reads the heads of the chains from `index` on from the ring `avail`. `available` is the
    /// number of available chains. `size` is the number of entries of the ring and is a power of
    /// two. Prefetches the descriptors of the chains from the table `desc` and their indirect
    /// tables from `memory`.
    fn read(
        &mut self,
        index: u16,
        available: u16,
        size: u16,
        [avail, desc]: [&Window; 2],
        memory: &GuestMemory,
    ) {
        (self.first, self.count) = (index, 0);
        // For a single chain a prefetch has no benefit, because the caller reads the chain next.
        let fetches = available > 1;
        for (entry, at) in self.list.iter_mut().zip(0..available) {
            let slot = index.wrapping_add(at) & size.wrapping_sub(1);
            let Some(head) = avail.load(u64::from(slot).wrapping_mul(2).wrapping_add(4), Ordering::Relaxed)
            else {
                break;
            };
            *entry = u16::from_le(head);
            self.count = at.wrapping_add(1);
            if fetches {
                desc.fetch(place(*entry));
            }
        }
        if !fetches {
            return;
        }
        for head in self
            .list
            .iter()
            .take(self.count.into())
            .filter(|head| **head < size)
        {
            let Some(descriptor) = desc.read::<[u64; 2]>(place(*head)).map(descriptor) else {
                continue;
            };
            if descriptor.refers_to_indirect_table() {
                ram::fetch_to_read(memory, descriptor.addr());
            }
        }
    }
}

/// Number of buffers of a queue that wait to be taken, for other threads than its worker. It exists while the queue is served. It reads the available ring and keeps guest memory
/// alive.
#[derive(Debug)]
pub(crate) struct Backlog {
    avail: Window,
    size: u16,
    /// The free-running index up to which the worker says to have taken.
    taken: AtomicU16,
}

impl Backlog {
    /// `avail` is the available ring, `taken` the free-running index of the next entry to take.
    pub(super) fn new(avail: Window, size: u16, taken: u16) -> Self {
        Self {
            avail,
            size,
            taken: AtomicU16::new(taken),
        }
    }

    /// Says how far the worker is.
    pub(super) fn set_taken(&self, next_avail: u16) {
        self.taken.store(next_avail, Ordering::Relaxed);
    }

    /// Buffers that the driver made available and that were not taken when the worker last said; 0 when the ring makes no
    /// sense.
    pub(super) fn waiting(&self) -> u16 {
        // The worker's index must be read first. Requests that the driver adds meanwhile count as
        // waiting, and requests that the worker takes meanwhile may still count.
        let taken = self.taken.load(Ordering::Relaxed);
        let index = self.avail.load(2, Ordering::Acquire).map_or(taken, u16::from_le);
        let waiting = index.wrapping_sub(taken);
        if waiting > self.size { 0 } else { waiting }
    }
}

/// A 16-bit field of the available ring or the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// `flags` of the available ring: the driver's wish without EVENT_IDX.
    AvailFlags,
    /// `idx` of the available ring.
    AvailIndex,
    /// `used_event`: the driver's wish with EVENT_IDX.
    UsedEvent,
    /// `flags` of the used ring: the device's wish without EVENT_IDX.
    UsedFlags,
    /// `idx` of the used ring.
    UsedIndex,
    /// `avail_event`: the device's wish with EVENT_IDX.
    AvailEvent,
}

/// The fields of one queue.
pub(super) trait Fields {
    /// Error of an access to a field.
    type Error;

    /// Reads a field, in one access.
    fn load(&self, field: Field, order: Ordering) -> Result<u16, Self::Error>;

    /// Writes a field, in one access.
    fn store(&self, field: Field, value: u16, order: Ordering) -> Result<(), Self::Error>;

    /// Full fence: earlier writes become visible before later reads execute.
    fn fence(&self);
}

impl Queue {
    /// The ring that a field is in, and where.
    #[inline(always)]
    fn place(&self, field: Field) -> (&Window, u64) {
        let size = u64::from(self.state.size);
        match field {
            Field::AvailFlags => (&self.avail, 0),
            Field::AvailIndex => (&self.avail, 2),
            // Behind the ring's entries: 2.7.6, 2.7.8.
            Field::UsedEvent => (&self.avail, size.wrapping_mul(2).wrapping_add(4)),
            Field::UsedFlags => (&self.used, 0),
            Field::UsedIndex => (&self.used, 2),
            Field::AvailEvent => (&self.used, size.wrapping_mul(8).wrapping_add(4)),
        }
    }
}

impl Fields for Queue {
    type Error = RingError;

    #[inline(always)]
    fn load(&self, field: Field, order: Ordering) -> Result<u16, RingError> {
        let (ring, offset) = self.place(field);
        let value = ring.load(offset, order);
        value.map(u16::from_le).ok_or(RingError::Memory)
    }

    #[inline(always)]
    fn store(&self, field: Field, value: u16, order: Ordering) -> Result<(), RingError> {
        let (ring, offset) = self.place(field);
        ring.store(offset, value.to_le(), order).ok_or(RingError::Memory)
    }

    #[inline(always)]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// Index up to which the driver has made chains available. The load precedes reads of the driver's
/// earlier writes.
#[inline(always)]
pub(super) fn available<F: Fields>(fields: &F) -> Result<u16, F::Error> {
    fields.load(Field::AvailIndex, Ordering::Acquire)
}

/// Shows the driver the used entries before `index`, which were written before.
#[inline(always)]
pub(super) fn publish<F: Fields>(fields: &F, index: u16) -> Result<(), F::Error> {
    fields.store(Field::UsedIndex, index, Ordering::Release)
}

/// Whether the driver wants an interrupt for the used entries from `old` to `new`, which were published (2.7.7.2).
#[inline(always)]
pub(super) fn wants_interrupt<F: Fields>(
    fields: &F,
    event_idx: bool,
    old: u16,
    new: u16,
) -> Result<bool, F::Error> {
    fields.fence();
    if event_idx {
        let event = fields.load(Field::UsedEvent, Ordering::Relaxed)?;
        return Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old));
    }
    let flags = fields.load(Field::AvailFlags, Ordering::Relaxed)?;
    Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
}

/// Asks the driver to notify of the first buffer after `taken` (2.7.10). Says whether there is one already.
#[inline(always)]
pub(super) fn ask_to_notify<F: Fields>(fields: &F, event_idx: bool, taken: u16) -> Result<bool, F::Error> {
    let (field, wish) = if event_idx {
        (Field::AvailEvent, taken)
    } else {
        (Field::UsedFlags, 0)
    };
    fields.store(field, wish, Ordering::Relaxed)?;
    fields.fence();
    Ok(available(fields)? != taken)
}

/// Asks the driver not to send notifications. The driver may see the request late.
#[inline(always)]
fn ask_not_to_notify<F: Fields>(fields: &F, event_idx: bool, taken: u16) -> Result<(), F::Error> {
    // At a buffer that was taken already, or VRING_USED_F_NO_NOTIFY.
    let (field, wish) = if event_idx {
        (Field::AvailEvent, taken.wrapping_sub(1))
    } else {
        (Field::UsedFlags, 1)
    };
    fields.store(field, wish, Ordering::Relaxed)
}
