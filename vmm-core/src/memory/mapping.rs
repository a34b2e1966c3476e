//! A part of the host's address space for a region of guest RAM.

#![allow(unsafe_code)]

use std::{fs::File, ptr::NonNull};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap},
};
use vmmd_spec::resources::HugePages;

use super::{layout::RAM_ALIGNMENT, locate};

/// Linux's `MPOL_BIND` (set_mempolicy(2)).
const MPOL_BIND: libc::c_int = 2;

/// A mapping that begins at a multiple of 2 MiB, or of its larger pages, and ends with this value.
pub(super) struct Mapping {
    address: NonNull<u8>,
    length: usize,
}

/// What is mapped.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    /// A file, and where in it; anonymous memory when `None`.
    pub file: Option<(&'a File, u64)>,
    /// Writes to the mapping of a file stay in this process.
    pub copy_on_write: bool,
    /// Of these pages; a file is made of them too.
    pub huge_pages: Option<HugePages>,
}

// SAFETY: the address is only used to unmap the range when the value is dropped.
unsafe impl Send for Mapping {}
// SAFETY: there is nothing to do with a shared reference.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        locate::remove(self.address.as_ptr() as usize);
        // SAFETY: the range was mapped by `Mapping::new`, and the region that used it is gone.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of ours");
    }
}

impl Mapping {
    /// For huge pages, the kernel reserves all needed pages at once, or the call fails with ENOMEM.
    pub(super) fn new(length: usize, source: Source<'_>) -> Result<Self, Errno> {
        let page = source.huge_pages.map_or(RAM_ALIGNMENT, HugePages::bytes);
        let alignment = usize::try_from(page).map_err(|_| Errno::NOMEM)?;
        let reserved = length.checked_add(alignment).ok_or(Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let skip = start.align_offset(alignment);
        let address = start.wrapping_byte_add(skip);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Without a reservation a huge page that is missing later is a SIGBUS.
        let fixed = MapFlags::FIXED
            | match source.huge_pages {
                None => MapFlags::NORESERVE,
                Some(_) => MapFlags::empty(),
            };
        // Flags of anonymous memory only: a file determines its page size.
        let anonymous = fixed
            | MapFlags::PRIVATE
            | match source.huge_pages {
                None => MapFlags::empty(),
                Some(HugePages::Size2M) => MapFlags::HUGETLB | MapFlags::HUGE_2MB,
                Some(HugePages::Size1G) => MapFlags::HUGETLB | MapFlags::HUGE_1GB,
            };
        let of_file = if source.copy_on_write {
            MapFlags::PRIVATE
        } else {
            MapFlags::SHARED
        };
        let mapped = match source.file {
            // SAFETY: replaces a part of the reservation above, which no other code uses.
            Some((file, offset)) => unsafe {
                mmap(address, length, protection, fixed | of_file, file, offset)
            },
            // SAFETY: as above.
            None => unsafe { mmap_anonymous(address, length, protection, anonymous) },
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
            .ok_or(Errno::NOMEM)
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Allocates all pages from this NUMA node of the host, except for existing pages (mbind(2)).
    pub(super) fn bind(&self, node: u32) -> Result<(), Errno> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let node = usize::try_from(node).map_err(|_| Errno::INVAL)?;
        let mut mask = vec![0; node / BITS + 1];
        if let Some(word) = mask.get_mut(node / BITS) {
            *word = libc::c_ulong::from(1_u8) << (node % BITS);
        }
        // The kernel ignores the last bit of the given number.
        let bits = mask.len() * BITS + 1;
        // SAFETY: reads `bits` less one bits of the mask, and sets a policy for a range that is ours.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.address.as_ptr(),
                self.length,
                MPOL_BIND,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }

    pub(super) fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the advice used here never changes the content of the memory.
        unsafe { madvise(self.address.as_ptr().cast(), self.length, advice) }
    }
}
