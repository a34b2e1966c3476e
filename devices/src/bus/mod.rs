//! Address spaces: port I/O and memory-mapped I/O.
//!
//! A [`Bus`] owns the map from addresses to devices. An access looks the device up, drops the
//! lookup lock, and then locks only the device. The access *returns* its demands on the machine as
//! an [`Effect`], and the caller carries the effect out without any lock. The bus alone answers
//! accesses that hit no device or exceed a device's range: reads return all ones, writes are
//! dropped, and both are counted.

use std::sync::{
    Arc, Mutex, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering},
};

/// Registers of a device behind an address range. The device receives only offsets into its range.
///
/// `data` is 1 to 8 bytes long and lies wholly within the range. The guest chooses the width, which
/// the device may not support: then reads return all ones and writes have no effect.
pub trait BusDevice: Send {
    /// Fills `data` with the result of a read at `offset`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Handles a write at `offset`; returns the effect for the machine to carry out.
    fn write(&mut self, offset: u64, data: &[u8]) -> Effect;
}

/// Demand of a register write on the machine. The caller carries it out after dropping the device's
/// lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "an effect does nothing unless it is carried out"]
pub enum Effect {
    /// Nothing.
    #[default]
    None,
    /// The PCI functions' BARs moved, or their decoding was turned on or off: map them again.
    Remap,
    /// Slots' PCI functions were ejected: take them off the bus ([`HotPlug::eject`](crate::pci::HotPlug::eject)).
    Eject,
    /// Reset the machine.
    Reset,
    /// Power the machine off.
    PowerOff,
    /// The guest's kernel says that it panicked.
    GuestPanicked,
}

/// A device as buses share it.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// An insertion that is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The range is empty or wraps around the address space.
    #[error("range of {length:#x} bytes at {base:#x} is empty or wraps around")]
    Range {
        /// First address.
        base: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The range overlaps an existing one.
    #[error("range of {length:#x} bytes at {base:#x} overlaps another device's")]
    Overlap {
        /// First address.
        base: u64,
        /// Length in bytes.
        length: u64,
    },
}

struct Entry {
    base: u64,
    /// Last address, inclusive.
    last: u64,
    device: SharedDevice,
}

/// One address space.
#[derive(Default)]
pub struct Bus {
    /// Sorted by `base`, without overlaps.
    entries: RwLock<Vec<Entry>>,
    unclaimed: AtomicU64,
}

impl Bus {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `device` at `base`, for `length` bytes.
    pub fn insert(&self, base: u64, length: u64, device: SharedDevice) -> Result<(), BusError> {
        let last = length
            .checked_sub(1)
            .and_then(|offset| base.checked_add(offset))
            .ok_or(BusError::Range { base, length })?;
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let at = entries.partition_point(|entry| entry.last < base);
        if entries.get(at).is_some_and(|next| next.base <= last) {
            return Err(BusError::Overlap { base, length });
        }
        entries.insert(at, Entry { base, last, device });
        Ok(())
    }

    /// Takes the range that begins at `base` away; says whether there was one.
    pub fn remove(&self, base: u64) -> bool {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        match entries.binary_search_by_key(&base, |entry| entry.base) {
            Ok(at) => {
                entries.remove(at);
                true
            }
            Err(_) => false,
        }
    }

    /// A guest's read of `data.len()` bytes at `address`.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => {
                device
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .read(offset, data);
            }
            None => data.fill(0xff),
        }
    }

    /// A guest's write at `address`.
    pub fn write(&self, address: u64, data: &[u8]) -> Effect {
        match self.find(address, data.len()) {
            Some((device, offset)) => device
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .write(offset, data),
            None => Effect::None,
        }
    }

    /// How many accesses no device claimed.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed.load(Ordering::Relaxed)
    }

    fn find(&self, address: u64, length: usize) -> Option<(SharedDevice, u64)> {
        let found = self.lookup(address, length);
        if found.is_none() {
            self.unclaimed.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    fn lookup(&self, address: u64, length: usize) -> Option<(SharedDevice, u64)> {
        let last = address.checked_add(u64::try_from(length).ok()?.checked_sub(1)?)?;
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let at = entries.partition_point(|entry| entry.last < address);
        let entry = entries.get(at)?;
        let offset = address.checked_sub(entry.base)?;
        (last <= entry.last).then(|| (Arc::clone(&entry.device), offset))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    struct Echo(Vec<(u64, Vec<u8>)>);

    impl BusDevice for Echo {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }
        fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
            self.0.push((offset, data.to_vec()));
            Effect::Reset
        }
    }

    fn echo() -> Arc<Mutex<Echo>> {
        Arc::new(Mutex::new(Echo(Vec::new())))
    }

    #[test]
    fn an_access_reaches_the_device_whose_range_holds_it_with_the_offset() {
        let (bus, device) = (Bus::new(), echo());
        bus.insert(0x100, 0x10, device.clone()).unwrap();
        let mut data = [0; 4];
        bus.read(0x10c, &mut data);
        assert_eq!(data, [0xc; 4]);
        assert_eq!(bus.write(0x100, &[1, 2]), Effect::Reset);
        assert_eq!(device.lock().unwrap().0, [(0, vec![1, 2])]);
    }

    #[test]
    fn what_no_device_claims_reads_as_ones_and_is_counted() {
        let bus = Bus::new();
        bus.insert(0x100, 0x10, echo()).unwrap();
        for address in [0, 0xff, 0x110, 0x10e, u64::MAX] {
            let mut data = [0; 4];
            bus.read(address, &mut data);
            assert_eq!(data, [0xff; 4], "{address:#x}");
        }
        assert_eq!(bus.write(0xfe, &[0; 4]), Effect::None);
        assert_eq!(bus.unclaimed(), 6);
    }

    #[test]
    fn overlapping_empty_and_wrapping_ranges_are_refused() {
        let bus = Bus::new();
        bus.insert(0x100, 0x10, echo()).unwrap();
        for base in [0xf8, 0x100, 0x10f] {
            assert!(
                matches!(bus.insert(base, 0x10, echo()), Err(BusError::Overlap { .. })),
                "{base:#x}"
            );
        }
        assert!(matches!(bus.insert(0, 0, echo()), Err(BusError::Range { .. })));
        assert!(matches!(
            bus.insert(u64::MAX, 2, echo()),
            Err(BusError::Range { .. })
        ));
        assert!(bus.insert(0x110, 0x10, echo()).is_ok());
        assert!(bus.insert(0xf0, 0x10, echo()).is_ok());
        assert!(bus.remove(0x100) && !bus.remove(0x100));
        assert!(bus.insert(0x100, 0x10, echo()).is_ok());
    }
}
