//! The file or block device behind a raw image, and how a request is carried out on it by waiting for it.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, FileTypeExt as _},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{FallocateFlags, fallocate};

use super::{engine::Operation, image::OpenError};
use crate::sys::{Iovecs, blockdev};

/// Zeroes that are written at once where the host has no better way.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// What it is that holds the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    BlockDevice {
        /// In bytes: what discards and zeroings have to be multiples of.
        logical_block: u32,
    },
}

/// Shared by an image and its engines.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) file: File,
    pub(super) kind: Kind,
    /// In bytes.
    capacity: AtomicU64,
}

/// How to make bytes read as zero, best first.
const FREEING: [FallocateFlags; 2] = [
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE),
    FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE),
];

/// The fallocate(2) mode that makes bytes read as zero; with `unmap` their space is given back.
pub(super) fn zeroing(unmap: bool) -> FallocateFlags {
    let [freeing, keeping] = FREEING;
    if unmap { freeing } else { keeping }
}

/// Whether the host says that it has no such operation here.
pub(super) fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EINVAL)
    )
}

impl Target {
    /// Of what was opened; checks that it is a file or a block device.
    pub(super) fn new(file: File) -> Result<Self, OpenError> {
        let metadata = file
            .metadata()
            .map_err(|error| OpenError::Host("look at the image", error))?;
        let file_type = metadata.file_type();
        let (kind, capacity) = if file_type.is_file() {
            (Kind::File, metadata.len())
        } else if file_type.is_block_device() {
            let logical_block = blockdev::logical_block(&file)
                .map_err(|error| OpenError::Host("find out the block device's block size", error))?;
            let capacity = blockdev::size(&file)
                .map_err(|error| OpenError::Host("find out the block device's size", error))?;
            (Kind::BlockDevice { logical_block }, capacity)
        } else {
            return Err(OpenError::Kind(kind_name(file_type)));
        };
        Ok(Self {
            file,
            kind,
            capacity: capacity.into(),
        })
    }

    /// Size in bytes by now.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Carries out a request; returns when it is done. Uses the buffers up.
    pub(super) fn execute(&self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
        match operation {
            Operation::Read { offset } => buffers.read_exact_at(&self.file, offset),
            Operation::Write { offset, stable } => buffers.write_all_at(&self.file, offset, stable),
            Operation::Flush => self.file.sync_data(),
            Operation::Discard { offset, length } => self.discard(offset, length),
            Operation::WriteZeroes {
                offset,
                length,
                unmap,
            } => self.write_zeroes(offset, length, unmap),
        }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let result = match self.kind {
            Kind::File => repeat(|| fallocate(&self.file, zeroing(true), offset, length)),
            Kind::BlockDevice { logical_block } => match whole_blocks(offset, length, logical_block) {
                Some((offset, length)) => blockdev::discard(&self.file, offset, length),
                None => Ok(()),
            },
        };
        match result {
            // It was only a hint.
            Err(error) if unsupported(&error) => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        for flags in FREEING.into_iter().skip(usize::from(!unmap)) {
            match repeat(|| fallocate(&self.file, flags, offset, length)) {
                Err(error) if unsupported(&error) => {}
                result => return result,
            }
        }
        self.write_zero_buffers(offset, length)
    }

    fn write_zero_buffers(&self, mut offset: u64, mut length: u64) -> io::Result<()> {
        while length > 0 {
            let now = usize::try_from(length).unwrap_or(usize::MAX).min(ZEROES.len());
            self.file
                .write_all_at(ZEROES.get(..now).unwrap_or_default(), offset)?;
            offset = offset.saturating_add(now as u64);
            length = length.saturating_sub(now as u64);
        }
        Ok(())
    }
}

/// The whole blocks in a range, if there are any.
fn whole_blocks(offset: u64, length: u64, block: u32) -> Option<(u64, u64)> {
    let block = u64::from(block);
    let first = offset.checked_next_multiple_of(block)?;
    let end = offset.checked_add(length)?;
    let end = end.checked_sub(end.checked_rem(block)?)?;
    let length = end.checked_sub(first)?;
    (length > 0).then_some((first, length))
}

/// A system call, again when a signal interrupted it.
fn repeat(call: impl Fn() -> rustix::io::Result<()>) -> io::Result<()> {
    rustix::io::retry_on_intr(call).map_err(io::Error::from)
}

fn kind_name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "directory"
    } else if kind.is_char_device() {
        "character device"
    } else if kind.is_fifo() {
        "pipe"
    } else if kind.is_socket() {
        "socket"
    } else {
        "file of unknown kind"
    }
}
