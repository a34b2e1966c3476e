//! Memory balloon (virtio 1.3, 5.5): a guest gives pages back to the host, either as many as the
//! host requests (inflating) or all free pages (free page reporting).
//!
//! One worker serves all queues. The balloon holds the pages that its driver gave and did not take
//! back, tracked page by page ([`pages`]). The driver's own count (`actual` in the configuration
//! space) is for display only. The device does not keep a page in the balloon from the guest: a
//! page that the guest touches returns empty. Therefore VIRTIO_BALLOON_F_MUST_TELL_HOST is not
//! offered.
//!
//! Memory in huge pages of hugetlbfs cannot be given back page by page. A machine with such memory
//! has no balloon.

mod config;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
#[cfg(any(test, feature = "testing"))]
mod harness;
mod pages;
mod request;
mod state;
mod worker;

use std::{io, sync::Arc};

use vm_memory::GuestAddress;
use zerocopy::IntoBytes;

pub use self::{
    config::PAGE,
    state::{BalloonControl, BalloonStats, GuestStats},
};
use self::{
    config::{Config, QUEUE_SIZES, QUEUES_WITHOUT_REPORTING},
    state::Shared,
    worker::BalloonHandler,
};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::state::{Section, StateError};

/// Gives guest memory back to the host.
pub trait Reclaim: Send {
    /// Drops `length` bytes from `address` on: the host has them back, and they read as zeroes from then on. Both are
    /// multiples of [`PAGE`], and the range lies in one region of guest memory. Marks the range in the dirty bitmap.
    fn reclaim(&self, address: GuestAddress, length: u64) -> io::Result<()>;
}

/// Options of a balloon.
#[derive(Clone, Copy, Debug, Default)]
pub struct BalloonOptions {
    /// Offers VIRTIO_BALLOON_F_PAGE_REPORTING.
    pub free_page_reporting: bool,
    /// Initial target size in bytes, rounded down to a multiple of [`PAGE`].
    pub target: u64,
}

/// The front of a balloon.
pub struct Balloon {
    shared: Arc<Shared>,
    /// Until the worker has it.
    reclaim: Option<Box<dyn Reclaim>>,
    free_page_reporting: bool,
}

impl Balloon {
    /// A balloon that gives pages back through `reclaim`.
    pub fn new(reclaim: Box<dyn Reclaim>, options: BalloonOptions) -> Self {
        Self {
            shared: Arc::new(Shared::new(options.target)),
            reclaim: Some(reclaim),
            free_page_reporting: options.free_page_reporting,
        }
    }

    /// The handle for others than the driver.
    pub fn control(&self) -> BalloonControl {
        BalloonControl {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        config::features(self.free_page_reporting)
    }

    fn queue_sizes(&self) -> &[u16] {
        if self.free_page_reporting {
            &QUEUE_SIZES
        } else {
            QUEUE_SIZES
                .get(..QUEUES_WITHOUT_REPORTING)
                .unwrap_or(&QUEUE_SIZES)
        }
    }

    fn config_len(&self) -> usize {
        size_of::<Config>()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(self.shared.config().as_bytes(), offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else {
            return;
        };
        match offset {
            config::ACTUAL => self.shared.set_actual(value),
            config::POISON => self.shared.set_poison(value),
            _ => {}
        }
    }

    fn reset(&mut self) {
        self.shared.set_actual(0);
        self.shared.set_poison(0);
    }

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let reclaim = self.reclaim.take().ok_or(io::ErrorKind::AlreadyExists)?;
        let queues = u16::try_from(self.queue_sizes().len()).unwrap_or(0);
        let wake = self.shared.connect(signals)?;
        let handler = BalloonHandler::new(reclaim, Arc::clone(&self.shared), wake);
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "balloon".into(),
            queues: (0..queues).collect(),
            handler: Box::new(handler),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("balloon", &self.shared.save()))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        self.shared.restore(&section.open()?)
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::single_range_in_vec_init
)]
mod tests;
