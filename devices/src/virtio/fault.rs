//! Failures in a device's worker: their kinds, their cause, and their reports.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

/// A failure in a [`QueueHandler`](super::device::QueueHandler); the worker framework deals with each kind in one
/// place.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The driver sent a request that has no place for an error status. Its descriptor chain goes back with
    /// length 0; the device works on.
    #[error("queue {queue}: invalid request: {reason}")]
    Guest {
        /// The queue that the request came from.
        queue: u16,
        /// Head of its descriptor chain.
        head: u16,
        /// Description of the error.
        reason: &'static str,
    },
    /// The ring is corrupt. The device asks for a reset (virtio 1.3, 2.1.1) and does nothing until
    /// the reset.
    #[error("queue {queue}: {error}")]
    Ring {
        /// The queue.
        queue: u16,
        /// Description of the error.
        error: RingError,
    },
    /// The host refused something that no request can be blamed for (a request gets an error status instead). It is
    /// counted and reported; the device works on. When starting, the device asks to be reset.
    #[error("{0}")]
    Backend(&'static str, #[source] io::Error),
    /// The host refused something for which requests are kept, to be tried again: it is counted and reported as
    /// [`DeviceEvent::Held`], each time. The device works on.
    #[error("{0}")]
    Held(&'static str, #[source] io::Error),
    /// A defect of this program, such as a panic. The VM fails.
    #[error("internal error: {0}")]
    Bug(String),
}

/// How a ring is corrupt (virtio 1.3, 2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The queue's size is 0, not a power of two, or larger than the device offers.
    #[error("queue size {0} is not allowed")]
    Size(u16),
    /// A part of the ring is not aligned or not wholly in guest memory.
    #[error("{part} at {address:#x} is misaligned or outside guest memory")]
    Placement {
        /// "descriptor table", "available ring" or "used ring".
        part: &'static str,
        /// Guest-physical address.
        address: u64,
    },
    /// More buffers are said to be available than the ring has room for.
    #[error("available index is further ahead of {0} than the queue's size")]
    AvailableIndex(u16),
    /// The head's index is not below the queue's size.
    #[error("descriptor index {0} is out of range")]
    HeadIndex(u16),
    /// More chains are taken and not given back than the queue has descriptors: some are there twice. Holds the head of one.
    #[error("descriptor chain {0} is made available again before it was given back")]
    Outstanding(u16),
    /// The chain is empty, loops, points outside its table, nests indirect tables, or is longer than 2³² bytes.
    #[error("descriptor chain {0} is broken")]
    Chain(u16),
    /// The chain has more buffers than [`MAX_SEGMENTS`](super::chain::MAX_SEGMENTS).
    #[error("descriptor chain {0} has too many buffers")]
    ChainLength(u16),
    /// A device-readable buffer follows a device-writable one (2.7.4.2).
    #[error("descriptor chain {0} has a readable buffer behind a writable one")]
    Order(u16),
    /// A buffer is not wholly in guest memory.
    #[error("buffer of {length:#x} bytes at {address:#x} is outside guest memory")]
    Buffer {
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        length: u32,
    },
    /// The process that served the queue has ended after it completed chains out of order: the open chains are unknown.
    #[error(
        "the process that served the queues completed requests out of order before it ended: the open requests are unknown"
    )]
    Disordered,
    /// The external process that serves the queue reports a corrupt ring.
    #[error("the process that serves the queues found a ring corrupt")]
    Delegated,
    /// The ring's memory could not be accessed.
    #[error("ring memory can't be accessed")]
    Memory,
}

/// Returns the host's error as text without its number, for reports to operators.
pub(super) fn words(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error ") {
        Some((words, _)) => words.to_owned(),
        None => text,
    }
}

/// Report from a device to the lifecycle driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The driver corrupted a ring (or the backend could not be started); the device waits to be reset.
    NeedsReset(String),
    /// The host refused something; the device works on.
    BackendError(String),
    /// The host refused an operation. Requests are kept until the device continues after a pause or
    /// is reset.
    Held(String),
    /// A defect of this program: the VM has to be failed.
    Failed(String),
}

/// Takes what devices report. Called on worker threads: it must not block.
pub trait EventSink: Send + Sync {
    /// `device` is the name given at assembly: "disk root".
    fn report(&self, device: &str, event: DeviceEvent);
}

/// How often what happened to a device since it was made.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests answered with an error because they made no sense.
    pub guest_faults: AtomicU64,
    /// Rings found corrupt.
    pub ring_faults: AtomicU64,
    /// Refusals by the host that no request could be blamed for.
    pub backend_faults: AtomicU64,
    /// Notifications from the driver that a worker woke up for.
    pub kicks: AtomicU64,
    /// Interrupts sent to the driver.
    pub interrupts: AtomicU64,
}

impl Counters {
    /// Adds one to `counter`.
    pub(crate) fn bump(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_told_words_and_no_numbers() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(words(&full), "No space left on device");
        assert_eq!(words(&io::Error::other("gone")), "gone");
    }
}
