//! Descriptor tables in guest memory, and traversal of a chain's descriptors (virtio 1.3, 2.7.5).
//!
//! This code runs for each request of each device, so the loop's state stays in registers.

use std::ops::Range;

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileMemory};
use vmm_base::{
    GuestMemory,
    ram::{self, Segment},
};

use super::{
    chain::{Chain, MAX_SEGMENTS},
    fault::RingError,
    window::Window,
};

/// Bytes of a descriptor (2.7.5).
const DESCRIPTOR: u32 = 16;

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

/// Fills `chain` with the buffers of the chain that begins at descriptor `head` of the queue's own `table`, which has
/// `entries`. All of them lie in `extent`, which is that of `memory`.
pub(super) fn walk(
    chain: &mut Chain,
    table: &Window,
    entries: u16,
    head: u16,
    memory: &GuestMemory,
    extent: &Extent,
) -> Result<(), RingError> {
    chain.clear(head);
    let mut walk = Walk {
        segments: &mut chain.segments,
        extent,
        total: 0,
        count: 0,
        readable: 0,
        readable_len: 0,
    };
    let mut end = walk.steps(head, entries, |index| table.read(place(index)));
    if let End::Indirect { address, length } = end {
        end = walk.indirect(memory, address, length);
    }
    let Walk {
        total,
        readable,
        readable_len,
        ..
    } = walk;
    chain.readable = readable;
    chain.readable_len = readable_len;
    chain.writable_len = total.wrapping_sub(readable_len);
    match end {
        End::Last => Ok(()),
        End::Broken | End::Indirect { .. } => Err(RingError::Chain(head)),
        End::Long => Err(RingError::ChainLength(head)),
        End::Disorder => Err(RingError::Order(head)),
        End::Outside { address, length } => Err(RingError::Buffer { address, length }),
    }
}

/// Why no more descriptors of a table are followed.
enum End {
    /// It was the last one.
    Last,
    /// It stands for a table at that address of that many bytes.
    Indirect { address: u64, length: u32 },
    /// See [`RingError::Chain`].
    Broken,
    /// See [`RingError::ChainLength`].
    Long,
    /// See [`RingError::Order`].
    Disorder,
    /// See [`RingError::Buffer`].
    Outside { address: u64, length: u32 },
}

struct Walk<'a> {
    segments: &'a mut Vec<Segment>,
    extent: &'a Extent,
    /// Bytes in all buffers so far.
    total: u32,
    /// Buffers so far, empty ones included.
    count: usize,
    /// How many of `segments` are device-readable, and the bytes in these.
    readable: usize,
    readable_len: u32,
}

impl Walk<'_> {
    /// Follows an indirect table.
    fn indirect(&mut self, memory: &GuestMemory, address: u64, length: u32) -> End {
        // Whole descriptors (2.7.5.3).
        let entries = u16::try_from(length.wrapping_div(DESCRIPTOR));
        let (Ok(entries), true) = (entries, length.is_multiple_of(DESCRIPTOR)) else {
            return End::Broken;
        };
        match ram::slice(memory, GuestAddress(address), length as usize) {
            Some(slice) => self.steps(0, entries, |index| {
                let place = usize::try_from(place(index)).ok()?;
                Some(slice.get_ref(place).ok()?.load())
            }),
            // In several pieces, or not in memory.
            None => self.steps(0, entries, |index| {
                let place = address.checked_add(place(index))?;
                memory.read_obj(GuestAddress(place)).ok()
            }),
        }
    }

    /// Follows the descriptors of a table with that many entries from the one with index `first` on.
    #[inline(always)]
    fn steps(&mut self, first: u16, entries: u16, read: impl Fn(u16) -> Option<[u64; 2]>) -> End {
        let mut index = first;
        // As many steps as there are descriptors: more is a loop.
        for _ in 0..entries {
            let found = if index < entries { read(index) } else { None };
            let Some(found) = found.map(descriptor) else {
                return End::Broken;
            };
            let (address, length) = (found.addr().0, found.len());
            if found.refers_to_indirect_table() {
                return End::Indirect { address, length };
            }
            let Some(total) = self.total.checked_add(length) else {
                return End::Broken;
            };
            self.total = total;
            self.count = self.count.wrapping_add(1);
            if self.count > MAX_SEGMENTS {
                return End::Long;
            }
            let writable = found.is_write_only();
            if !writable && self.segments.len() > self.readable {
                return End::Disorder;
            }
            if length > 0 {
                if !self.extent.holds(address, length) {
                    return End::Outside { address, length };
                }
                self.segments.push(Segment {
                    address: GuestAddress(address),
                    length,
                });
                if !writable {
                    self.readable = self.segments.len();
                    self.readable_len = total;
                }
            }
            if !found.has_next() {
                return End::Last;
            }
            index = found.next();
        }
        End::Broken
    }
}
