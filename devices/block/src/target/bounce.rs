//! Bytes of any place and length on a target that takes whole blocks only: through a buffer, and with what else is in their
//! blocks.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use rustix::io::{ReadWriteFlags, pwritev2};

use super::Target;
use crate::direct::{BUFFER_BYTES, Buffer};

/// A buffer that is made when it is needed first.
#[derive(Debug, Default)]
pub(crate) struct Bounce(Option<Buffer>);

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
    pub(crate) fn read(
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
            if count == 0 || !offset.is_multiple_of(self.alignment.offset.into()) {
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
    pub(crate) fn write(
        &self,
        offset: u64,
        length: u64,
        stable: bool,
        bounce: &mut Bounce,
        mut from: impl FnMut(&mut [u8]),
    ) -> io::Result<()> {
        let unit = u64::from(self.alignment.offset);
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
            let mut blocks = self.alignment.around(at, left);
            blocks.end = blocks.end.min(blocks.start.saturating_add(BUFFER_BYTES as u64));
            let bytes = at..end.min(blocks.end);
            at = bytes.end;
            Some(Piece { blocks, bytes })
        })
    }
}
