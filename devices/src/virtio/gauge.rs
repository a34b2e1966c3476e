//! How many buffers of a queue wait to be taken, for others than its worker.

use std::sync::atomic::{AtomicU16, Ordering};

use super::window::Window;

/// Gauge of one queue while the queue is served. It reads the available ring and keeps guest memory
/// alive.
#[derive(Debug)]
pub(super) struct Gauge {
    avail: Window,
    size: u16,
    /// The free-running index up to which the worker says to have taken.
    taken: AtomicU16,
}

impl Gauge {
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
