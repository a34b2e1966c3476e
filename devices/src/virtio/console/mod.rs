//! The console device (virtio 1.3, 5.3) with one port: a buffer of output is one notification, where a 16550 has an exit for
//! each byte.
//!
//! ```text
//!  vCPU: notification ──▶ worker "console" ──▶ History ──▶ Server ──▶ clients
//!  interrupt ◀── worker, as the driver has buffers ◀── Shared (input that waits) ◀──┘
//! ```

mod config;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod shared;
mod worker;

use std::{io, sync::Arc};

use self::{config::Config, shared::Shared, worker::ConsoleHandler};
use super::{
    device::{DeviceKind, VirtioDevice, WorkerSpec, read_bytes},
    signals::Signals,
};
use crate::{
    serial::{History, Port},
    state::{Section, StateError, message, narrow},
};

/// Feature bits (5.3.3): the size of the console is in the configuration; a byte written there is printed without queues.
const F_SIZE: u64 = 1;
const F_EMERG_WRITE: u64 = 1 << 2;

/// Sizes of the receive queue and of the transmit queue.
const QUEUE_SIZES: [u16; 2] = [64; 2];

/// The front of a console.
pub struct Console {
    shared: Arc<Shared>,
    connected: bool,
}

impl Console {
    /// A console that prints into `history`.
    pub fn new(history: Arc<History>) -> io::Result<Self> {
        Ok(Self {
            shared: Arc::new(Shared::new(history)?),
            connected: false,
        })
    }

    /// Returns the port for a [`Server`](crate::serial::Server).
    pub fn port(&self) -> Arc<dyn Port> {
        Arc::<Shared>::clone(&self.shared)
    }

    /// The handle for others than the driver.
    pub fn control(&self) -> ConsoleControl {
        ConsoleControl(Arc::clone(&self.shared))
    }
}

/// A handle on a console for everybody but its driver.
#[derive(Clone)]
pub struct ConsoleControl(Arc<Shared>);

impl ConsoleControl {
    /// Sets the size of the terminal in columns and rows of characters, and notifies the guest.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.0.resize(columns, rows);
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Console
    }

    fn features(&self) -> u64 {
        F_SIZE | F_EMERG_WRITE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        config::LENGTH
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.shared.config().encode(), offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        // The console prints the lowest byte. Drivers write the whole field.
        if let (config::EMERG_WRITE, [character, _, _, _]) = (offset, data) {
            self.shared.print(&[*character]);
        }
    }

    fn reset(&mut self) {}

    fn workers(&mut self, signals: &Arc<Signals>) -> io::Result<Vec<WorkerSpec>> {
        if std::mem::replace(&mut self.connected, true) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.shared.connect(signals);
        Ok(vec![WorkerSpec {
            kind: vmm_base::thread::ThreadKind::Worker,
            name: "console".into(),
            queues: vec![0, 1],
            handler: Box::new(ConsoleHandler::new(Arc::clone(&self.shared))),
        }])
    }

    fn save(&self) -> Result<Section, StateError> {
        let Config { columns, rows } = self.shared.config();
        let state = message::VirtioConsole {
            columns: columns.into(),
            rows: rows.into(),
        };
        Ok(Section::new("console", &state))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::VirtioConsole = section.open()?;
        self.shared.set_config(Config {
            columns: narrow("columns", saved.columns)?,
            rows: narrow("rows", saved.rows)?,
        });
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
