//! Requests that direct I/O (O_DIRECT) cannot take as they are: any place and length, through bounce buffers.
//!
//! If the request begins or ends within a block of the host, that block is read first and written
//! back whole ("read-modify-write"). No other change of the block may be under way during that time:
//! see [`Ranges`](super::target::Ranges). There is no second descriptor without O_DIRECT as a
//! fallback: a VM's process receives open descriptors and opens no paths, and this node's page cache
//! could hold stale data after a write by another node.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use rustix::io::{ReadWriteFlags, pwritev2};

use super::target::Target;

/// Size of a buffer: a multiple of every alignment.
pub(super) const BUFFER_BYTES: usize = 128 << 10;

/// Largest alignment that is met. Linux's largest logical block is 64 KiB.
pub(super) const MAX_ALIGNMENT: u32 = 64 << 10;

/// Memory aligned for any direct I/O.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    /// Where the first aligned byte is.
    start: usize,
}

impl Buffer {
    pub(super) fn new() -> Self {
        let room = (MAX_ALIGNMENT as usize).saturating_mul(2);
        let bytes = vec![0; BUFFER_BYTES.saturating_add(room)];
        let start = bytes.as_ptr().align_offset(room);
        Self { bytes, start }
    }

    /// Returns the first `length` bytes, at most [`BUFFER_BYTES`]. The old content remains.
    pub(super) fn get(&mut self, length: usize) -> &mut [u8] {
        let end = self.start.saturating_add(length.min(BUFFER_BYTES));
        self.bytes.get_mut(self.start..end).unwrap_or_default()
    }

    /// A piece of that length, at a multiple of that alignment and of none larger.
    pub(super) fn odd_piece(&mut self, alignment: u32) -> &mut [u8] {
        let start = self.start.saturating_add(alignment as usize);
        let end = start.saturating_add(alignment as usize);
        self.bytes.get_mut(start..end).unwrap_or_default()
    }
}

/// A buffer that is made when it is needed first.
#[derive(Debug, Default)]
pub(super) struct Bounce(Option<Buffer>);

impl Bounce {
    fn get(&mut self, length: usize) -> &mut [u8] {
        self.0.get_or_insert_with(Buffer::new).get(length)
    }
}

/// Some bytes, and the blocks around them.
struct Piece {
    blocks: Range<u64>,
    bytes: Range<u64>,
}

/// At most what fits into a buffer.
fn span(range: &Range<u64>) -> usize {
    usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX)
}

/// The part of a buffer that holds `bytes`, when the whole holds `blocks`.
fn part<'a>(buffer: &'a mut [u8], blocks: &Range<u64>, bytes: &Range<u64>) -> &'a mut [u8] {
    let start = span(&(blocks.start..bytes.start));
    let end = span(&(blocks.start..bytes.end));
    buffer.get_mut(start..end).unwrap_or_default()
}

fn write_all_at(file: &File, data: &[u8], offset: u64, stable: bool) -> io::Result<()> {
    let flags = if stable {
        ReadWriteFlags::DSYNC
    } else {
        ReadWriteFlags::empty()
    };
    let (mut data, mut offset) = (data, offset);
    while !data.is_empty() {
        let count = rustix::io::retry_on_intr(|| pwritev2(file, &[io::IoSlice::new(data)], offset, flags))?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        data = data.get(count..).unwrap_or_default();
        offset = offset.saturating_add(count as u64);
    }
    Ok(())
}

impl Target {
    /// Reads bytes through a buffer and hands them on, piece by piece.
    pub(super) fn read(
        &self,
        offset: u64,
        length: u64,
        bounce: &mut Bounce,
        mut to: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        for Piece { blocks, bytes } in self.pieces(offset, length) {
            let buffer = bounce.get(span(&blocks));
            self.fill(buffer, blocks.start)?;
            to(part(buffer, &blocks, &bytes));
        }
        Ok(())
    }

    /// Reads whole blocks.
    fn fill(&self, blocks: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut offset) = (blocks, offset);
        while !rest.is_empty() {
            let count = match self.file.read_at(rest, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            };
            rest = rest.get_mut(count..).unwrap_or_default();
            offset = offset.saturating_add(count as u64);
            // Direct I/O is impossible from within a block; only a read at the end of the file
            // stops there.
            if count == 0 || !offset.is_multiple_of(self.alignment().offset.into()) {
                if !self.extended {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                rest.fill(0);
                break;
            }
        }
        Ok(())
    }

    /// Writes bytes through a buffer, which are asked for piece by piece; keeps what else is in their blocks. To be done
    /// [`alone`](Self::alone).
    pub(super) fn write(
        &self,
        offset: u64,
        length: u64,
        stable: bool,
        bounce: &mut Bounce,
        mut from: impl FnMut(&mut [u8]),
    ) -> io::Result<()> {
        let unit = u64::from(self.alignment().offset);
        for Piece { blocks, bytes } in self.pieces(offset, length) {
            let buffer = bounce.get(span(&blocks));
            let last = blocks.end.saturating_sub(unit);
            if bytes.start > blocks.start {
                let block = blocks.start..blocks.start.saturating_add(unit);
                self.fill(part(buffer, &blocks, &block), block.start)?;
            }
            if bytes.end < blocks.end && (last > blocks.start || bytes.start == blocks.start) {
                self.fill(part(buffer, &blocks, &(last..blocks.end)), last)?;
            }
            from(part(buffer, &blocks, &bytes));
            write_all_at(&self.file, buffer, blocks.start, stable)?;
        }
        Ok(())
    }

    /// A request cut so that the blocks of each piece fit into a buffer.
    fn pieces(&self, offset: u64, length: u64) -> impl Iterator<Item = Piece> {
        let end = offset.saturating_add(length);
        let mut at = offset;
        std::iter::from_fn(move || {
            let left = end.checked_sub(at).filter(|left| *left > 0)?;
            let mut blocks = self.alignment().around(at, left);
            blocks.end = blocks.end.min(blocks.start.saturating_add(BUFFER_BYTES as u64));
            let bytes = at..end.min(blocks.end);
            at = bytes.end;
            Some(Piece { blocks, bytes })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_for_anything() {
        let mut buffer = Buffer::new();
        assert_eq!(buffer.get(usize::MAX).len(), BUFFER_BYTES);
        assert_eq!(buffer.get(512).as_ptr().align_offset(MAX_ALIGNMENT as usize), 0);
        let odd = buffer.odd_piece(4096);
        assert_eq!((odd.len(), odd.as_ptr().align_offset(4096)), (4096, 0));
        assert_ne!(odd.as_ptr().align_offset(8192), 0);
    }
}
