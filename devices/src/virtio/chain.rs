//! A descriptor chain, checked and split into its two parts (virtio 1.3, 2.7.4), and its traversal in the descriptor
//! tables (2.7.5).
//!
//! The traversal runs for each request of each device, so the loop's state stays in registers.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use virtio_queue::desc::split::Descriptor;
use vm_memory::{
    ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress, VolatileMemory, bitmap::Bitmap,
};
use vmm_base::{
    GuestMemory,
    dirty::{self, DirtyBitmap},
    ram::{self, GuestSlice, Segment, TooShort, prefetch},
};
use zerocopy::{FromBytes, IntoBytes};

use super::fault::RingError;

/// Most buffers in one chain. Linux' drivers stay below; the spec's own limit is the queue's size, which drivers with
/// indirect tables do not keep.
pub const MAX_SEGMENTS: usize = 1024;

/// Bytes of a descriptor (2.7.5).
const DESCRIPTOR: u32 = 16;

/// Buffers of one request: first the device-readable buffers, then the device-writable ones.
///
/// [`Queue::pop`](super::queue::Queue::pop) fills a chain. Reuse the chain to save its allocation.
/// The guest can change the *content* of the buffers at any time: copy a header once, check the
/// copy, and act on the copy.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    /// How many of `segments` are device-readable.
    readable: usize,
    readable_len: u32,
    writable_len: u32,
}

impl Chain {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Index of the first descriptor: what [`Queue::add_used`](super::queue::Queue::add_used) wants.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The device-readable buffers.
    pub fn readable(&self) -> &[Segment] {
        self.segments.get(..self.readable).unwrap_or_default()
    }

    /// The device-writable buffers.
    pub fn writable(&self) -> &[Segment] {
        self.segments.get(self.readable..).unwrap_or_default()
    }

    /// Bytes in the device-readable buffers together.
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Bytes in the device-writable buffers together.
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// Copies out of the readable part, from `offset` bytes into it.
    pub fn read(&self, memory: &GuestMemory, offset: u32, data: &mut [u8]) -> Result<(), TooShort> {
        let mut left = data;
        let length = u32::try_from(left.len()).map_err(|_| TooShort)?;
        for piece in pieces(self.readable(), offset, length) {
            let Segment { address, length } = piece?;
            let (now, rest) = std::mem::take(&mut left)
                .split_at_mut_checked(length as usize)
                .ok_or(TooShort)?;
            copy_out(memory, address, now)?;
            left = rest;
        }
        Ok(())
    }

    /// Copies a structure out of the readable part, from `offset` bytes into it.
    pub fn read_obj<T: FromBytes + IntoBytes>(
        &self,
        memory: &GuestMemory,
        offset: u32,
    ) -> Result<T, TooShort> {
        let mut value = T::new_zeroed();
        self.read(memory, offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// A copy of the first 16 bytes of the readable part, where block devices have their header.
    #[inline]
    pub fn read_front(&self, memory: &GuestMemory) -> Result<[u8; 16], TooShort> {
        if let Some(first) = self.readable().first()
            && first.length >= 16
            && let Some(slice) = ram::slice(memory, first.address, 16)
            && let Ok(front) = slice.get_ref::<[u64; 2]>(0)
        {
            // Two loads; bytes would be loaded one by one.
            return Ok(zerocopy::transmute!(front.load()));
        }
        let mut front = [0; 16];
        self.read(memory, 0, &mut front)?;
        Ok(front)
    }

    /// Copies into the writable part, from `offset` bytes into it.
    pub fn write(&self, memory: &GuestMemory, offset: u32, data: &[u8]) -> Result<(), TooShort> {
        let mut left = data;
        let length = u32::try_from(left.len()).map_err(|_| TooShort)?;
        for piece in pieces(self.writable(), offset, length) {
            let Segment { address, length } = piece?;
            let (now, rest) = left.split_at_checked(length as usize).ok_or(TooShort)?;
            memory.write_slice(now, address).map_err(|_| TooShort)?;
            left = rest;
        }
        Ok(())
    }

    /// Returns the host's view of `length` bytes of the writable part from `offset` on, for system
    /// calls. The caller must report the bytes that the kernel writes to the dirty log with
    /// [`mark_written`](Self::mark_written).
    pub fn writable_slices<'a>(
        &'a self,
        memory: &'a GuestMemory,
        offset: u32,
        length: u32,
    ) -> impl Iterator<Item = Result<GuestSlice<'a>, TooShort>> {
        slices(self.writable(), memory, offset, length)
    }

