//! Fields of a ring that driver and device access concurrently, and the memory ordering of these
//! accesses (virtio 1.3, 2.7.6 to 2.7.10, 2.7.13).
//!
//! Each side publishes its entries and then reads the other side's notification wish. Each side
//! also writes its own wish and then reads the other side's entries. A full fence separates the
//! write from the read, so that at least one side sees the other's write and no interrupt or
//! notification is lost. The functions are generic, so the same code runs on guest memory and in
//! loom's memory model (`tests/order_model.rs`).

use std::sync::atomic::Ordering;

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;

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
pub(super) fn ask_not_to_notify<F: Fields>(fields: &F, event_idx: bool, taken: u16) -> Result<(), F::Error> {
    // At a buffer that was taken already, or VRING_USED_F_NO_NOTIFY.
    let (field, wish) = if event_idx {
        (Field::AvailEvent, taken.wrapping_sub(1))
    } else {
        (Field::UsedFlags, 1)
    };
    fields.store(field, wish, Ordering::Relaxed)
}
