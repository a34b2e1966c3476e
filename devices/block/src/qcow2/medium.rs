//! Storage of an image: a file, or in tests a recorder of all changes.

use std::{fmt, fs::File, io, os::unix::fs::FileExt};

use rustix::fs::{FallocateFlags, fallocate};
use vmm_base::sys::{Iovecs, file};

/// A file's bytes. Behind its end there are zeroes, and a write extends it. Any thread may use it.
pub trait Medium: fmt::Debug + Send + Sync {
    /// Bytes by now.
    fn size(&self) -> io::Result<u64>;
    /// Fills `data` from byte `offset` on.
    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes `data` from byte `offset` on.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Fills guest memory from byte `offset` on. Uses the list up.
    fn read_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()>;
    /// Writes guest memory from byte `offset` on. Uses the list up.
    fn write_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()>;
    /// Makes a range read as zeroes, and gives its space back where the host can. The length of the file stays.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;
    /// Makes a range read as zeroes, with space for it reserved. Extends the file.
    fn allocate_zeroes(&self, offset: u64, length: u64) -> io::Result<()>;
    /// On return everything written before is on stable storage.
    fn sync(&self) -> io::Result<()>;
}

/// Size of one write of zeroes in bytes, where holes are not supported.
const ZEROES: usize = 64 << 10;

impl Medium for File {
    fn size(&self) -> io::Result<u64> {
        file::length(self)
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut offset) = (data, offset);
        while !rest.is_empty() {
            match FileExt::read_at(self, rest, offset) {
                Ok(0) => {
                    rest.fill(0);
                    break;
                }
                Ok(count) => {
                    rest = rest.get_mut(count..).unwrap_or_default();
                    offset = offset.saturating_add(count as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn read_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        match buffers.read_exact_at(self, offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                buffers.zero();
                Ok(())
            }
            result => result,
        }
    }

    fn write_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        buffers.write_all_at(self, offset, false)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let end = file::length(self)?;
        let length = end.saturating_sub(offset).min(length);
        if length == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(self, flags, offset, length) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => write_zeroes(self, offset, length),
            Err(error) => Err(error.into()),
        }
    }

    fn allocate_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match fallocate(self, FallocateFlags::ZERO_RANGE, offset, length) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => write_zeroes(self, offset, length),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

fn write_zeroes(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let zeroes = vec![0; ZEROES];
    let (mut offset, mut left) = (offset, length);
    while left > 0 {
        let count = usize::try_from(left).unwrap_or(ZEROES).min(ZEROES);
        file.write_all_at(zeroes.get(..count).unwrap_or_default(), offset)?;
        offset = offset.saturating_add(count as u64);
        left = left.saturating_sub(count as u64);
    }
    Ok(())
}
