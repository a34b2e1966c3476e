//! Operations on a disk's image as its controllers plan them: virtio-blk from chains, AHCI from commands.

use block::{Operation, SECTOR};

use super::control::Kind;
use crate::virtio::rate::Cost;

/// How a request ended; the status of virtio-blk (virtio 1.3, 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    IoError,
    Unsupported,
}

/// Operation that a request plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Read `length` bytes into the request's buffers.
    Read { offset: u64, length: u32 },
    /// Write the first `length` bytes of data of the request.
    Write { offset: u64, length: u32 },
    /// Make all writes so far stable.
    Flush,
    /// Discard ranges, which take that many bytes in the request.
    Discard { ranges: u32 },
    /// The same with zeroes.
    WriteZeroes { ranges: u32 },
    /// Give the first `length` bytes of the identification.
    Identify { length: u32 },
    /// Nothing: it completes with that status, whether it was in order or not.
    Complete(Status),
}

impl Plan {
    /// Returns the kind for the statistics, if they count the request.
    pub(crate) fn kind(&self) -> Option<Kind> {
        match self {
            Self::Read { .. } => Some(Kind::Read),
            Self::Write { .. } => Some(Kind::Write),
            Self::Flush => Some(Kind::Flush),
            Self::Discard { .. } | Self::WriteZeroes { .. } => Some(Kind::Discard),
            Self::Identify { .. } | Self::Complete(_) => None,
        }
    }

    /// Returns the request's cost for a rate limiter; `ranges` are the request's ranges. Flushes
    /// are free: they move no data, and a guest that waits for a flush holds locks. A discard moves
    /// no data either: it is a hint, and the host may ignore it. Zeroes cost as much as written
    /// data, because only the host finds out whether it must write them.
    pub(crate) fn cost(&self, ranges: &[Range]) -> Cost {
        let bytes = match *self {
            Self::Read { length, .. } | Self::Write { length, .. } => length.into(),
            Self::WriteZeroes { .. } => ranges.iter().map(|range| range.length).sum(),
            Self::Discard { .. } => 0,
            Self::Flush | Self::Identify { .. } | Self::Complete(_) => return Cost::default(),
        };
        Cost { bytes, operations: 1 }
    }

    /// Whether the request changes the disk's content.
    pub(crate) fn is_write(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. }
        )
    }

    /// Name of the operation in an error report.
    pub(crate) fn failure(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read from the image",
            Self::Write { .. } => "write to the image",
            Self::Discard { .. } => "discard a part of the image",
            Self::WriteZeroes { .. } => "write zeroes to the image",
            Self::Flush | Self::Identify { .. } | Self::Complete(_) => "flush the image",
        }
    }
}

/// A part of the disk that is discarded or zeroed; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub offset: u64,
    pub length: u64,
    pub unmap: bool,
}

impl Range {
    pub(crate) fn operation(&self, zeroes: bool) -> Operation {
        let Self {
            offset,
            length,
            unmap,
        } = *self;
        if zeroes {
            Operation::WriteZeroes {
                offset,
                length,
                unmap,
            }
        } else {
            Operation::Discard { offset, length }
        }
    }
}

/// Limits of a disk, except its size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes in a logical block: 512 or 4096, a power of two in any case. Requests are whole blocks.
    pub block: u32,
    pub read_only: bool,
    /// Discards are on offer.
    pub discard: bool,
}

impl Limits {
    /// The byte at which `length` bytes begin, if they are whole blocks within the disk.
    pub(crate) fn place(&self, capacity: u64, sector: u64, length: u64) -> Option<u64> {
        // It is a power of two.
        let within_block = u64::from(self.block).wrapping_sub(1);
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(length)?;
        ((length | offset) & within_block == 0 && end <= capacity).then_some(offset)
    }
}
