//! The socket device (virtio 1.3, 5.10): stream connections between programs of the guest (AF_VSOCK)
//! and clients on the host, without a network.
//!
//! ```text
//!  guest's program ◀──▶ rx, tx ◀──▶ worker "vsock" ◀──▶ socket ◀──▶ client on the host
//! ```
//!
//! [`VsockHost`] gives the worker one socket for each connection: it connects to a port of the guest,
//! or waits for one connection of the guest to a port of the host. The device resets all other
//! connections of the guest. The worker owns the connections, at most [`MAX_CONNECTIONS`].
//!
//! Invariants:
//!
//! - A packet of the guest that violates the protocol resets its connection, and no other one.
//! - A connection keeps at most 64 KiB of the guest's data. Bytes for the guest stay in the socket.
//! - The saved state has no connections. The driver of a restored guest receives the event
//!   TRANSPORT_RESET, and the device carries no packets before the driver has handled the event.
//! - Clients that wait for connections outlive a reset of the device, because they are the host's.

mod connection;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzz;
mod host;
mod packet;
mod worker;

use std::{io, sync::Arc};

pub use self::{
    host::{Direction, VsockHost},
    worker::MAX_CONNECTIONS,
};

use self::worker::VsockHandler;
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::state::{Section, StateError, message};

/// Feature bit VIRTIO_VSOCK_F_STREAM (5.10.3).
const F_STREAM: u64 = 1;

/// Queues (5.10.2): packets to the driver, packets from the driver, events.
const RX: u16 = 0;
const TX: u16 = 1;
const EVENT: u16 = 2;

/// Size of each queue. Linux's driver has 8 buffers for events.
const QUEUE_SIZES: [u16; 3] = [256, 256, 64];

/// Length of the configuration space in bytes (5.10.4): the guest's CID.
const CONFIG_LEN: usize = 8;

/// The front of the device.
pub struct Vsock {
    guest_cid: u32,
    host: Arc<VsockHost>,
    /// Until the worker is made.
    handler: Option<VsockHandler>,
}

impl Vsock {
    /// A device for a guest with this CID, 3 to 2^32 - 2 (5.10.4.1).
    pub fn new(guest_cid: u32) -> io::Result<Self> {
        let host = Arc::new(VsockHost::new()?);
        Ok(Self {
            guest_cid,
            handler: Some(VsockHandler::new(guest_cid, Arc::clone(&host))),
            host,
        })
    }

    /// The host's side.
    pub fn host(&self) -> Arc<VsockHost> {
        Arc::clone(&self.host)
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Socket
    }

    fn features(&self) -> u64 {
        F_STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG_LEN
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&u64::from(self.guest_cid).to_le_bytes(), offset, data);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let handler = self.handler.take().ok_or(io::ErrorKind::AlreadyExists)?;
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "vsock".into(),
            queues: vec![RX, TX, EVENT],
            handler: Box::new(handler),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        // The transport has the configuration space, and with it the CID.
        Ok(Section::new("vsock", &message::VirtioVsock {}))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let message::VirtioVsock {} = section.open()?;
        Ok(())
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;
