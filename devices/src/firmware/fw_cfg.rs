//! `fw_cfg`: named blobs for the firmware, as QEMU documents the device (`docs/specs/fw_cfg`).
//!
//! | port | width | register |
//! |---|---|---|
//! | 0x510 | 2 | selector, little-endian: which item is read next, from its start |
//! | 0x511 | 1 | data: the next byte of the item |
//! | 0x514 | 4 + 4 | guest-physical address of a DMA request, big-endian; a write to the lower half carries it out |
//!
//! Items are read-only. A read beyond the end of an item, or of an item that does not exist, gives
//! zeroes: firmware asks for items that this machine does not have. A DMA request is copied out of
//! guest memory once. Its length is limited, so that a guest does not keep a vCPU's thread busy.

use std::{collections::BTreeMap, fmt, sync::Arc};

use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

use crate::{
    bus::{BusDevice, Effect},
    state::{StateError, check, message, narrow},
};

/// First port.
pub const PORT: u64 = 0x510;
/// Number of ports.
pub const PORTS: u64 = 12;

/// Longest name of a file in bytes, without the NUL.
pub const NAME_MAX: usize = 55;
/// Most files.
pub const FILES_MAX: usize = 64;
/// Most bytes of one DMA request. Firmware reads files of at most some 100 KiB.
const TRANSFER_MAX: u32 = 4 << 20;

/// Numbers of items.
mod key {
    pub(super) const SIGNATURE: u16 = 0x0000;
    pub(super) const ID: u16 = 0x0001;
    pub(super) const CPU_COUNT: u16 = 0x0005;
    pub(super) const FILE_DIRECTORY: u16 = 0x0019;
    pub(super) const FIRST_FILE: u16 = 0x0020;
    /// The bits of the selector that name an item; the others are flags without a meaning for reads.
    pub(super) const MASK: u16 = 0x3fff;
}

/// Interfaces in the item ID: the ports, and DMA.
const FEATURES: u32 = 0b11;
/// Value of the DMA address register for reads.
const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";

/// Bits of a DMA request's control field.
mod control {
    pub(super) const ERROR: u32 = 1 << 0;
    pub(super) const READ: u32 = 1 << 1;
    pub(super) const SKIP: u32 = 1 << 2;
    pub(super) const SELECT: u32 = 1 << 3;
    pub(super) const WRITE: u32 = 1 << 4;
}

/// A file that does not fit into the directory.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "fw_cfg file \"{0}\": the name is empty, in use or longer than {NAME_MAX} bytes, or there are {FILES_MAX} files"
)]
pub struct FileError(String);

/// The items of a device.
#[derive(Clone, Default)]
pub struct Items {
    items: BTreeMap<u16, Arc<[u8]>>,
    names: Vec<String>,
}

impl fmt::Debug for Items {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items")
            .field("files", &self.names)
            .finish_non_exhaustive()
    }
}

impl Items {
    /// The items that every machine has. The machine starts with `cpus` processors.
    pub fn new(cpus: u16) -> Self {
        let mut items = Self::default();
        items.set(key::SIGNATURE, b"QEMU");
        items.set(key::ID, &FEATURES.to_le_bytes());
        items.set(key::CPU_COUNT, &cpus.to_le_bytes());
        items
    }

    /// Adds a file.
    pub fn add_file(&mut self, name: &str, content: &[u8]) -> Result<(), FileError> {
        let wrong = name.is_empty() || name.len() > NAME_MAX || name.contains('\0');
        if wrong || self.names.len() >= FILES_MAX || self.names.iter().any(|other| other == name) {
            return Err(FileError(name.to_owned()));
        }
        let number = u16::try_from(self.names.len()).map_err(|_| FileError(name.to_owned()))?;
        self.set(key::FIRST_FILE.saturating_add(number), content);
        self.names.push(name.to_owned());
        self.set(key::FILE_DIRECTORY, &self.directory());
        Ok(())
    }

    fn set(&mut self, number: u16, content: &[u8]) {
        self.items.insert(number, content.into());
    }

