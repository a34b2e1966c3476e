//! The configuration space of one function, with a type 0 header (PCI 3.0, 6.1).
//!
//! Every byte has a mask of the bits that the guest may write; nothing else about a write is special here. Sizing a
//! BAR works by its mask alone: the bits below its size are not writable.

use crate::state::{StateError, message};

/// Bytes of the space: that of a conventional function. The rest of PCI Express' 4 KiB reads as all
/// ones, as on a conventional bus (PCI Express 5.0, 7.2.2), so kernels do not look for extended
/// capabilities there.
pub const CONFIG_SIZE: usize = 256;
/// Number of BAR registers.
pub const BARS: usize = 6;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const FIRST_BAR: usize = 0x10;
const CAPABILITIES_POINTER: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;

/// Command: the function decodes memory accesses.
const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may read and write memory, and send interrupts by that.
const COMMAND_MASTER: u16 = 1 << 2;
/// Command: bits that a guest may write. There are no I/O BARs, so I/O decoding cannot be turned
/// on. Memory, bus master, parity error response, SERR, INTx disable.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_MASTER | 1 << 6 | 1 << 8 | 1 << 10;
/// Status: there is a list of capabilities.
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// BAR type: 64 bits wide.
const BAR_64: u8 = 0b100;
/// Smallest memory BAR.
const MIN_BAR: u64 = 16;

/// Identification of a function.
#[derive(Clone, Copy, Debug, Default)]
pub struct Header {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Class, subclass and programming interface: 24 bits.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// Width of a memory BAR; none is prefetchable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Below 4 GiB.
    Memory32,
    /// Anywhere; takes two registers.
    Memory64,
}

/// Where a BAR decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First guest-physical address, a multiple of the size.
    pub address: u64,
    /// Bytes, a power of two.
    pub size: u64,
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    kind: BarKind,
    size: u64,
}

/// Adding something to a configuration space that does not fit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The BAR's index or size is not possible, or it is taken.
    #[error("BAR {0} can't have that size, or is taken")]
    Bar(usize),
    /// No room is left for capabilities.
    #[error("no room for a capability of {0} bytes")]
    Capability(usize),
}

/// See the module.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SIZE],
    writable: [u8; CONFIG_SIZE],
    /// `bytes` after power-on.
    initial: [u8; CONFIG_SIZE],
    bars: [Option<Bar>; BARS],
    next_capability: usize,
    last_link: usize,
}

