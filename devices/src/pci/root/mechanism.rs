//! The two ways to configuration spaces: ECAM, and ports 0xCF8 and 0xCFC. Within the former port is
//! the reset control register of the chipset, at 0xCF9.

use std::sync::{Arc, atomic::Ordering};

use super::{PciRoot, SATA_SLOT, SLOTS, bridge::LPC_SLOT};
use crate::bus::{BusDevice, Effect};

/// Bytes of a function's configuration space in ECAM.
const FUNCTION_SIZE: u64 = 1 << 12;
/// CONFIG_ADDRESS: the bits that are not reserved (PCI 3.0, 3.2.2.3.2).
pub(super) const ADDRESS_BITS: u32 = 0x80ff_fffc;
/// CONFIG_ADDRESS: accesses to CONFIG_DATA go to configuration space.
const ADDRESS_ENABLE: u32 = 1 << 31;

/// The function number of the SATA controller, in the device of the LPC bridge.
const SATA_FUNCTION: usize = 2;

/// The number of the slot with that bus and device number, or of the SATA controller, by the function number. `None`
/// for other functions.
fn place(slot: usize, function: usize) -> Option<usize> {
    match (slot, function) {
        (_, 0) => (slot < SLOTS).then_some(slot),
        (slot, SATA_FUNCTION) if slot == usize::from(LPC_SLOT) => Some(SATA_SLOT.into()),
        _ => None,
    }
}

/// Slot and register that an ECAM offset means; `None` where there is no function.
fn ecam_target(offset: u64, length: usize) -> Option<(usize, usize)> {
    let register = usize::try_from(offset & FUNCTION_SIZE.wrapping_sub(1)).ok()?;
    let number = usize::try_from(offset >> 12).ok()?;
    let whole = register.checked_add(length)? <= 4096;
    let slot = place(number >> 3, number & 7)?;
    whole.then_some((slot, register))
}

/// Offset of the reset control register (Intel I/O Controller Hub 9, 13.7.5) and its bit that resets the processors.
const RESET_CONTROL: u64 = 1;
const RESET_CPU: u8 = 1 << 2;

pub(super) struct Ecam(pub(super) Arc<PciRoot>);

impl BusDevice for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match ecam_target(offset, data.len()) {
            Some((slot, register)) => self.0.read_config(slot, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        match ecam_target(offset, data.len()) {
            Some((slot, register)) => self.0.write_config(slot, register, data),
            None => Effect::None,
        }
    }
}

pub(super) struct Ports(pub(super) Arc<PciRoot>);

impl Ports {
    /// Slot and register that an access to CONFIG_DATA means.
    fn target(&self, offset: u64, length: usize) -> Option<(usize, usize)> {
        let byte = usize::try_from(offset.checked_sub(4)?).ok()?;
        let address = self.0.config_address.load(Ordering::Relaxed);
        let whole = matches!(length, 1 | 2 | 4) && byte.checked_add(length)? <= 4;
        let here = address & ADDRESS_ENABLE != 0;
        // A slot is bus and device number.
        let number = usize::try_from(address >> 8 & 0xffff).ok()?;
        let slot = place(number >> 3, number & 7)?;
        let register = usize::try_from(address & 0xfc).ok()?.checked_add(byte)?;
        (whole && here).then_some((slot, register))
    }
}

impl BusDevice for Ports {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 {
            if let Ok(address) = <&mut [u8; 4]>::try_from(data) {
                *address = self.0.config_address.load(Ordering::Relaxed).to_le_bytes();
            }
        } else if let Some((slot, register)) = self.target(offset, data.len()) {
            self.0.read_config(slot, register, data);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if offset == 0 {
            if let Ok(address) = <[u8; 4]>::try_from(data) {
                // Reserved bits are zero.
                let address = u32::from_le_bytes(address) & ADDRESS_BITS;
                self.0.config_address.store(address, Ordering::Relaxed);
            }
            return Effect::None;
        }
        if let (RESET_CONTROL, [value]) = (offset, data) {
            return match value & RESET_CPU {
                0 => Effect::None,
                _ => Effect::Reset,
            };
        }
        match self.target(offset, data.len()) {
            Some((slot, register)) => self.0.write_config(slot, register, data),
            None => Effect::None,
        }
    }
}
