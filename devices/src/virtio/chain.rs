//! A descriptor chain, checked and split into its two parts (virtio 1.3, 2.7.4).

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileMemory, bitmap::Bitmap};
use vmm_base::{
    GuestMemory, dirty,
    ram::{self, GuestSlice, Segment, TooShort},
};
use zerocopy::{FromBytes, IntoBytes};

/// Most buffers in one chain. Linux' drivers stay below; the spec's own limit is the queue's size, which drivers with
/// indirect tables do not keep.
pub const MAX_SEGMENTS: usize = 1024;

/// Buffers of one request: first the device-readable buffers, then the device-writable ones.
///
/// [`Queue::pop`](super::queue::Queue::pop) fills a chain. Reuse the chain to save its allocation.
/// The guest can change the *content* of the buffers at any time: copy a header once, check the
/// copy, and act on the copy.
#[derive(Debug, Default)]
pub struct Chain {
    pub(super) head: u16,
    pub(super) segments: Vec<Segment>,
    /// How many of `segments` are device-readable.
    pub(super) readable: usize,
    pub(super) readable_len: u32,
    pub(super) writable_len: u32,
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

    /// The host's view of `length` bytes of the readable part from `offset` on, for handing to system calls.
    pub fn readable_slices<'a>(
        &'a self,
        memory: &'a GuestMemory,
        offset: u32,
        length: u32,
    ) -> impl Iterator<Item = Result<GuestSlice<'a>, TooShort>> {
        slices(self.readable(), memory, offset, length)
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
            self.mark(memory, offset, length);
        }
    }

    fn mark(&self, memory: &GuestMemory, offset: u32, length: u32) {
        for slice in self.writable_slices(memory, offset, length).flatten() {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }

    pub(super) fn clear(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        self.readable = 0;
        self.readable_len = 0;
        self.writable_len = 0;
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
