//! Part of guest memory that is looked up once and then accessed repeatedly.
//!
//! The guest can change its content at any time, as in all guest memory. Therefore each access is
//! volatile or atomic.

use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};

use vm_memory::{
    ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress, VolatileMemory, bitmap::Bitmap,
};
use vmm_base::{GuestMemory, dirty::DirtyBitmap, ram::prefetch};

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Window {
    memory: GuestMemory,
    address: GuestAddress,
    /// The region that all of it lies in, and where in it. Regions may follow each other, and a ring lie in two.
    region: Option<(Arc<GuestRegionMmap<DirtyBitmap>>, MemoryRegionAddress)>,
}

impl Window {
    /// `None` unless all of it is guest memory.
    pub(super) fn new(memory: &GuestMemory, address: u64, length: u64) -> Option<Self> {
        let start = GuestAddress(address);
        if !GuestMemoryBackend::check_range(memory, start, usize::try_from(length).ok()?) {
            return None;
        }
        let end = address.checked_add(length)?;
        let region = memory.find_region(start).and_then(|found| {
            let (base, size) = (found.start_addr(), found.len());
            let offset = address.checked_sub(base.0)?;
            let fits = end.checked_sub(base.0)? <= size;
            // The collection hands out its shares of regions this way only.
            let share = || Some(memory.remove_region(base, size).ok()?.1);
            let region = fits.then(share).flatten()?;
            Some((region, MemoryRegionAddress(offset)))
        });
        Some(Self {
            memory: memory.clone(),
            address: start,
            region,
        })
    }

    /// The number at `offset`, in one access.
    #[inline]
    pub(super) fn load(&self, offset: u64, order: Ordering) -> Option<u16> {
        match self.place(offset) {
            Ok((region, place)) => {
                let slice = region.get_slice(place, size_of::<u16>()).ok()?;
                let number: &AtomicU16 = slice.get_atomic_ref(0).ok()?;
                Some(number.load(order))
            }
            Err(address) => self.memory.load(address, order).ok(),
        }
    }

    /// Writes the number at `offset`, in one access.
    #[inline]
    pub(super) fn store(&self, offset: u64, value: u16, order: Ordering) -> Option<()> {
        match self.place(offset) {
            Ok((region, place)) => {
                let slice = region.get_slice(place, size_of::<u16>()).ok()?;
                let number: &AtomicU16 = slice.get_atomic_ref(0).ok()?;
                number.store(value, order);
                slice.bitmap().mark_dirty(0, size_of::<u16>());
                Some(())
            }
            Err(address) => self.memory.store(value, address, order).ok(),
        }
    }

    /// Returns a copy of the value at `offset`.
    pub(super) fn read<T: ByteValued>(&self, offset: u64) -> Option<T> {
        match self.place(offset) {
            Ok((region, place)) => Some(
                region
                    .get_slice(place, size_of::<T>())
                    .ok()?
                    .get_ref(0)
                    .ok()?
                    .load(),
            ),
            Err(address) => self.memory.read_obj(address).ok(),
        }
    }

    /// Writes `value` to `offset`.
    pub(super) fn write<T: ByteValued>(&self, offset: u64, value: T) -> Option<()> {
        match self.place(offset) {
            Ok((region, place)) => {
                let slice = region.get_slice(place, size_of::<T>()).ok()?;
                slice.get_ref(0).ok()?.store(value);
                Some(())
            }
            Err(address) => self.memory.write_obj(value, address).ok(),
        }
    }

    /// Prefetches the cache line at `offset` for reading.
    #[inline]
    pub(super) fn fetch(&self, offset: u64) {
        if let Ok((region, place)) = self.place(offset)
            && let Ok(slice) = region.get_slice(place, 1)
        {
            prefetch::to_read(&slice);
        }
    }

    fn place(
        &self,
        offset: u64,
    ) -> Result<(&GuestRegionMmap<DirtyBitmap>, MemoryRegionAddress), GuestAddress> {
        match &self.region {
            Some((region, start)) => Ok((region, MemoryRegionAddress(start.0.wrapping_add(offset)))),
            None => Err(GuestAddress(self.address.0.wrapping_add(offset))),
        }
    }
}