    /// The directory: a count, then an entry of 64 bytes per file, all numbers big-endian.
    fn directory(&self) -> Vec<u8> {
        let count = u32::try_from(self.names.len()).unwrap_or(0);
        let mut bytes = count.to_be_bytes().to_vec();
        for (number, name) in (key::FIRST_FILE..).zip(&self.names) {
            let size = self.items.get(&number).map_or(0, |content| content.len());
            bytes.extend(u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend(number.to_be_bytes());
            bytes.extend([0; 2]);
            let mut field = [0; NAME_MAX + 1];
            for (byte, letter) in field.iter_mut().zip(name.bytes()) {
                *byte = letter;
            }
            bytes.extend(field);
        }
        bytes
    }
}

/// The device. It holds no state that outlives a reset.
pub struct FwCfg {
    items: Items,
    memory: GuestMemory,
    selected: u16,
    /// Bytes of the selected item that were read.
    position: usize,
    /// Upper half of the address of the next DMA request.
    address_high: u32,
}

impl FwCfg {
    /// A device with these items; DMA requests are in `memory`.
    pub fn new(items: Items, memory: GuestMemory) -> Self {
        Self {
            items,
            memory,
            selected: key::SIGNATURE,
            position: 0,
            address_high: 0,
        }
    }

    /// To the state after power-on.
    pub fn reset(&mut self) {
        self.select(key::SIGNATURE);
        self.address_high = 0;
    }

    /// Its state.
    pub fn save(&self) -> message::FwCfg {
        message::FwCfg {
            selected: self.selected.into(),
            position: self.position as u64,
            address_high: self.address_high,
        }
    }

    /// Takes over a saved state, which is untrusted.
    pub fn restore(&mut self, saved: &message::FwCfg) -> Result<(), StateError> {
        let selected: u16 = narrow("fw_cfg.selected", saved.selected)?;
        check(
            selected & !key::MASK == 0,
            "fw_cfg.selected",
            "reserved bits are set",
        )?;
        self.position = narrow("fw_cfg.position", saved.position)?;
        self.selected = selected;
        self.address_high = saved.address_high;
        Ok(())
    }

    fn select(&mut self, selector: u16) {
        self.selected = selector & key::MASK;
        self.position = 0;
    }

    /// Copies the next bytes of the selected item, and zeroes behind its end.
    fn next(&mut self, bytes: &mut [u8]) {
        let item = self.items.items.get(&self.selected);
        let rest = item
            .and_then(|item| item.get(self.position..))
            .unwrap_or_default();
        let (copied, zeroes) = bytes.split_at_mut(rest.len().min(bytes.len()));
        for (byte, next) in copied.iter_mut().zip(rest) {
            *byte = *next;
        }
        zeroes.fill(0);
        self.position = self.position.saturating_add(bytes.len());
    }

    /// Carries out the request at `address`, and writes its result there.
    fn transfer(&mut self, address: u64) {
        const REQUEST: usize = 16;
        let mut request = [0; REQUEST];
        let place = GuestAddress(address);
        if self.memory.read_slice(&mut request, place).is_err() {
            return;
        }
        let [c0, c1, c2, c3, l0, l1, l2, l3, target @ ..] = request;
        let control = u32::from_be_bytes([c0, c1, c2, c3]);
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        let done = self.carry_out(control, length, u64::from_be_bytes(target));
        let result = if done { 0 } else { control::ERROR };
        // The request was read from there, so that it is in memory.
        let _written = self.memory.write_slice(&result.to_be_bytes(), place);
    }

    fn carry_out(&mut self, control: u32, length: u32, target: u64) -> bool {
        if control & control::SELECT != 0 {
            let [high, low, ..] = control.to_be_bytes();
            self.select(u16::from_be_bytes([high, low]));
        }
        let length_fits = length <= TRANSFER_MAX;
        if control & control::READ != 0 {
            length_fits && self.read_to(target, length)
        } else if control & control::WRITE != 0 {
            // No item can be written.
            false
        } else if control & control::SKIP != 0 {
            let bytes = usize::try_from(length).unwrap_or(usize::MAX);
            self.position = self.position.saturating_add(bytes);
            true
        } else {
            true
        }
    }

