//! Sparse files in archives, as GNU tar writes them unless another format is asked for ("Sparse Formats", old GNU format): Debian's and
//! Google's archives with disks have such.

use std::io::{self, Read};

use anyhow::{Context as _, Result, bail};
use tar::{GnuExtSparseHeader, GnuSparseHeader, Header};

use super::layers::read_block;

/// Most pieces of data of one file.
const MOST: usize = 1 << 20;
/// Length of a block of the list behind the header, in bytes.
const BLOCK: usize = 512;

/// Where a file has data.
pub struct Sparse {
    /// Length of the file in bytes.
    pub length: u64,
    /// Offset and length of each piece, in order.
    pieces: Vec<(u64, u64)>,
}

impl Sparse {
    /// From the header of an entry with `stored` bytes of data, and the list that follows it.
    pub fn read(header: &Header, content: &mut dyn Read, stored: u64) -> Result<Self> {
        const DAMAGED: &str = "the list of its holes is damaged";
        let gnu = header.as_gnu().context(DAMAGED)?;
        let mut found = Self {
            length: gnu.real_size().context(DAMAGED)?,
            pieces: Vec::new(),
        };
        found.add(&gnu.sparse)?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = GnuExtSparseHeader::new();
            if read_block(content, block.as_mut_bytes())? < BLOCK {
                bail!("the archive ends in the list of its holes");
            }
            found.add(block.sparse())?;
            more = block.is_extended();
        }
        let data = found.pieces.iter().map(|(_, length)| *length);
        match data.fold(0, u64::saturating_add) == stored {
            true => Ok(found),
            false => bail!(DAMAGED),
        }
    }

    fn add(&mut self, list: &[GnuSparseHeader]) -> Result<()> {
        const DAMAGED: &str = "the list of its holes is damaged";
        for piece in list.iter().filter(|piece| !piece.is_empty()) {
            let (offset, length) = (piece.offset().context(DAMAGED)?, piece.length().context(DAMAGED)?);
            let before = self.pieces.last().map_or(0, |(offset, length)| offset + length);
            let end = offset.checked_add(length).filter(|end| *end <= self.length);
            if offset < before || end.is_none() || self.pieces.len() >= MOST {
                bail!(DAMAGED);
            }
            self.pieces.push((offset, length));
        }
        Ok(())
    }

    /// The whole file, of which `data` has the pieces.
    pub fn over<'a>(self, data: &'a mut dyn Read) -> impl Read + 'a {
        Whole {
            pieces: self.pieces.into_iter().peekable(),
            length: self.length,
            at: 0,
            data,
        }
    }
}

struct Whole<'a> {
    pieces: std::iter::Peekable<std::vec::IntoIter<(u64, u64)>>,
    length: u64,
    at: u64,
    data: &'a mut dyn Read,
}

impl Read for Whole<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self
            .pieces
            .next_if(|(offset, length)| self.at >= offset + length)
            .is_some()
        {}
        let (start, end) = match self.pieces.peek() {
            Some((offset, length)) => (*offset, offset + length),
            None => (self.length, self.length),
        };
        let hole = self.at < start;
        let left = if hole { start - self.at } else { end - self.at };
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = buffer.get_mut(..count).unwrap_or_default();
        let count = match hole {
            true => {
                buffer.fill(0);
                count
            }
            false => self.data.read(buffer)?,
        };
        self.at += count as u64;
        Ok(count)
    }
}
