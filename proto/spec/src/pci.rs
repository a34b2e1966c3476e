//! Slots of PCI devices of platform v1.
//!
//! A slot is a bus and a device number in one: `bus << 5 | device`, so that numbers from the time
//! when only bus 0 existed keep their meaning. Bus 0 has a range for each kind of device. Buses 1
//! and 2 are for the disks and NICs that find no number on bus 0: disks take them from the bottom,
//! NICs from the top. So a new disk moves no NIC, even where addresses follow only from the order
//! in a manifest.

use std::ops::Range;

/// Device numbers of a bus.
const DEVICES: u8 = 32;
/// The first number beyond those of the last bus, 2.
const END: u8 = 3 * DEVICES;

/// A place for a device: 1 to 95, except the multiples of 32. Device 0 of bus 0 is the host bridge;
/// device 0 of other buses does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciSlot(u8);

impl PciSlot {
    /// The last one.
    pub const LAST: Self = Self(END - 1);

    /// Bus and device number: `bus << 5 | device`.
    pub fn number(self) -> u8 {
        self.0
    }
}

impl TryFrom<u32> for PciSlot {
    type Error = u32;

    fn try_from(number: u32) -> Result<Self, u32> {
        u8::try_from(number)
            .ok()
            .filter(|slot| *slot < END && !slot.is_multiple_of(DEVICES))
            .map(Self)
            .ok_or(number)
    }
}

/// Whether a slot is on another bus than 0.
pub fn is_further(slot: u32) -> bool {
    slot >= u32::from(DEVICES)
}

/// The slots of buses 1 and 2, upwards.
pub fn further() -> impl DoubleEndedIterator<Item = u32> {
    (u32::from(DEVICES)..u32::from(END)).filter(|slot| !slot.is_multiple_of(u32::from(DEVICES)))
}

/// Number of ports of the SATA controller.
const MAX_SATA: u8 = 6;
/// Ports of the SATA controller, which has a fixed place. Where an address of a disk is a number, these
/// follow the slots.
pub const SATA_PORTS: Range<u32> = END as u32..(END + MAX_SATA) as u32;

/// The port of the SATA controller with that number among addresses of disks.
pub fn sata_port(number: u32) -> Option<u32> {
    SATA_PORTS.contains(&number).then(|| number - SATA_PORTS.start)
}

/// Whether a number is the address of a disk: a slot, or a port of the SATA controller.
pub fn is_disk_address(number: u32) -> bool {
    PciSlot::try_from(number).is_ok() || sata_port(number).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_any_device_of_three_buses_but_the_first() {
        let valid: Vec<u32> = (0..300).filter(|slot| PciSlot::try_from(*slot).is_ok()).collect();
        let expected: Vec<u32> = (1..32).chain(33..64).chain(65..96).collect();
        assert_eq!(valid, expected);
        assert_eq!(PciSlot::try_from(u32::MAX), Err(u32::MAX));
        let further: Vec<u32> = further().collect();
        assert_eq!(further, expected[31..]);
        assert!(further.iter().all(|slot| is_further(*slot)) && !is_further(31));
    }
}
