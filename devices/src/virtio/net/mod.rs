//! The network device (virtio 1.3, 5.1), with one pair of queues.

mod config;
mod header;
mod receive;
mod stats;
mod transmit;
mod worker;

use std::{io, sync::Arc};

use zerocopy::IntoBytes;

use self::{
    config::{Config, FEATURES, QUEUE_SIZES, RECEIVE, TRANSMIT},
    worker::NetHandler,
};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::{
    net::NetBackend,
    state::{Section, StateError, message},
};
pub use stats::NetStats;

/// The front of a network interface.
pub struct Net {
    /// Until the worker has it.
    backend: Option<Box<dyn NetBackend>>,
    config: Config,
    mtu: u16,
    stats: Arc<NetStats>,
    thread_name: String,
}

impl Net {
    /// An interface with that address, attached to `backend`, whose frames carry at most `mtu` bytes (68 to 65,535).
    /// `name` goes into the thread's name.
    pub fn new(backend: Box<dyn NetBackend>, name: &str, mac: [u8; 6], mtu: u16) -> Self {
        // 5.1.4.1: not below 68.
        let mtu = mtu.max(68);
        Self {
            backend: Some(backend),
            config: Config::new(mac, mtu),
            mtu,
            stats: Arc::default(),
            thread_name: format!("net-{name}"),
        }
    }

    /// What it counts.
    pub fn stats(&self) -> Arc<NetStats> {
        Arc::clone(&self.stats)
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        FEATURES
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

    /// Nothing is writable: the address can only be set over a control queue.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let backend = self.backend.take().ok_or(io::ErrorKind::AlreadyExists)?;
        let handler = NetHandler::new(backend, self.mtu, Arc::clone(&self.stats));
        Ok(vec![WorkerSpec {
            name: self.thread_name.clone(),
            queues: vec![RECEIVE, TRANSMIT],
            handler: Box::new(handler),
        }])
    }

    /// Address and MTU are in the configuration space, which the transport compares.
    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new("net", &message::VirtioNet {}))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        section.open::<message::VirtioNet>().map(|_| ())
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests;