    /// Writes the last byte of the writable part, where many devices have a status.
    pub fn write_last(&self, memory: &GuestMemory, byte: u8) -> Result<(), TooShort> {
        let last = self.writable().last().ok_or(TooShort)?;
        let end = last.address.0.wrapping_add(u64::from(last.length));
        let slice = ram::slice(memory, GuestAddress(end.wrapping_sub(1)), 1).ok_or(TooShort)?;
        slice.get_ref(0).map_err(|_| TooShort)?.store(byte);
        Ok(())
    }

    /// Notes in the dirty bitmap that `length` bytes of the writable part from `offset` on were written behind its
    /// back.
    #[inline]
    pub fn mark_written(&self, memory: &GuestMemory, offset: u32, length: u32) {
        if dirty::is_used() {
            mark(self.writable(), memory, offset, length);
        }
    }

    fn clear(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        self.readable = 0;
        self.readable_len = 0;
        self.writable_len = 0;
    }
}

/// Notes in the dirty bitmap that `length` bytes of `segments` from `offset` on were written behind its back.
pub(crate) fn mark(segments: &[Segment], memory: &GuestMemory, offset: u32, length: u32) {
    for slice in slices(segments, memory, offset, length).flatten() {
        slice.bitmap().mark_dirty(0, slice.len());
    }
}

fn copy_out(memory: &GuestMemory, address: GuestAddress, data: &mut [u8]) -> Result<(), TooShort> {
    // Mostly it lies in one region, which is quicker.
    match ram::slice(memory, address, data.len()) {
        Some(slice) => {
            slice.copy_to(data);
            Ok(())
        }
        None => memory.read_slice(data, address).map_err(|_| TooShort),
    }
}

/// Cuts `length` bytes from `offset` on out of `segments`; ends with an error when they are shorter.
fn pieces(segments: &[Segment], offset: u32, length: u32) -> impl Iterator<Item = Result<Segment, TooShort>> {
    let (mut skip, mut left) = (offset, length);
    let mut segments = segments.iter();
    std::iter::from_fn(move || {
        while left > 0 {
            let Some(segment) = segments.next() else {
                left = 0;
                return Some(Err(TooShort));
            };
            let Some(room) = segment.length.checked_sub(skip).filter(|room| *room > 0) else {
                skip = skip.saturating_sub(segment.length);
                continue;
            };
            let length = room.min(left);
            let address = GuestAddress(segment.address.0.wrapping_add(u64::from(skip)));
            (skip, left) = (0, left.saturating_sub(length));
            return Some(Ok(Segment { address, length }));
        }
        None
    })
}

fn slices<'a>(
    segments: &'a [Segment],
    memory: &'a GuestMemory,
    offset: u32,
    length: u32,
) -> impl Iterator<Item = Result<GuestSlice<'a>, TooShort>> {
    pieces(segments, offset, length).flat_map(move |piece| {
        let (address, length) = piece.map_or((None, 0), |piece| (Some(piece.address), piece.length as usize));
        let found = address.map(|address| GuestMemoryBackend::get_slices(memory, address, length));
        let failed = address.is_none().then_some(Err(TooShort));
        found
            .into_iter()
            .flatten()
            .map(|slice| slice.map_err(|_| TooShort))
            .chain(failed)
    })
}

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

/// Part of guest memory that is looked up once and then accessed repeatedly.
///
/// The guest can change its content at any time, as in all guest memory. Therefore each access is
/// volatile or atomic.
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
