//! Content of a whole disk, for copies while the guest uses the disk. Each call waits for the host.

use std::{io, ops::Range, sync::Arc};

use vm_memory::{Bytes as _, GuestAddress};
use vmm_base::{GuestMemory, ram::Segment, sys::Iovecs};

use super::engine::Operation;

/// Most bytes that are read or written at once.
pub const PIECE: u64 = 1 << 20;

/// Granularity of extents in bytes. Only the last extent of a disk may have another length.
pub const BLOCK: u64 = 4096;

/// Carries out requests on an image one by one, beside its engines, and returns when each is done.
pub trait Access: Send {
    /// Carries out one request.
    fn execute(&mut self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()>;
    /// How far from `offset` on the image holds data, or nothing. For an offset below the capacity.
    fn extent(&self, offset: u64) -> io::Result<Extent>;
}

/// A part of a disk, from a place on that the caller knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// In bytes, at least 1.
    pub length: u64,
    /// The image keeps nothing there, and it reads as zeroes.
    pub is_hole: bool,
}

/// The content of an image; the image stays open, and locked, as long as this lives.
pub struct Content {
    access: Box<dyn Access>,
    /// As long as a piece.
    memory: Arc<GuestMemory>,
    buffers: Iovecs,
    capacity: u64,
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Content")
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Content {
    /// Creates the content of an image with `capacity` bytes.
    pub fn new(access: Box<dyn Access>, capacity: u64) -> io::Result<Self> {
        let length = usize::try_from(PIECE).map_err(io::Error::other)?;
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), length)]).map_err(io::Error::other)?;
        let memory = Arc::new(memory);
        Ok(Self {
            access,
            buffers: Iovecs::new(Arc::clone(&memory)),
            memory,
            capacity,
        })
    }

    /// Size of the disk in bytes when this was made.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// How far from `offset` on, a multiple of [`BLOCK`] below the capacity, there is data or nothing: whole blocks, or all that is left.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        let Extent { length, is_hole } = self.access.extent(offset)?;
        let end = offset.saturating_add(length).min(self.capacity);
        let down = |end: u64| end.saturating_sub(end.checked_rem(BLOCK).unwrap_or(0));
        let whole = match is_hole && end < self.capacity {
            true => down(end),
            false => end,
        };
        let is_hole = is_hole && whole > offset;
        let end = match is_hole {
            true => whole,
            false => end
                .max(offset.saturating_add(1))
                .checked_next_multiple_of(BLOCK)
                .unwrap_or(u64::MAX)
                .min(self.capacity),
        };
        Ok(Extent {
            length: end.saturating_sub(offset),
            is_hole,
        })
    }

    /// Reads what `range` holds, at most a [`PIECE`], into `data`, which has as many bytes then.
    pub fn read(&mut self, range: &Range<u64>, data: &mut Vec<u8>) -> io::Result<()> {
        let length = range.end.saturating_sub(range.start);
        self.check(range.start, length)?;
        let length = self.prepare(length)?;
        let read = Operation::Read { offset: range.start };
        self.access.execute(read, &mut self.buffers)?;
        data.resize(length, 0);
        let read = self.memory.read_slice(data, GuestAddress(0));
        read.map_err(io::Error::other)
    }

    /// Writes `data`, at most a [`PIECE`], from `offset` on.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check(offset, data.len() as u64)?;
        self.prepare(data.len() as u64)?;
        let written = self.memory.write_slice(data, GuestAddress(0));
        written.map_err(io::Error::other)?;
        let stable = false;
        let write = Operation::Write { offset, stable };
        self.access.execute(write, &mut self.buffers)
    }

    /// Makes bytes read as zeroes, and gives their space back.
    pub fn clear(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        self.buffers.clear();
        let zeroes = Operation::WriteZeroes {
            offset,
            length,
            unmap: true,
        };
        self.access.execute(zeroes, &mut self.buffers)
    }

    /// On return all that was written is on stable storage.
    pub fn flush(&mut self) -> io::Result<()> {
        self.buffers.clear();
        self.access.execute(Operation::Flush, &mut self.buffers)
    }

    /// Whether a range lies within the disk.
    fn check(&self, offset: u64, length: u64) -> io::Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= self.capacity => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Makes the buffers that long.
    fn prepare(&mut self, length: u64) -> io::Result<usize> {
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        if length > PIECE {
            return Err(too_long());
        }
        let whole = Segment {
            address: GuestAddress(0),
            length: u32::try_from(length).map_err(|_| too_long())?,
        };
        self.buffers.clear();
        let filled = self.buffers.append(&[whole], 0, whole.length);
        filled.map_err(|_| too_long())?;
        usize::try_from(length).map_err(|_| too_long())
    }
}
