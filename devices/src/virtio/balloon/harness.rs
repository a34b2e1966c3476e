//! A balloon without threads: the driver's memory, the worker's framework and the host are all in the hands of the test,
//! so that each run is the same.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use std::{
    io,
    ops::{Deref, DerefMut, Range},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use vm_memory::GuestAddress;

use super::{Balloon, BalloonControl, BalloonOptions, PAGE, Reclaim};
use crate::virtio::{
    device::VirtioDevice,
    testing::{Bare, Layout},
};

/// Guest memory: two regions with a hole between them, in bytes.
pub(super) const REGIONS: [Range<u64>; 2] = [0..1 << 20, 2 << 20..4 << 20];
/// Rings of queue n are at `RINGS + n * RING_SPACE`, buffers after them.
pub(super) const RINGS: u64 = 0x1000;
const RING_SPACE: u64 = 0x2000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
/// Buffers are from here on, up to the first region's end.
pub(super) const DATA: u64 = 0x1_0000;
/// Size of each queue.
pub(super) const SIZE: u16 = 16;

/// Mock of the host: records the reclaimed ranges, and fails on demand.
#[derive(Clone, Default)]
pub(super) struct MockHost {
    /// In pages, since it was looked at last.
    pub given: Arc<Mutex<Vec<Range<u64>>>>,
    /// How many of the next calls fail.
    pub failures: Arc<AtomicU64>,
}

impl Reclaim for MockHost {
    fn reclaim(&self, address: GuestAddress, length: u64) -> io::Result<()> {
        let range = address.0..address.0 + length;
        assert!(length > 0 && address.0.is_multiple_of(PAGE) && length.is_multiple_of(PAGE));
        assert!(
            REGIONS
                .iter()
                .any(|region| region.start <= range.start && range.end <= region.end),
            "{range:x?} is not in one region"
        );
        if self.failures.load(Ordering::SeqCst) > 0 {
            self.failures.fetch_sub(1, Ordering::SeqCst);
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.given
            .lock()
            .unwrap()
            .push(range.start / PAGE..range.end / PAGE);
        Ok(())
    }
}

/// A balloon whose queues were set up, and its driver's memory.
pub(super) struct Harness {
    bare: Bare,
    pub host: MockHost,
    pub control: BalloonControl,
    pub front: Balloon,
    /// Resets because of a corrupt ring.
    pub resets: usize,
}

impl Deref for Harness {
    type Target = Bare;

    fn deref(&self) -> &Bare {
        &self.bare
    }
}

impl DerefMut for Harness {
    fn deref_mut(&mut self) -> &mut Bare {
        &mut self.bare
    }
}

impl Harness {
    pub(super) fn new(features: u64, options: BalloonOptions) -> Self {
        let host = MockHost::default();
        let mut front = Balloon::new(Box::new(host.clone()), options);
        let layout = Layout {
            regions: REGIONS.map(|region| (region.start, region.end)),
            rings: (RINGS, DATA),
            space: RING_SPACE,
            avail: AVAIL,
            used: USED,
            size: SIZE,
        };
        let mut harness = Self {
            bare: Bare::new(&mut front, features | 1 << 32, layout),
            host,
            control: front.control(),
            front,
            resets: 0,
        };
        harness.run();
        harness
    }

    /// Notifies the worker of a new entry in the available ring and runs all its work, including
    /// its own follow-up kicks.
    pub(super) fn kick(&mut self, queue: u16) {
        self.bare.notify(queue);
        self.run();
    }

    /// One call of the handler only.
    pub(super) fn kick_once(&mut self, queue: u16) {
        self.bare.notify(queue);
        if self.bare.step() == Some(false) {
            self.broken();
        }
    }

    /// Somebody asked for statistics.
    pub(super) fn asked(&mut self) {
        if !self.bare.event() {
            self.broken();
            self.run();
        }
    }

    pub(super) fn run(&mut self) {
        while !self.bare.run() {
            self.broken();
        }
    }

    fn broken(&mut self) {
        self.resets += 1;
        self.reset();
    }

    fn drained(&self) {
        for queue in 0..self.queues() {
            assert_eq!(
                self.outstanding(queue),
                0,
                "a request is neither in the ring nor answered"
            );
        }
    }

    pub(super) fn pause_and_resume(&mut self) {
        self.bare.drain();
        self.drained();
        self.bare.start();
        self.run();
    }

    /// A reset by the driver, and a start with empty rings.
    pub(super) fn reset(&mut self) {
        self.bare.drain();
        self.drained();
        self.bare.reset();
        self.front.reset();
        let stats = self.control.stats();
        assert_eq!((stats.held, stats.claimed, stats.guest), (0, 0, None));
        self.bare.start();
    }
}