impl ConfigSpace {
    /// With a header and nothing else.
    pub fn new(header: &Header) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_SIZE],
            writable: [0; CONFIG_SIZE],
            initial: [0; CONFIG_SIZE],
            bars: [None; BARS],
            next_capability: FIRST_CAPABILITY,
            last_link: CAPABILITIES_POINTER,
        };
        space.set(0x00, &header.vendor.to_le_bytes());
        space.set(0x02, &header.device.to_le_bytes());
        space.set(
            0x08,
            &(header.class << 8 | u32::from(header.revision)).to_le_bytes(),
        );
        space.set(0x2c, &header.subsystem_vendor.to_le_bytes());
        space.set(0x2e, &header.subsystem.to_le_bytes());
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        // Cache line size and interrupt line hold what software writes there.
        space.allow(0x0c, &[0xff]);
        space.allow(0x3c, &[0xff]);
        space
    }

    /// Adds a memory BAR of `size` bytes (a power of two, at least 16) without an address.
    pub fn add_bar(&mut self, index: usize, kind: BarKind, size: u64) -> Result<(), ConfigError> {
        let error = ConfigError::Bar(index);
        let second = index.saturating_add(1);
        let taken = |bars: &[Option<Bar>; BARS], index: usize| bars.get(index).is_none_or(Option::is_some);
        let is_upper_half = index
            .checked_sub(1)
            .and_then(|below| self.bars.get(below))
            .is_some_and(|below| below.is_some_and(|bar| bar.kind == BarKind::Memory64));
        let fits = match kind {
            BarKind::Memory32 => size <= 1 << 31,
            BarKind::Memory64 => !taken(&self.bars, second),
        };
        if taken(&self.bars, index) || is_upper_half || !fits || !size.is_power_of_two() || size < MIN_BAR {
            return Err(error);
        }
        let Some(bar) = self.bars.get_mut(index) else {
            return Err(error);
        };
        *bar = Some(Bar { kind, size });
        let mask = (!size.wrapping_sub(1) & !0xf).to_le_bytes();
        let (register, low) = (
            bar_register(index),
            mask.first_chunk::<4>().copied().unwrap_or_default(),
        );
        match kind {
            BarKind::Memory32 => self.allow(register, &low),
            BarKind::Memory64 => {
                self.allow(register, &mask);
                self.set(register, &[BAR_64]);
            }
        }
        Ok(())
    }

    /// Adds a capability whose body (behind ID and link) is `body`, of which the guest may write the bits in `writable`
    /// (as long as `body`, or shorter). Gives the capability's offset.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Result<usize, ConfigError> {
        let error = ConfigError::Capability(body.len());
        let offset = self.next_capability;
        let end = offset
            .checked_add(2)
            .and_then(|start| start.checked_add(body.len()));
        let Some(end) = end.filter(|end| *end <= CONFIG_SIZE) else {
            return Err(error);
        };
        let Ok(link) = u8::try_from(offset) else {
            return Err(error);
        };
        self.set(self.last_link, &[link]);
        self.set(offset, &[id, 0]);
        self.set(offset.saturating_add(2), body);
        self.allow(
            offset.saturating_add(2),
            writable.get(..body.len().min(writable.len())).unwrap_or_default(),
        );
        self.set(STATUS, &[STATUS_CAPABILITIES]);
        self.last_link = offset.saturating_add(1);
        self.next_capability = end.next_multiple_of(4);
        Ok(offset)
    }

    /// Sets registers behind the header to `value` at power-on, of which the guest may write the bits in `writable`. Not for a
    /// function with capabilities, which begin there.
    pub fn add_registers(&mut self, offset: usize, value: &[u8], writable: &[u8]) {
        self.set(offset, value);
        self.allow(offset, writable);
    }

    /// Reads bytes; bytes beyond the end are all ones.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        let bytes = self.bytes.get(offset..).unwrap_or_default();
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(at).copied().unwrap_or(0xff);
        }
    }

    /// Writes the writable bits.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        let bytes = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((byte, writable), new) in bytes.zip(data) {
            *byte = *byte & !writable | new & writable;
        }
    }

    /// 16 bits at `offset`.
    pub fn read_u16(&self, offset: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// 32 bits at `offset`.
    pub fn read_u32(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Sets bytes regardless of the guest's write mask; the state after power-on is unchanged.
    pub fn overwrite(&mut self, offset: usize, data: &[u8]) {
        for (byte, new) in self.bytes.iter_mut().skip(offset).zip(data) {
            *byte = *new;
        }
    }

    /// Kind and size of the BARs that there are, by index.
    pub fn bars(&self) -> impl Iterator<Item = (usize, BarKind, u64)> {
        self.bars
            .iter()
            .enumerate()
            .filter_map(|(index, bar)| bar.map(|bar| (index, bar.kind, bar.size)))
    }

    /// Lets memory BARs decode from power-on, as firmware does for devices that the guest uses
    /// without a driver.
    pub fn decode_memory(&mut self) {
        let command = self.read_u16(COMMAND) | COMMAND_MEMORY;
        self.set(COMMAND, &command.to_le_bytes());
    }

    /// Gives a BAR its address after power-on.
    pub fn place_bar(&mut self, index: usize, address: u64) {
        let Some(Some(bar)) = self.bars.get(index) else {
            return;
        };
        let (kind, register) = (bar.kind, bar_register(index));
        let bytes = address.to_le_bytes();
        let length = if kind == BarKind::Memory64 { 8 } else { 4 };
        self.write(register, bytes.get(..length).unwrap_or_default());
        self.initial = self.bytes;
    }

    /// Where each BAR decodes now; none does while memory decoding is turned off.
    pub fn windows(&self) -> [Option<Window>; BARS] {
        let decodes = self.read_u16(COMMAND) & COMMAND_MEMORY != 0;
        let mut registers = 0..BARS;
        [(); BARS].map(|()| {
            let index = registers.next().filter(|_| decodes)?;
            let bar = (*self.bars.get(index)?)?;
            let low = u64::from(self.read_u32(bar_register(index)) & !0xf);
            let high = match bar.kind {
                BarKind::Memory32 => 0,
                BarKind::Memory64 => u64::from(self.read_u32(bar_register(index.saturating_add(1)))),
            };
            Some(Window {
                address: high << 32 | low,
                size: bar.size,
            })
        })
    }

    /// Whether the function is enabled as a bus master.
    pub fn is_bus_master(&self) -> bool {
        self.read_u16(COMMAND) & COMMAND_MASTER != 0
    }

    /// To the state after power-on.
    pub fn reset(&mut self) {
        self.bytes = self.initial;
    }

    /// All bytes.
    pub fn save(&self) -> message::PciConfig {
        message::PciConfig {
            bytes: self.bytes.to_vec(),
        }
    }

    /// Restores a saved state. The bits that are read-only for the guest must be equal: they define
    /// the function.
    pub fn restore(&mut self, saved: &message::PciConfig) -> Result<(), StateError> {
        let bytes: [u8; CONFIG_SIZE] = saved
            .bytes
            .as_slice()
            .try_into()
            .map_err(|_| StateError::invalid("pci.bytes", "the length is not 256"))?;
        let differ = |((new, own), writable): ((&u8, &u8), &u8)| (new ^ own) & !writable != 0;
        if let Some(at) = bytes.iter().zip(&self.bytes).zip(&self.writable).position(differ) {
            let why = format!("the function has other read-only bits at {at:#x}");
            return Err(StateError::invalid("pci.bytes", why));
        }
        self.bytes = bytes;
        Ok(())
    }

    fn set(&mut self, offset: usize, data: &[u8]) {
        self.overwrite(offset, data);
        self.initial = self.bytes;
    }

    fn allow(&mut self, offset: usize, mask: &[u8]) {
        for (writable, new) in self.writable.iter_mut().skip(offset).zip(mask) {
            *writable |= new;
        }
    }
}

fn bar_register(index: usize) -> usize {
    index.saturating_mul(4).saturating_add(FIRST_BAR)
}
