//! Which parts of a private file mapping anonymous memory has replaced.
//!
//! `MADV_DONTNEED` on such a mapping gives the file's content back. So a part that has to become zeroes is replaced by an anonymous
//! mapping at the same address: KVM's slots and all pointers stay valid. Each separate part costs two mappings of the process, and
//! a process has 65,530 (`vm.max_map_count`): when there are [`MAX_PARTS`], zeroes are written instead, and the host does not
//! get these pages back.

#![allow(unsafe_code)]

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous},
};

/// Most parts that do not touch each other: half of the mappings that a process may have by default. Free page reporting names 2 MiB at
/// least, so reports do not reach this below 32 GiB of RAM.
const MAX_PARTS: usize = 16384;

/// See the module.
#[derive(Debug)]
pub(super) struct Replaced {
    /// Host addresses: where each part begins, and where it ends. No two parts touch.
    parts: Mutex<BTreeMap<usize, usize>>,
    most: usize,
}

impl Default for Replaced {
    fn default() -> Self {
        Self {
            parts: Mutex::default(),
            most: MAX_PARTS,
        }
    }
}

impl Replaced {
    /// Makes `length` bytes zeroes and gives their pages back to the host, where the number of mappings allows that.
    ///
    /// # Safety
    /// The range consists of whole pages of a private mapping of this process. Its owner unmaps it by address and length, and
    /// there are no references into it.
    pub unsafe fn part(&self, address: *mut u8, length: usize) -> Result<(), Errno> {
        let (start, end) = (address as usize, (address as usize).saturating_add(length));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = parts
            .range(..=start)
            .next_back()
            .map(|(start, end)| (*start, *end));
        if before.is_some_and(|(_, last)| end <= last) {
            // SAFETY: by the caller's promise; the memory is anonymous.
            return unsafe { madvise(address.cast(), length, Advice::LinuxDontNeed) };
        }
        let touches =
            before.is_some_and(|(_, last)| start <= last) || parts.range(start..=end).next().is_some();
        if !touches && parts.len() >= self.most {
            // SAFETY: by the caller's promise.
            unsafe { address.write_bytes(0, length) };
            return Ok(());
        }
        // SAFETY: by the caller's promise.
        unsafe { replace_with_zeroes(address, length) }?;
        insert(&mut parts, start, end);
        Ok(())
    }

    /// Makes a whole mapping of `length` bytes zeroes.
    ///
    /// # Safety
    /// As for [`part`](Self::part).
    pub unsafe fn all(&self, address: *mut u8, length: usize) -> Result<(), Errno> {
        let (start, end) = (address as usize, (address as usize).saturating_add(length));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: by the caller's promise.
        unsafe { replace_with_zeroes(address, length) }?;
        insert(&mut parts, start, end);
        Ok(())
    }
}

/// Adds a part, joined with the parts beside it.
fn insert(parts: &mut BTreeMap<usize, usize>, mut start: usize, mut end: usize) {
    if let Some((first, last)) = parts
        .range(..=start)
        .next_back()
        .map(|(first, last)| (*first, *last))
        && start <= last
    {
        (start, end) = (first, end.max(last));
    }
    while let Some((first, last)) = parts
        .range(start..=end)
        .next()
        .map(|(first, last)| (*first, *last))
    {
        parts.remove(&first);
        end = end.max(last);
    }
    parts.insert(start, end);
}

