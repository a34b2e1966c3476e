//! Channels between a guest and its host: the console device (virtio 1.3, 5.3) with several ports,
//! each with a name. Linux shows a port as `/dev/virtio-ports/<name>`. Agents, such as
//! qemu-guest-agent, open the port with their name.
//!
//! ```text
//!  guest's program ◀──▶ port's queues ◀──▶ worker "channels" ◀──▶ client of the UNIX socket
//! ```
//!
//! Each channel has one client at a time; a new client replaces the previous one. The worker moves
//! bytes only when both sides are ready, so each side waits for the other one, and the worker keeps
//! at most [`MAX_OUTPUT`] bytes for each channel. The client's connection ends when the guest's
//! program closes the port, and when the guest resets the device.
//!
//! The guest always sees its ports open at the host. Otherwise qemu-guest-agent wakes up ten times a
//! second while it has no client. Output without a client is dropped.

#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzz;
mod open;
mod port;
mod protocol;
mod worker;

use std::{io, os::unix::net::UnixListener, sync::Arc};

pub use self::open::OpenChannels;

use self::{open::OnChange, worker::ChannelsHandler};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use vmm_protocol::machine::{MAX_CHANNEL_NAME, MAX_CHANNELS};

use crate::state::{Section, StateError, check, message};

/// Feature bit (5.3.3): the device has several ports.
const F_MULTIPORT: u64 = 1 << 1;

/// Most bytes from the guest that wait for the client of a channel. A larger buffer is refused.
/// Linux's driver sends at most 32 KiB at once.
pub const MAX_OUTPUT: u32 = 1 << 20;

/// Size of each queue.
const QUEUE_SIZE: u16 = 64;

/// Length of the configuration space in bytes (5.3.4): columns, rows, number of ports, emergency write.
const CONFIG_LEN: usize = 12;

/// A channel.
#[derive(Debug)]
pub struct Channel {
    /// Name of the port in the guest, 1 to [`MAX_CHANNEL_NAME`] bytes.
    pub name: String,
    /// Clients connect here; it is made non-blocking. `None` for a channel without clients.
    pub listener: Option<UnixListener>,
}

/// The front of the channels.
pub struct Channels {
    names: Vec<String>,
    open: Arc<OpenChannels>,
    queue_sizes: Vec<u16>,
    /// Until the worker is made.
    handler: Option<ChannelsHandler>,
}

impl Channels {
    /// A device with these channels, 1 to [`MAX_CHANNELS`]. It calls `on_change` after programs of
    /// the guest have opened or closed channels, and not again before [`OpenChannels::names`].
    pub fn new(channels: Vec<Channel>, on_change: OnChange) -> io::Result<Self> {
        let fits = |channel: &Channel| (1..=MAX_CHANNEL_NAME).contains(&channel.name.len());
        if channels.is_empty() || channels.len() > MAX_CHANNELS || !channels.iter().all(fits) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let names: Vec<_> = channels.iter().map(|channel| channel.name.clone()).collect();
        // Port 0, which stays unused, and the control queues come first.
        let queues = names.len().saturating_add(2).saturating_mul(2);
        let open = Arc::new(OpenChannels::new(names.clone()));
        Ok(Self {
            names,
            queue_sizes: vec![QUEUE_SIZE; queues],
            handler: Some(ChannelsHandler::new(channels, Arc::clone(&open), on_change)?),
            open,
        })
    }

    /// The channels that programs of the guest have open.
    pub fn open(&self) -> Arc<OpenChannels> {
        Arc::clone(&self.open)
    }
}

impl VirtioDevice for Channels {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Console
    }

    fn features(&self) -> u64 {
        F_MULTIPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_len(&self) -> usize {
        CONFIG_LEN
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = [0; CONFIG_LEN];
        let ports = u32::try_from(self.names.len()).unwrap_or(0).saturating_add(1);
        if let Some(field) = config.get_mut(4..8) {
            field.copy_from_slice(&ports.to_le_bytes());
        }
        read_bytes(&config, offset, data);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn reset(&mut self) {}

    fn workers(&mut self, _signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        let handler = self.handler.take().ok_or(io::ErrorKind::AlreadyExists)?;
        let count = u16::try_from(self.queue_sizes.len()).unwrap_or(0);
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "channels".into(),
            queues: (0..count).collect(),
            handler: Box::new(handler),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        let state = message::VirtioChannels {
            names: self.names.clone(),
        };
        Ok(Section::new("channels", &state))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::VirtioChannels = section.open()?;
        check(
            saved.names == self.names,
            "names",
            "other channels than the machine has",
        )
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
