//! MSI: the capability with one message (PCI 3.0, 6.8.1), with 64 bits of address and without a mask.
//!
//! The vector behind it is the only entry of an MSI-X table that no BAR shows. The capability's registers, which are
//! in the configuration space, fill that entry.

use std::{io, sync::Arc};

use super::{
    config::{ConfigError, ConfigSpace},
    msix::{Msix, MsixVectors},
};
use crate::{
    interrupt::MsiController,
    state::{StateError, message},
};

const CAPABILITY: u8 = 0x05;
/// Message Control: the function sends messages.
const ENABLE: u16 = 1 << 0;
/// Message Control: the address has 64 bits.
const ADDRESS_64: u8 = 1 << 7;
/// Offsets in the capability.
const CONTROL: usize = 2;
const ADDRESS: usize = 4;
const DATA: usize = 12;
/// Length of the registers behind ID and link.
const BODY: usize = 12;
/// MSI-X's message control: enabled, all vectors masked.
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASK: u16 = 1 << 14;

/// Content of the capability's registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Registers {
    enabled: bool,
    address: [u32; 2],
    data: u16,
}

/// See the module.
pub struct Msi {
    table: Msix,
    capability: usize,
    /// The registers that the table follows.
    applied: Registers,
}

impl Msi {
    /// Adds the capability to `config`. MSI is disabled.
    pub fn new(controller: &dyn MsiController, config: &mut ConfigSpace) -> io::Result<Self> {
        let (mut body, mut writable) = ([0; BODY], [0xff; BODY]);
        let ([low, ..], [enable, high, address, ..]) = (&mut body, &mut writable);
        *low = ADDRESS_64;
        (*enable, *high, *address) = (1, 0, 0xfc);
        let capability = config
            .add_capability(CAPABILITY, &body, &writable)
            .map_err(|error: ConfigError| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        Ok(Self {
            table: Msix::new(controller, 1)?,
            capability,
            applied: Registers::default(),
        })
    }

    /// The vectors, of which there is one, number 0.
    pub fn vectors(&self) -> &Arc<MsixVectors> {
        self.table.vectors()
    }

    /// Makes the vector follow the capability in `config`, after a write there.
    pub fn apply(&mut self, config: &ConfigSpace) {
        let at = |offset: usize| self.capability.saturating_add(offset);
        let registers = Registers {
            enabled: config.read_u16(at(CONTROL)) & ENABLE != 0,
            address: [config.read_u32(at(ADDRESS)), config.read_u32(at(ADDRESS + 4))],
            data: config.read_u16(at(DATA)),
        };
        if registers == self.applied {
            return;
        }
        self.applied = registers;
        let control = if registers.enabled { MSIX_ENABLE } else { 0 };
        // The message changes while the vector is closed.
        self.table.write_message_control(control | MSIX_MASK);
        let [low, high] = registers.address;
        // Address, data, and vector control: not masked.
        for (offset, word) in [(0, low), (4, high), (8, registers.data.into()), (12, 0)] {
            self.table.write_table(offset, &word.to_le_bytes());
        }
        self.table.write_message_control(control);
    }

    /// Whether the function may write to memory, and with that send messages. It may not after power-on.
    pub fn set_bus_master(&mut self, on: bool) {
        self.table.set_bus_master(on);
    }

    /// To the state after power-on, as the capability is.
    pub fn reset(&mut self) {
        self.table.reset();
        self.applied = Registers::default();
    }

    /// The message and whether it is pending.
    pub fn save(&self) -> message::Msix {
        self.table.save()
    }

    /// Restores a saved state; `config` is restored. The function is no bus master yet, so no message is sent:
    /// [`set_bus_master`](Self::set_bus_master) sends the pending one.
    pub fn restore(&mut self, saved: &message::Msix, config: &ConfigSpace) -> Result<(), StateError> {
        self.reset();
        self.apply(config);
        let control = self.table.message_control();
        let [own] = self.table.save().entries.try_into().unwrap_or_default();
        let pending = message::MsixEntry {
            pending: saved.entries.first().is_some_and(|entry| entry.pending),
            ..own
        };
        let entries = vec![pending];
        self.table.restore(&message::Msix { entries }, control)
    }
}

#[cfg(test)]
mod tests;
