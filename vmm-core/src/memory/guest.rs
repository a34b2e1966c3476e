//! What backs guest RAM on the host.
//!
//! Each region's host address is a multiple of 2 MiB, as its guest address is, so that both sides can map huge pages.
//! Nothing is touched here: pages come with the guest's first access, private memory by transparent huge pages.

#![allow(unsafe_code)]

use std::{fs::File, io, ops::Range, ptr::NonNull, sync::Arc};

use devices::{GuestMemory, dirty::DirtyBitmap};
use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create},
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap},
};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, bitmap::Bitmap,
    mmap::MmapRegionBuilder,
};

use super::layout::{RAM_ALIGNMENT, RAM_MAX, RAM_MIN, ram_ranges};

/// How RAM is backed on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous memory with transparent huge pages.
    Private,
    /// A memfd that other processes can map.
    Shared {
        /// Of the host's reserved huge pages (2 MiB).
        huge_pages: bool,
    },
}

/// RAM that can't be had.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Outside the platform's range, or not a multiple of 2 MiB.
    #[error(
        "a machine can't have {0} bytes of memory: it takes {RAM_MIN} to {RAM_MAX}, a multiple of {RAM_ALIGNMENT}"
    )]
    Size(u64),
    /// The host refused.
    #[error("{operation} of {bytes} bytes of guest memory")]
    Host {
        /// What was tried.
        operation: &'static str,
        /// For how much.
        bytes: u64,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The regions don't form an address space (a defect).
    #[error("guest memory regions")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
}

/// The RAM of a machine.
#[derive(Clone, Debug)]
pub struct GuestRam {
    memory: GuestMemory,
    file: Option<Arc<File>>,
    size: u64,
}

impl GuestRam {
    /// `size` bytes of RAM, laid out around the MMIO hole; all zeroes, none of it touched.
    pub fn new(size: u64, backing: Backing) -> Result<Self, RamError> {
        if !(RAM_MIN..=RAM_MAX).contains(&size) || !size.is_multiple_of(RAM_ALIGNMENT) {
            return Err(RamError::Size(size));
        }
        let file = match backing {
            Backing::Private => None,
            Backing::Shared { huge_pages } => Some(Arc::new(memfd(size, huge_pages)?)),
        };
        let (low, high) = ram_ranges(size);
        let mut regions = Vec::with_capacity(2);
        let mut offset = 0;
        for range in [low, high].into_iter().filter(|range| !range.is_empty()) {
            regions.push(region(&range, file.as_ref(), offset)?);
            offset = range.end.saturating_sub(range.start).saturating_add(offset);
        }
        Ok(Self {
            memory: GuestMemory::from_regions(regions)?,
            file,
            size,
        })
    }

    /// For devices: cheap to clone, and keeps the mapping alive.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Back to zeroes, none of it touched: for a machine that starts anew. With all vCPUs and devices stopped.
    pub fn clear(&self) -> Result<(), RamError> {
        let host = |operation, source| RamError::Host {
            operation,
            bytes: self.size,
            source,
        };
        for region in self.memory.iter() {
            let length = region.size();
            region.bitmap().mark_dirty(0, length);
            match &self.file {
                Some(_) => continue,
                // SAFETY: the range is a private anonymous mapping of ours, alive while the region is; reading it
                // gives zeroes from then on. Nobody holds references into guest memory.
                None => unsafe { madvise(region.as_ptr().cast(), length, Advice::LinuxDontNeed) }
                    .map_err(|errno| host("dropping", errno.into()))?,
            }
        }
        if let Some(file) = &self.file {
            fallocate(
                file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                0,
                self.size,
            )
            .map_err(|errno| host("dropping", errno.into()))?;
        }
        Ok(())
    }

    /// In bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memfd, when RAM is shared. Regions follow one another in it without gaps.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }
}

