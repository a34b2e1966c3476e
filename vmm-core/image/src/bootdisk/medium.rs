//! The disk, and windows of it: partitions.

use std::{
    cell::Cell,
    fmt,
    io::{self, Read, Seek, SeekFrom, Write},
    rc::Rc,
};

/// A disk that can be read.
pub trait Medium {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Fills `data` from byte `offset` on. The whole range lies within the disk.
    ///
    /// # Errors
    ///
    /// The read failed.
    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Medium for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let piece = usize::try_from(offset).ok().and_then(|from| {
            let end = from.checked_add(data.len())?;
            self.get(from..end)
        });
        data.copy_from_slice(piece.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A disk with a limit of read bytes, since its content may make a library loop.
pub struct Bounded {
    disk: Rc<dyn Medium>,
    left: Cell<u64>,
}

impl Bounded {
    /// Minimum cost of a read in bytes.
    const LEAST: u64 = 256;

    /// So many bytes may be read, until [`Bounded::refill`].
    pub fn new(disk: Rc<dyn Medium>, bytes: u64) -> Self {
        let left = Cell::new(bytes);
        Self { disk, left }
    }

    /// From now on so many bytes may be read.
    pub fn refill(&self, bytes: u64) {
        self.left.set(bytes);
    }

    /// Whether something was not read.
    pub fn is_exhausted(&self) -> bool {
        self.left.get() == 0
    }
}

impl fmt::Debug for Bounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} more bytes of a disk", self.left.get())
    }
}

impl Medium for Bounded {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let cost = Self::LEAST.max(data.len() as u64);
        let left = self.left.get().checked_sub(cost).filter(|left| *left > 0);
        self.left.set(left.unwrap_or(0));
        if left.is_none() {
            return Err(io::Error::other("it takes too long to look through the disk"));
        }
        self.disk.read_at(data, offset)
    }
}

/// A part of a disk, to be read only.
#[derive(Clone)]
pub struct Window {
    medium: Rc<dyn Medium>,
    start: u64,
    length: u64,
    position: u64,
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from {} on", self.length, self.start)
    }
}

impl Window {
    /// The whole disk.
    pub fn whole(medium: Rc<dyn Medium>) -> Self {
        let length = medium.size();
        Self {
            medium,
            start: 0,
            length,
            position: 0,
        }
    }

    /// A part of the window, in bytes, cut off at the window's end; `None` if the part begins
    /// beyond the end.
    pub fn part(&self, start: u64, length: u64) -> Option<Self> {
        let left = self.length.checked_sub(start).filter(|left| *left > 0)?;
        Some(Self {
            medium: Rc::clone(&self.medium),
            start: self.start.checked_add(start)?,
            length: length.min(left),
            position: 0,
        })
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Where it begins on the disk, in bytes.
    #[cfg(test)]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes from `offset` on; `None` when they are not all there.
    pub fn bytes<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, offset).ok()?;
        Some(bytes)
    }

    /// Fills `data` from `offset` on.
    pub fn fill(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.medium.read_at(data, self.start.saturating_add(offset))
    }
}

impl Read for Window {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        let left = self.length.saturating_sub(self.position);
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(data.len());
        let data = data.get_mut(..count).unwrap_or_default();
        self.fill(data, self.position)?;
        self.position = self.position.saturating_add(count as u64);
        Ok(count)
    }
}

impl Seek for Window {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// The FAT library requires this trait, but never writes when it only reads.
impl Write for Window {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
