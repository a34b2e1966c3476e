//! Guest memory as requests name it, and the way to it, which is gone several times for each request.

pub mod prefetch;

use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, VolatileSlice, bitmap::MS,
};

use crate::GuestMemory;

/// A slice of guest memory that marks writes in the dirty bitmap.
pub type GuestSlice<'a> = VolatileSlice<'a, MS<'a, GuestMemory>>;

/// One buffer of a request in guest memory, not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: GuestAddress,
    /// Length in bytes.
    pub length: u32,
}

/// An access beyond the end of the buffers of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request's buffers are too short")]
pub struct TooShort;

/// So many regions are looked through one after the other, which is quicker than a search. A machine has two, and one
/// more for each part of its memory that was plugged.
const FEW: usize = 4;

/// The host's view of `length` bytes from `address` on; `None` unless they lie in one region.
#[inline]
pub fn slice(memory: &GuestMemory, address: GuestAddress, length: usize) -> Option<GuestSlice<'_>> {
    if memory.num_regions() > FEW {
        return GuestMemoryBackend::get_slice(memory, address, length).ok();
    }
    memory.iter().find_map(|region| {
        let offset = address.0.checked_sub(region.start_addr().0)?;
        let within = offset < region.len();
        within.then(|| region.get_slice(MemoryRegionAddress(offset), length).ok())?
    })
}

/// Prefetches the cache line at `address` for writing, in the background. No effect outside guest
/// memory.
#[inline]
pub fn fetch_to_change(memory: &GuestMemory, address: GuestAddress) {
    if let Some(place) = slice(memory, address, 1) {
        prefetch::to_change(&place);
    }
}

/// The same, to be read.
#[inline]
pub fn fetch_to_read(memory: &GuestMemory, address: GuestAddress) {
    if let Some(place) = slice(memory, address, 1) {
        prefetch::to_read(&place);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    /// That many regions of a page, each second one right behind the one before it.
    fn memory(regions: u64) -> GuestMemory {
        let place = |number: u64| GuestAddress(0x1000 + number / 2 * 0x4000 + number % 2 * 0x1000);
        let ranges: Vec<_> = (0..regions).map(|number| (place(number), 0x1000)).collect();
        GuestMemory::from_ranges(&ranges).unwrap()
    }

    #[test]
    fn what_is_found_in_a_few_regions_is_what_a_search_finds_in_many() {
        for regions in 1..8 {
            let memory = memory(regions);
            for address in (0..0x14000).step_by(0x400).chain([u64::MAX, u64::MAX - 0xfff]) {
                let address = GuestAddress(address);
                for length in [1, 0x3ff, 0x400, 0x401, 0x1000, 0x1001, 0x2000, usize::MAX] {
                    let expected = GuestMemoryBackend::get_slice(&memory, address, length).ok();
                    let found = slice(&memory, address, length);
                    let place = |slice: &GuestSlice<'_>| (slice.ptr_guard().as_ptr().addr(), slice.len());
                    assert_eq!(
                        found.as_ref().map(place),
                        expected.as_ref().map(place),
                        "{regions} regions, {length} bytes at {address:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn to_fetch_something_changes_nothing_wherever_it_is() {
        let memory = memory(2);
        memory.write_obj(7_u64, GuestAddress(0x1000)).unwrap();
        for address in [0, 0x1000, 0x2fff, 0x3000, u64::MAX] {
            fetch_to_change(&memory, GuestAddress(address));
            fetch_to_read(&memory, GuestAddress(address));
        }
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 7);
    }
}