    fn read_to(&mut self, target: u64, length: u32) -> bool {
        let mut buffer = [0; 4096];
        let (mut target, mut left) = (target, usize::try_from(length).unwrap_or(0));
        while left > 0 {
            let step = left.min(buffer.len());
            let Some(bytes) = buffer.get_mut(..step) else {
                return false;
            };
            self.next(bytes);
            if self.memory.write_slice(bytes, GuestAddress(target)).is_err() {
                return false;
            }
            left = left.saturating_sub(step);
            let Some(behind) = target.checked_add(step as u64) else {
                return left == 0;
            };
            target = behind;
        }
        true
    }
}

impl BusDevice for FwCfg {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (offset, data) {
            (1, [byte]) => self.next(std::slice::from_mut(byte)),
            (4.., data) => {
                let start = usize::try_from(offset.saturating_sub(4)).unwrap_or(usize::MAX);
                let bytes = DMA_SIGNATURE.get(start..).unwrap_or_default();
                for (index, byte) in data.iter_mut().enumerate() {
                    *byte = bytes.get(index).copied().unwrap_or(0xff);
                }
            }
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        match (offset, data) {
            (0, &[low, high]) => self.select(u16::from_le_bytes([low, high])),
            (4, &[a, b, c, d]) => self.address_high = u32::from_be_bytes([a, b, c, d]),
            (8, &[a, b, c, d]) => {
                let high = std::mem::take(&mut self.address_high);
                let low = u32::from_be_bytes([a, b, c, d]);
                self.transfer(u64::from(high) << 32 | u64::from(low));
            }
            (4, &[a, b, c, d, e, f, g, h]) => {
                self.address_high = 0;
                self.transfer(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
            }
            _ => {}
        }
        Effect::None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::state::refuses;

    const REQUEST: u64 = 0x1000;
    const TARGET: u64 = 0x2000;
    const SIZE: usize = 0x10_0000;

    fn device() -> FwCfg {
        let mut items = Items::new(3);
        items.add_file("etc/first", b"one").unwrap();
        items.add_file("etc/second", &[7; 5000]).unwrap();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), SIZE)]).unwrap();
        memory.write_slice(&[0xee; 0x4000], GuestAddress(TARGET)).unwrap();
        FwCfg::new(items, memory)
    }

    fn by_ports(device: &mut FwCfg, item: u16, length: usize) -> Vec<u8> {
        assert_eq!(device.write(0, &item.to_le_bytes()), Effect::None);
        let mut bytes = vec![0xff; length];
        for byte in bytes.chunks_mut(1) {
            device.read(1, byte);
        }
        bytes
    }

    /// Control field after the request.
    fn by_dma(device: &mut FwCfg, control: u32, length: u32, target: u64) -> u32 {
        let mut request = control.to_be_bytes().to_vec();
        request.extend(length.to_be_bytes());
        request.extend(target.to_be_bytes());
        device
            .memory
            .write_slice(&request, GuestAddress(REQUEST))
            .unwrap();
        let _none = device.write(4, &[0; 4]);
        let _none = device.write(8, &u32::try_from(REQUEST).unwrap().to_be_bytes());
        let mut control = [0; 4];
        device
            .memory
            .read_slice(&mut control, GuestAddress(REQUEST))
            .unwrap();
        u32::from_be_bytes(control)
    }

    fn at_target(device: &FwCfg, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        device
            .memory
            .read_slice(&mut bytes, GuestAddress(TARGET))
            .unwrap();
        bytes
    }

    #[test]
    fn ports_read_items_from_their_start_and_then_zeroes() {
        let mut device = device();
        assert_eq!(by_ports(&mut device, 0, 6), b"QEMU\0\0");
        assert_eq!(by_ports(&mut device, 1, 4), [3, 0, 0, 0]);
        assert_eq!(by_ports(&mut device, 5, 2), [3, 0]);
        assert_eq!(by_ports(&mut device, 0x20, 4), b"one\0");
        assert_eq!(by_ports(&mut device, 0x3000, 2), [0, 0]);
    }

    #[test]
    fn directory_lists_the_files_with_size_and_number() {
        let directory = by_ports(&mut device(), 0x19, 4 + 2 * 64);
        assert_eq!(directory[..4], [0, 0, 0, 2]);
        assert_eq!(directory[4..12], [0, 0, 0, 3, 0, 0x20, 0, 0]);
        assert_eq!(&directory[12..22], b"etc/first\0");
        assert_eq!(directory[68..76], [0, 0, 0x13, 0x88, 0, 0x21, 0, 0]);
    }

    #[test]
    fn dma_selects_skips_and_reads() {
        let mut device = device();
        let mut signature = [0; 8];
        device.read(4, &mut signature);
        assert_eq!(&signature, b"QEMU CFG");
        let select = 0x20 << 16 | control::SELECT;
        assert_eq!(by_dma(&mut device, select | control::SKIP, 1, 0), 0);
        assert_eq!(by_dma(&mut device, control::READ, 4, TARGET), 0);
        assert_eq!(at_target(&device, 5), b"ne\0\0\xee");
        let select = 0x21 << 16 | control::SELECT;
        assert_eq!(by_dma(&mut device, select | control::READ, 5001, TARGET), 0);
        let read = at_target(&device, 5002);
        assert!(read[..5000].iter().all(|byte| *byte == 7) && read[5000..] == [0, 0xee]);
    }

    #[test]
    fn dma_beyond_memory_and_writes_are_errors() {
        let mut device = device();
        let select = 0x21 << 16 | control::SELECT;
        for (control, length, target) in [
            (control::READ, 4096, SIZE as u64 - 4),
            (control::READ, 1, u64::MAX),
            (control::READ, TRANSFER_MAX + 1, 0),
            (control::READ, u32::MAX, TARGET),
            (control::WRITE, 4, TARGET),
        ] {
            let result = by_dma(&mut device, select | control, length, target);
            assert_eq!(result, control::ERROR, "{control} {length} {target:#x}");
        }
        assert_eq!(at_target(&device, 4), [0xee; 4]);
        // A request outside memory has no place for its result.
        let _none = device.write(4, &[0xff; 8]);
        let _none = device.write(4, &(SIZE as u64 - 8).to_be_bytes());
    }

    #[test]
    fn other_widths_read_as_ones_and_select_nothing() {
        let mut device = device();
        let _none = device.write(0, &0x20_u16.to_le_bytes());
        let _none = device.write(0, &[1]);
        let _none = device.write(0, &[1, 0, 0, 0]);
        let mut wide = [0; 2];
        device.read(1, &mut wide);
        assert_eq!(wide, [0xff; 2]);
        let mut byte = [0];
        device.read(1, &mut byte);
        assert_eq!(&byte, b"o");
    }

    #[test]
    fn a_restored_device_goes_on_in_the_item_and_in_the_address() {
        let mut saved = device();
        assert_eq!(by_ports(&mut saved, 0x20, 1), b"o");
        let _none = saved.write(4, &[0, 0, 0, 1]);
        let mut restored = device();
        restored.restore(&saved.save()).unwrap();
        assert_eq!(restored.save(), saved.save());
        let mut byte = [0];
        restored.read(1, &mut byte);
        assert_eq!(&byte, b"n");
        let good = saved.save();
        refuses(&good, &[("fw_cfg.selected", |it| it.selected = 0x4000)], |it| {
            restored.restore(it)
        });
    }

    #[test]
    fn a_file_with_a_bad_name_is_refused() {
        let mut items = Items::new(1);
        items.add_file("a", b"").unwrap();
        for name in ["", "a", "nul\0", &"x".repeat(NAME_MAX + 1)] {
            assert!(items.add_file(name, b"").is_err(), "{name}");
        }
    }
}