/// A mapping that begins at a multiple of 2 MiB and ends with this value.
struct Mapping {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: the address is only used for unmapping, by whoever drops the value.
unsafe impl Send for Mapping {}
// SAFETY: there is nothing to do with a shared reference.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Mapping::new`, and the region that used it is gone.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of ours");
    }
}

impl Mapping {
    fn new(length: usize, file: Option<(&File, u64)>) -> Result<Self, rustix::io::Errno> {
        const ALIGNMENT: usize = 2 << 20;
        let reserved = length.checked_add(ALIGNMENT).ok_or(rustix::io::Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let skip = start.align_offset(ALIGNMENT);
        let address = start.wrapping_byte_add(skip);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let fixed = MapFlags::FIXED | MapFlags::NORESERVE;
        let mapped = match file {
            // SAFETY: replaces a part of the reservation above, which nobody else knows.
            Some((file, offset)) => unsafe {
                mmap(
                    address,
                    length,
                    protection,
                    fixed | MapFlags::SHARED,
                    file,
                    offset,
                )
            },
            // SAFETY: as above.
            None => unsafe { mmap_anonymous(address, length, protection, fixed | MapFlags::PRIVATE) },
        };
        if let Err(errno) = mapped {
            // SAFETY: the reservation is ours and unused.
            let _ = unsafe { munmap(start, reserved) };
            return Err(errno);
        }
        let tail = reserved.saturating_sub(skip).saturating_sub(length);
        for (address, length) in [(start, skip), (address.wrapping_byte_add(length), tail)] {
            if length > 0 {
                // SAFETY: the margins of the reservation, which hold nothing.
                let _ = unsafe { munmap(address, length) };
            }
        }
        NonNull::new(address.cast())
            .map(|address| Self { address, length })
            .ok_or(rustix::io::Errno::NOMEM)
    }

    fn advise(&self, advice: Advice) -> Result<(), rustix::io::Errno> {
        // SAFETY: none of the advice used here changes what the memory holds.
        unsafe { madvise(self.address.as_ptr().cast(), self.length, advice) }
    }
}

fn region(
    range: &Range<u64>,
    file: Option<&Arc<File>>,
    offset: u64,
) -> Result<GuestRegionMmap<DirtyBitmap>, RamError> {
    let bytes = range.end.saturating_sub(range.start);
    let host = |operation, source| RamError::Host {
        operation,
        bytes,
        source,
    };
    let length = usize::try_from(bytes).map_err(|_| RamError::Size(bytes))?;
    let mapping = Mapping::new(length, file.map(|file| (file.as_ref(), offset)))
        .map_err(|errno| host("mapping", errno.into()))?;
    // A core dump of the VMM holds nothing of its guest.
    mapping
        .advise(Advice::LinuxDontDump)
        .map_err(|errno| host("exclusion from core dumps", errno.into()))?;
    // A kernel without transparent huge pages refuses this; small pages do.
    let _ = mapping.advise(Advice::LinuxHugepage);

    let address = mapping.address.as_ptr();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mut builder =
        MmapRegionBuilder::new_with_bitmap(length, DirtyBitmap::with_owner(length, Box::new(mapping)))
            .with_mmap_prot(protection);
    builder = match file {
        Some(file) => builder
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::from_arc(Arc::clone(file), offset)),
        None => builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
    };
    // SAFETY: `address` begins a mapping of `length` bytes. Its owner is in the region's bitmap: it is unmapped when
    // the region is dropped, not earlier.
    let builder = unsafe { builder.with_raw_mmap_pointer(address) };
    let region = builder
        .build()
        .map_err(|source| host("description", io::Error::other(source)))?;
    GuestRegionMmap::new(region, GuestAddress(range.start)).ok_or(RamError::Size(bytes))
}

