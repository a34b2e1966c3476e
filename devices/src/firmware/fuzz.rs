//! Fuzzers of the devices of firmware: a guest's accesses to flash memory, and to the configuration
//! device with its DMA requests.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
};

use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

use super::{
    flash::{BLOCK, Flash, FlashMemory},
    fw_cfg::{FwCfg, Items},
};
use crate::bus::{BusDevice, Effect};

/// Bytes of the flash.
const SIZE: usize = 4 * BLOCK;
/// Bytes of guest memory.
const MEMORY: usize = 0x1_0000;

struct Memory(Mutex<Vec<u8>>);

impl FlashMemory for Memory {
    fn size(&self) -> usize {
        SIZE
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let memory = self.0.lock().unwrap();
        let read = memory.get(offset..).unwrap_or_default().iter();
        for (byte, read) in bytes.iter_mut().zip(read.copied().chain(std::iter::repeat(0xff))) {
            *byte = read;
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let mut memory = self.0.lock().unwrap();
        let memory = memory.get_mut(offset..).unwrap_or_default();
        for (place, byte) in memory.iter_mut().zip(bytes) {
            *place = *byte;
        }
    }

    fn show(&self, _shown: bool) {}
}

/// A flash with an erased content, and its file.
fn new_flash() -> (Flash, Arc<Memory>, File) {
    let file = File::from(memfd_create("variables", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&[0xff; SIZE], 0).unwrap();
    let memory = Arc::new(Memory(Mutex::new(vec![0xff; SIZE])));
    let flash = Flash::new(memory.clone(), file.try_clone().unwrap());
    (flash, memory, file)
}

/// Accesses to flash memory, each of four bytes: kind and length, offset, value. It panics if the
/// file lacks a byte at the end, if the file changes its length, if a restored flash differs, or if
/// the flash panics itself.
pub fn flash(data: &[u8]) {
    let (mut flash, memory, file) = new_flash();
    for step in data.chunks_exact(4) {
        let [what, low, high, value] = [step[0], step[1], step[2], step[3]];
        let offset = u64::from(u16::from_le_bytes([low, high])) % SIZE as u64;
        let length = (1 << (what >> 2 & 3)).min(SIZE - usize::try_from(offset).unwrap());
        match what & 3 {
            0 => flash.read(offset, &mut [0; 8][..length]),
            1 => {
                let bytes = [value, low, 0xd0, 0xff, 0x10, 0, 0x40, value];
                assert_eq!(flash.write(offset, &bytes[..length]), Effect::None);
            }
            2 => assert_eq!(flash.write(offset, &[value]), Effect::None),
            _ if value == 0 => flash.reset(),
            _ => {
                let saved = flash.save();
                let (mut other, _, _) = new_flash();
                other.restore(&saved).unwrap();
                assert_eq!(other.save(), saved);
            }
        }
    }
    flash.reset();
    assert_eq!(file.metadata().unwrap().len(), SIZE as u64);
    let mut stored = vec![0; SIZE];
    file.read_exact_at(&mut stored, 0).unwrap();
    assert!(
        stored == *memory.0.lock().unwrap(),
        "the file lacks a programmed byte"
    );
}

/// Accesses to the configuration device: the first bytes are a DMA request at the address 0, then
/// come accesses of three bytes: kind and length, offset, value. It panics if a
/// restored device differs, or if the device panics itself.
pub fn fw_cfg(data: &[u8]) {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let new = || {
        let mut items = Items::new(2);
        items.add_file("etc/small", b"small").unwrap();
        items.add_file("etc/large", &[7; 9000]).unwrap();
        FwCfg::new(items, memory.clone())
    };
    let mut device = new();
    let (request, accesses) = data.split_at(data.len().min(16));
    for access in accesses.chunks_exact(3) {
        memory.write_slice(request, GuestAddress(0)).unwrap();
        let [what, offset, value] = [access[0], access[1], access[2]];
        let offset = u64::from(offset) % super::fw_cfg::PORTS;
        let length = 1 << (what >> 2 & 3);
        match what & 3 {
            0 => device.read(offset, &mut [0; 8][..length]),
            1 => {
                let bytes = [value, 0, 0, 0, 0, 0, 0, value];
                assert_eq!(device.write(offset, &bytes[..length]), Effect::None);
            }
            2 => assert_eq!(device.write(8, &[0; 4]), Effect::None),
            _ if value == 0 => device.reset(),
            _ => {
                let saved = device.save();
                let mut other = new();
                other.restore(&saved).unwrap();
                assert_eq!(other.save(), saved);
            }
        }
    }
}
