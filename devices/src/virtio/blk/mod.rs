//! The block device (virtio 1.3, 5.2).

mod config;
mod request;
mod worker;

use std::io;

use zerocopy::IntoBytes;

use self::{
    config::{Config, QUEUE_SIZES},
    request::{ID_LENGTH, Limits},
    worker::BlkHandler,
};
use super::device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes};
use crate::block::Image;

/// The front of a disk.
pub struct Blk {
    image: Box<dyn Image>,
    config: Config,
    id: [u8; ID_LENGTH],
    thread_name: String,
}

impl Blk {
    /// A disk on `image`. `serial` is what its driver is told when it asks for an identification (at most 20 bytes,
    /// the rest is cut off), `name` goes into the thread's name.
    pub fn new(image: Box<dyn Image>, name: &str, serial: &str) -> Self {
        let mut id = [0; ID_LENGTH];
        for (to, from) in id.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        let config = Config::new(image.capacity());
        Self {
            image,
            config,
            id,
            thread_name: format!("blk-{name}"),
        }
    }
}

impl VirtioDevice for Blk {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        config::features(self.image.read_only())
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        size_of::<Config>()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(self.config.as_bytes(), offset, data);
    }

    /// Nothing is writable: a driver's cache mode is not on offer.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self) -> io::Result<Vec<WorkerSpec>> {
        let limits = Limits {
            capacity: self.image.capacity(),
            read_only: self.image.read_only(),
        };
        let handler = BlkHandler::new(self.image.engine()?, limits, self.id);
        Ok(vec![WorkerSpec {
            name: self.thread_name.clone(),
            queues: vec![0],
            handler: Box::new(handler),
        }])
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests;