/// Replaces a private mapping by untouched anonymous memory at the same address.
///
/// # Safety
/// As for [`Replaced::part`].
unsafe fn replace_with_zeroes(address: *mut u8, length: usize) -> Result<(), Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::FIXED | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: by the caller's promise.
    unsafe { mmap_anonymous(address.cast(), length, protection, flags) }?;
    for advice in [Advice::LinuxDontDump, Advice::LinuxHugepage] {
        // SAFETY: none of the advice changes the content of the memory. A kernel that refuses it uses small pages, or has guest
        // memory in core dumps.
        let _ = unsafe { madvise(address.cast(), length, advice) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use proptest::prelude::*;
    use rustix::mm::{mmap, munmap};

    use super::*;

    const PAGE: usize = 4096;
    const PAGES: usize = 64;

    /// A private mapping of a file of 0xaa.
    struct Mapped(*mut u8);

    impl Mapped {
        fn new() -> Self {
            let file: File = tempfile::tempfile().unwrap();
            file.write_all_at(&[0xaa; PAGE * PAGES], 0).unwrap();
            let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let address = unsafe { mmap(std::ptr::null_mut(), PAGE * PAGES, protection, flags, &file, 0) };
            Self(address.unwrap().cast())
        }

        fn page(&self, page: usize) -> *mut u8 {
            self.0.wrapping_add(page * PAGE)
        }

        /// The first byte of each page.
        fn bytes(&self) -> Vec<u8> {
            // SAFETY: the pages are mapped, and only this thread accesses them.
            (0..PAGES)
                .map(|page| unsafe { self.page(page).read_volatile() })
                .collect()
        }

        /// Mappings of the process in its range.
        fn mappings(&self) -> usize {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let start = |line: &str| usize::from_str_radix(line.split('-').next()?, 16).ok();
            let own = self.0 as usize..self.page(PAGES) as usize;
            maps.lines()
                .filter_map(start)
                .filter(|start| own.contains(start))
                .count()
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: the mapping of `new`, which nothing uses any more.
            unsafe { munmap(self.0.cast(), PAGE * PAGES) }.unwrap();
        }
    }

    #[test]
    fn scattered_pages_become_zeroes_with_bounded_mappings() {
        let mapped = Mapped::new();
        let replaced = Replaced {
            most: 4,
            ..Replaced::default()
        };
        for page in (0..PAGES).step_by(2) {
            // SAFETY: a page of the mapping, into which there is no reference.
            unsafe { replaced.part(mapped.page(page), PAGE) }.unwrap();
        }
        let wanted: Vec<u8> = (0..PAGES)
            .map(|page| if page % 2 == 0 { 0 } else { 0xaa })
            .collect();
        assert_eq!(mapped.bytes(), wanted);
        assert!(mapped.mappings() <= 2 * 4 + 1, "{}", mapped.mappings());
        // Pages beside a part are replaced, and joined with it.
        // SAFETY: as above.
        unsafe { replaced.part(mapped.page(1), 5 * PAGE) }.unwrap();
        assert_eq!(mapped.bytes()[..8], [0, 0, 0, 0, 0, 0, 0, 0xaa]);
        assert_eq!(replaced.parts.lock().unwrap().len(), 1);
        // A page that was replaced is dropped in its place.
        // SAFETY: as above; only this thread accesses the page.
        unsafe { mapped.page(2).write_volatile(7) };
        // SAFETY: as above.
        unsafe { replaced.part(mapped.page(2), PAGE) }.unwrap();
        assert_eq!(mapped.bytes()[2], 0);
        // SAFETY: as above.
        unsafe { replaced.all(mapped.page(0), PAGES * PAGE) }.unwrap();
        assert_eq!(mapped.bytes(), [0; PAGES]);
        assert_eq!(replaced.parts.lock().unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn parts_are_joined_where_they_touch_and_nowhere_else(
            inserted in proptest::collection::vec((0_usize..200, 1_usize..20), 0..40)
        ) {
            let (mut parts, mut model) = (BTreeMap::new(), [false; 256]);
            for (start, length) in inserted {
                insert(&mut parts, start, start + length);
                model[start..start + length].fill(true);
            }
            let mut covered = [false; 256];
            let mut before = None;
            for (start, end) in parts {
                prop_assert!(before.is_none_or(|before| before < start), "{start} touches {before:?}");
                covered[start..end].fill(true);
                before = Some(end);
            }
            prop_assert_eq!(covered, model);
        }
    }
}
