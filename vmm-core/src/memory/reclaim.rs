//! Giving pages of guest RAM back to the host, for the balloon.

#![allow(unsafe_code)]

use std::{io, sync::Arc};

use devices::virtio::balloon::Reclaim;
use rustix::{
    fs::{FallocateFlags, fallocate},
    mm::{Advice, madvise},
};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, bitmap::Bitmap};
use vmm_base::GuestMemory;

use super::{GuestRam, replaced::Replaced};

/// Drops pages of RAM that lies in ordinary pages: private ones by MADV_DONTNEED, those of a memfd by a hole in it, which
/// removes them from all mappings of it. Dropped pages of a private file mapping would have the file's content again:
/// anonymous memory replaces them. Huge pages of hugetlbfs cannot be dropped in part.
#[derive(Debug)]
pub struct RamReclaim {
    memory: GuestMemory,
    file: Option<Arc<std::fs::File>>,
    replaced: Option<Arc<Replaced>>,
}

impl RamReclaim {
    /// For the pages of `ram`.
    pub fn new(ram: &GuestRam) -> Self {
        Self {
            memory: ram.memory().clone(),
            file: ram.file().cloned(),
            replaced: ram.replaced().cloned(),
        }
    }
}

impl Reclaim for RamReclaim {
    fn reclaim(&self, address: GuestAddress, length: u64) -> io::Result<()> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let region = self.memory.find_region(address).ok_or_else(outside)?;
        let start = address.0.wrapping_sub(region.start_addr().0);
        let (offset, size) = (
            usize::try_from(start).map_err(|_| outside())?,
            usize::try_from(length).map_err(|_| outside())?,
        );
        if start.checked_add(length).is_none_or(|end| end > region.len()) {
            return Err(outside());
        }
        let dropped = if let (Some(file), Some(place)) = (&self.file, region.file_offset()) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, place.start().saturating_add(start), length)
        } else {
            let pointer = region
                .get_host_address(MemoryRegionAddress(start))
                .map_err(io::Error::other)?;
            match &self.replaced {
                // SAFETY: the range was checked to lie in a private mapping of ours, which `memory` keeps alive and unmaps as a
                // whole. There are no references into guest memory.
                Some(replaced) => unsafe { replaced.part(pointer, size) },
                // SAFETY: the range was checked to lie in a private anonymous mapping of ours, which `memory` keeps alive;
                // reading it gives zeroes from then on. There are no references into guest memory.
                None => unsafe { madvise(pointer.cast(), size, Advice::LinuxDontNeed) },
            }
        };
        // After the change: a capture that takes the mark then reads the pages after the change.
        region.bitmap().mark_dirty(offset, size);
        Ok(dropped?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vm_memory::Bytes;

    use super::{
        super::{Backing, layout::*},
        *,
    };

    /// Pages of the first 64 KiB of a region that are in memory.
    fn resident(ram: &GuestRam, region: usize) -> usize {
        let address = ram.memory().iter().nth(region).unwrap().as_ptr();
        let mut pages = [0_u8; 16];
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(address.cast(), 16 * 4096, pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn returned_pages_read_as_zeroes_and_neighbours_stay() {
        for backing in [Backing::Private, Backing::Shared] {
            let ram = GuestRam::new(3 * GIB + RAM_ALIGNMENT, backing).unwrap();
            let reclaim = RamReclaim::new(&ram);
            for (region, start) in [(0, 0), (1, 4 * GIB)] {
                let memory = ram.memory();
                let start = GuestAddress(start);
                memory.write_slice(&[7; 16 * 4096], start).unwrap();
                assert_eq!(resident(&ram, region), 16);
                memory.iter().nth(region).unwrap().get_mmap().bitmap().start();
                reclaim.reclaim(GuestAddress(start.0 + 4096), 3 * 4096).unwrap();
                assert!(memory.iter().nth(region).unwrap().bitmap().dirty_at(2 * 4096));
                assert_eq!(resident(&ram, region), 13, "{backing:?}");
                let mut bytes = [1; 5 * 4096];
                memory.read_slice(&mut bytes, start).unwrap();
                let expected = [[7; 4096], [0; 4096], [0; 4096], [0; 4096], [7; 4096]];
                assert!(bytes == *expected.as_flattened(), "{backing:?}");
            }
        }
    }

    /// RAM of RAM_MIN bytes that is a private mapping of a file of 0xaa.
    fn of_file() -> GuestRam {
        let file = tempfile::tempfile().unwrap();
        let bytes = vec![0xaa; 2 << 20];
        for offset in (0..RAM_MIN).step_by(bytes.len()) {
            file.write_all_at(&bytes, offset).unwrap();
        }
        GuestRam::of_file(&file, Map::Direct, &[(0..RAM_MIN, 0)], false).unwrap()
    }

    fn byte(ram: &GuestRam, address: u64) -> u8 {
        ram.memory().read_obj(GuestAddress(address)).unwrap()
    }

    #[test]
    fn reclaimed_pages_of_a_mapped_file_read_as_zeroes() {
        const MAPPED: u64 = 8 << 20;
        let ram = of_file();
        let reclaim = RamReclaim::new(&ram);
        ram.memory().iter().next().unwrap().get_mmap().bitmap().start();
        // Read, written and untouched pages; then one that anonymous memory has replaced already.
        assert_eq!(byte(&ram, 4096), 0xaa);
        ram.memory().write_obj(7_u8, GuestAddress(2 * 4096)).unwrap();
        reclaim.reclaim(GuestAddress(4096), 3 * 4096).unwrap();
        reclaim.reclaim(GuestAddress(MAPPED), 2 << 20).unwrap();
        ram.memory().write_obj(7_u8, GuestAddress(MAPPED)).unwrap();
        reclaim.reclaim(GuestAddress(MAPPED), 4096).unwrap();
        let marked = |page| ram.memory().iter().next().unwrap().bitmap().dirty_at(page << 12);
        for page in [1, 2, 3, MAPPED >> 12, (MAPPED >> 12) + 511] {
            assert_eq!(byte(&ram, page << 12), 0, "{page}");
            assert!(marked(usize::try_from(page).unwrap()), "{page}");
        }
        for page in [0, 4, (MAPPED >> 12) - 1, (MAPPED >> 12) + 512] {
            assert_eq!(byte(&ram, page << 12), 0xaa, "{page}");
        }
        ram.clear().unwrap();
        assert_eq!((byte(&ram, 0), byte(&ram, 4 * 4096)), (0, 0));
    }

    #[test]
    fn ranges_that_leave_a_region_are_refused() {
        let ram = GuestRam::new(RAM_MIN, Backing::Private).unwrap();
        let reclaim = RamReclaim::new(&ram);
        for (address, length) in [
            (RAM_MIN, 4096),
            (RAM_MIN - 4096, 8192),
            (0, u64::MAX - 4095),
            (u64::MAX - 4095, 4096),
        ] {
            let result = reclaim.reclaim(GuestAddress(address), length);
            assert!(result.is_err(), "{address:x} {length:x}");
        }
    }
}
