//! One queue of a disk without threads: the driver's memory, the worker's framework and the host are all in the hands of
//! the test, so that each run is the same.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod host;

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex},
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) use self::host::{Host, Mock, host};
use super::{Blk, BlkControl, BlkOptions};
use crate::virtio::testing::{Bare, Layout};

/// Guest memory: two regions with a hole between them.
pub(super) const REGION: u64 = 1 << 17;
pub(super) const HOLE_END: u64 = 1 << 18;
pub(super) const MEMORY_END: u64 = HOLE_END + REGION;

/// Where the rings are.
pub(super) const DESC: u64 = 0x1000;
pub(super) const AVAIL: u64 = 0x3000;
pub(super) const USED: u64 = 0x4000;
/// Buffers are from here on.
pub(super) const DATA: u64 = 0x8000;

/// Size of the queue.
pub(super) const SIZE: u16 = 64;

/// A queue of a disk, with its host and its control.
pub(super) struct Harness {
    bare: Bare,
    pub host: Arc<Mutex<Host>>,
    pub control: BlkControl,
    /// It keeps the image.
    _front: Blk,
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
    pub(super) fn new(host: Host, options: BlkOptions, features: u64) -> Self {
        let host = Arc::new(Mutex::new(host));
        let image = Mock {
            host: host.clone(),
            event: EventFd::new(EFD_NONBLOCK).unwrap(),
        };
        let mut front = Blk::new(Box::new(image), options);
        let layout = Layout {
            regions: [(0, REGION), (HOLE_END, MEMORY_END)],
            rings: (DESC, DATA),
            space: 0,
            avail: AVAIL - DESC,
            used: USED - DESC,
            size: SIZE,
        };
        Self {
            bare: Bare::new(&mut front, features, layout),
            host,
            control: front.control(),
            _front: front,
        }
    }

    /// Notifies the worker of a new entry in the available ring and runs all its work, including
    /// its own follow-up kicks.
    pub(super) fn kick(&mut self) {
        self.bare.notify(0);
        self.run();
    }

    /// Requests have completed.
    pub(super) fn event(&mut self) {
        if !self.bare.event() {
            self.reset();
            self.run();
        }
    }

    /// The host does all that it was asked for, and what follows from it.
    pub(super) fn finish_all(&mut self) {
        while self.host.lock().unwrap().finish(0) {
            self.event();
        }
    }

    fn run(&mut self) {
        while !self.bare.run() {
            self.reset();
        }
    }

    pub(super) fn pause_and_resume(&mut self) {
        self.bare.drain();
        assert!(self.host.lock().unwrap().waiting.is_empty());
        self.bare.start();
        self.run();
    }

    /// A reset, and a start with empty rings.
    pub(super) fn reset(&mut self) {
        self.bare.reset();
        assert!(self.host.lock().unwrap().waiting.is_empty());
        let stats = self.control.stats();
        assert_eq!((stats.in_flight, stats.held), (0, 0));
        assert_eq!((stats.throttled, stats.waiting), (0, 0));
        self.bare.start();
    }
}