fn memfd(size: u64, huge_pages: bool) -> Result<File, RamError> {
    let host = |operation| {
        move |errno: rustix::io::Errno| RamError::Host {
            operation,
            bytes: size,
            source: errno.into(),
        }
    };
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if huge_pages {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let file = memfd_create("guest-ram", flags).map_err(host("memfd_create"))?;
    ftruncate(&file, size).map_err(host("sizing the memfd"))?;
    // Whoever maps it can't be killed by SIGBUS through another process's ftruncate.
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(host("sealing the memfd"))?;
    if huge_pages {
        // Fails now, not by SIGBUS later, when the host has not enough huge pages.
        fallocate(&file, FallocateFlags::empty(), 0, size).map_err(host("taking huge pages"))?;
    }
    Ok(File::from(file))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use vm_memory::Bytes;

    use super::{super::layout::*, *};

    fn host_addresses(ram: &GuestRam) -> Vec<usize> {
        ram.memory()
            .iter()
            .map(|region| region.as_ptr() as usize)
            .collect()
    }

    #[test]
    fn ram_lies_on_both_sides_of_the_hole_at_huge_page_boundaries() {
        for backing in [Backing::Private, Backing::Shared { huge_pages: false }] {
            let ram = GuestRam::new(5 * GIB, backing).unwrap();
            let regions: Vec<_> = ram
                .memory()
                .iter()
                .map(|region| (region.start_addr().0, region.len()))
                .collect();
            assert_eq!(regions, [(0, 3 * GIB), (4 * GIB, 2 * GIB)]);
            for address in host_addresses(&ram) {
                assert_eq!(address % (2 << 20), 0);
            }
            ram.memory().write_obj(7_u32, GuestAddress(5 * GIB)).unwrap();
            assert_eq!(ram.memory().read_obj::<u32>(GuestAddress(5 * GIB)).unwrap(), 7);
            assert!(ram.memory().write_obj(7_u32, GuestAddress(3 * GIB)).is_err());
        }
    }

    #[test]
    fn a_shared_ram_is_in_its_file_and_the_high_part_follows_the_low_one() {
        use std::os::unix::fs::FileExt;
        let ram = GuestRam::new(3 * GIB + 2 * MIB, Backing::Shared { huge_pages: false }).unwrap();
        ram.memory()
            .write_obj(0x1122_3344_u32, GuestAddress(4 * GIB + 8))
            .unwrap();
        let mut bytes = [0; 4];
        let file = ram.file().unwrap();
        file.read_exact_at(&mut bytes, 3 * GIB + 8).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x1122_3344);
        assert!(file.set_len(0).is_err(), "sealed");
    }

    #[test]
    fn the_mapping_outlives_the_ram_while_a_device_holds_the_memory() {
        let ram = GuestRam::new(RAM_MIN, Backing::Private).unwrap();
        let memory = ram.memory().clone();
        drop(ram);
        memory.write_obj(1_u8, GuestAddress(0)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0)).unwrap(), 1);
    }

    #[test]
    fn a_cleared_ram_is_all_zeroes_and_marked_as_changed() {
        for backing in [Backing::Private, Backing::Shared { huge_pages: false }] {
            let ram = GuestRam::new(RAM_MIN, backing).unwrap();
            ram.memory().write_obj(7_u64, GuestAddress(0x5000)).unwrap();
            ram.memory().iter().next().unwrap().get_mmap().bitmap().start();
            ram.clear().unwrap();
            assert_eq!(ram.memory().read_obj::<u64>(GuestAddress(0x5000)).unwrap(), 0);
            assert!(ram.memory().iter().next().unwrap().bitmap().dirty_at(0x5000));
        }
    }

    #[test]
    fn sizes_outside_the_platform_are_refused() {
        for size in [
            0,
            RAM_MIN - RAM_ALIGNMENT,
            RAM_MIN + 4096,
            RAM_MAX + RAM_ALIGNMENT,
            u64::MAX,
        ] {
            assert!(matches!(GuestRam::new(size, Backing::Private), Err(RamError::Size(s)) if s == size));
        }
    }
}
