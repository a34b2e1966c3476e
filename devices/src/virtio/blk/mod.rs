//! Block device (virtio 1.3, 5.2).
//!
//! Each queue has its own worker thread and engine. The shared state is in [`control`]: capacity,
//! limiter, counters, and the number of unsettled writes.

mod config;
pub(crate) mod control;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod harness;
mod hold;
pub(crate) mod plan;
mod request;
mod worker;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
};

use zerocopy::IntoBytes;

pub use self::control::{BUCKETS, BlkControl, BlkStats, Mirror, OperationStats};
use self::{
    config::{Config, QUEUE_SIZE},
    control::{Shared, SharedImage},
    plan::Limits,
    request::ID_LENGTH,
    worker::{BlkHandler, Identity},
};
use block::Image;

use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes, thread_name},
    rate::Limiter,
    signals::Signals,
};
use crate::state::{Section, StateError, check, message};

/// Most queues of a disk.
pub const MAX_QUEUES: u16 = 16;

/// Options of a disk.
#[derive(Clone, Debug)]
pub struct BlkOptions {
    /// Goes into the threads' names.
    pub name: String,
    /// Identification that the driver can read: at most 20 bytes, longer values are truncated.
    pub serial: String,
    /// Number of queues, each with a thread. Values are clamped to 1..=[`MAX_QUEUES`].
    pub queues: u16,
    /// Bytes in a logical block, 512 or 4096 (anything else is taken as 512).
    pub logical_block: u32,
    /// Reaction to a request that the host cannot carry out.
    pub on_error: OnError,
    /// Limits its requests, if there is one.
    pub limiter: Option<Arc<Limiter>>,
}

/// Reaction to a request that the host cannot carry out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The driver gets the error, and an event says so.
    #[default]
    Report,
    /// The device keeps the request without a completion and sends an event. It retries the request
    /// when it continues after a pause. Other requests continue meanwhile.
    Hold,
}

/// The front of a disk.
pub struct Blk {
    image: Arc<SharedImage>,
    shared: Arc<Shared>,
    limits: Limits,
    /// Configuration without the capacity.
    config: Config,
    queue_sizes: Vec<u16>,
    identity: Identity,
    on_error: OnError,
    name: String,
}

impl Blk {
    /// A disk on `image`. A size that is not a multiple of the logical block is an error when it is built into a machine.
    pub fn new(image: Box<dyn Image>, options: BlkOptions) -> Self {
        let mut identity = [0; ID_LENGTH];
        for (to, from) in identity.iter_mut().zip(options.serial.bytes()) {
            *to = from;
        }
        let queues = options.queues.clamp(1, MAX_QUEUES);
        let geometry = image.geometry();
        let limits = Limits {
            block: if options.logical_block == 4096 { 4096 } else { 512 },
            read_only: image.read_only(),
            discard: !image.read_only() && geometry.discard_granularity.is_some(),
        };
        let shared = Shared::new(image.capacity(), limits.block, queues, options.limiter);
        Self {
            shared: Arc::new(shared),
            image: Arc::new(Mutex::new(image)),
            config: Config::new(&limits, &geometry, queues),
            limits,
            queue_sizes: vec![QUEUE_SIZE; queues.into()],
            identity,
            on_error: options.on_error,
            name: options.name,
        }
    }

    /// The same disk for a machine with a BIOS, whose driver cannot use all limits.
    #[must_use]
    pub fn with_bios(mut self) -> Self {
        self.config = self.config.with_bios();
        self
    }

    /// The handle for others than the driver.
    pub fn control(&self) -> BlkControl {
        BlkControl::new(&self.shared, &self.image)
    }

    fn queues(&self) -> u16 {
        u16::try_from(self.queue_sizes.len()).unwrap_or(MAX_QUEUES)
    }
}

impl VirtioDevice for Blk {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        config::features(&self.limits, self.queues())
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_len(&self) -> usize {
        size_of::<Config>()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let capacity = self.shared.capacity.load(Ordering::SeqCst);
        read_bytes(self.config.with_capacity(capacity).as_bytes(), offset, data);
    }

    /// Nothing is writable: a driver's cache mode is not on offer.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let capacity = self.shared.capacity.load(Ordering::SeqCst);
        if !capacity.is_multiple_of(self.limits.block.into()) {
            let block = self.limits.block;
            let message =
                format!("size of {capacity} bytes is not a multiple of the logical block of {block}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        self.shared.connect(signals)?;
        let image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        (0..self.queues())
            .map(|queue| {
                let engine = image.engine()?;
                let shared = Arc::clone(&self.shared);
                let handler =
                    BlkHandler::new(queue, engine, shared, self.limits, self.identity, self.on_error);
                Ok(WorkerSpec {
                    kind: vmm_base::thread::ThreadKind::Worker,
                    name: thread_name("blk", &self.name, queue),
                    queues: vec![queue],
                    handler: Box::new(handler),
                })
            })
            .collect()
    }

    fn save(&self) -> Result<Section, StateError> {
        let capacity = self.shared.capacity.load(Ordering::SeqCst);
        Ok(Section::new(&self.name, &message::VirtioBlk { capacity }))
    }

    /// An image that is larger than the driver knows keeps the size that the driver knows until it is grown.
    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let message::VirtioBlk { capacity } = section.open()?;
        let block = u64::from(self.limits.block);
        check(
            capacity.is_multiple_of(block),
            "capacity",
            "not a multiple of the logical block",
        )?;
        let image = self.shared.capacity.load(Ordering::SeqCst);
        check(capacity <= image, "capacity", "the image is smaller")?;
        self.shared.capacity.store(capacity, Ordering::SeqCst);
        Ok(())
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
