//! Descriptor tables in guest memory (virtio 1.3, 2.7.5).

use std::ops::Range;

pub(super) use virtio_queue::desc::split::Descriptor;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::GuestMemory;

/// Bytes of a descriptor (2.7.5).
pub(super) const DESCRIPTOR: u32 = 16;

/// A copy of a descriptor that lies in memory as these two words. They are read in two loads; reading the structure would be
/// four.
#[inline]
#[allow(clippy::cast_possible_truncation)]
pub(super) fn descriptor([address, rest]: [u64; 2]) -> Descriptor {
    let rest = u64::from_le(rest);
    Descriptor::new(
        u64::from_le(address),
        rest as u32,
        (rest >> 32) as u16,
        (rest >> 48) as u16,
    )
}

/// Where in a table the descriptor with that index is, in bytes.
#[inline]
pub(super) fn place(index: u16) -> u64 {
    u64::from(index).wrapping_mul(DESCRIPTOR.into())
}

/// Where there is guest memory: ranges of addresses with gaps between them, for looking up many buffers.
#[derive(Debug)]
pub(super) struct Extent {
    /// The largest, where most buffers are.
    main: Range<u64>,
    others: Vec<Range<u64>>,
}

impl Extent {
    pub(super) fn of(memory: &GuestMemory) -> Self {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        // They are in order.
        for region in memory.iter() {
            let start = region.start_addr().0;
            let end = start.saturating_add(region.len());
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges.sort_by_key(|range| range.end.saturating_sub(range.start));
        Self {
            main: ranges.pop().unwrap_or_default(),
            others: ranges,
        }
    }

    /// Whether all of a buffer is in it.
    #[inline]
    pub(super) fn holds(&self, address: u64, length: u32) -> bool {
        let Some(end) = address.checked_add(length.into()) else {
            return false;
        };
        let within = |range: &Range<u64>| range.start <= address && end <= range.end;
        within(&self.main) || self.others.iter().any(within)
    }
}
