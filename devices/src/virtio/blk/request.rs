//! Parser of a driver's request, and checks whether the disk permits it (virtio 1.3, 5.2.6).

use block::{Operation, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vmm_base::ram::Segment;
use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U32, U64},
};

use super::stats::Kind;
use crate::rate::Cost;

/// Length of [`Header`] in bytes.
pub(super) const HEADER: u32 = 16;

/// Length of the disk's identification (5.2.6.1).
pub(super) const ID_LENGTH: usize = 20;

/// Length of [`RangeHeader`] in bytes.
pub(super) const RANGE: u32 = 16;

/// Most ranges in one discard or write-zeroes request.
pub(super) const MAX_RANGES: usize = 32;

/// Most data buffers in one request: a whole queue's, less header and status (5.2.5).
pub(super) const SEG_MAX: u32 = 254;

/// Longest range of a discard: 2 GiB. It is one call for the host.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 22;

/// Longest range of a write-zeroes: 64 MiB. Where the host can only write them, that is still done soon.
pub(super) const MAX_WRITE_ZEROES_SECTORS: u32 = 1 << 17;

/// The device-readable head of each request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes)]
#[repr(C)]
pub(super) struct Header {
    pub kind: U32,
    pub reserved: U32,
    /// In units of 512 bytes.
    pub sector: U64,
}

/// `struct virtio_blk_discard_write_zeroes`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes)]
#[repr(C)]
pub(super) struct RangeHeader {
    pub sector: U64,
    pub sectors: U32,
    pub flags: U32,
}

/// The status byte of a request (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    pub(super) fn byte(self) -> u8 {
        let value = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        u8::try_from(value).unwrap_or(u8::MAX)
    }
}

/// Operation that a request plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Read `length` bytes into the writable part's beginning.
    Read { offset: u64, length: u32 },
    /// Write the `length` bytes behind the header.
    Write { offset: u64, length: u32 },
    /// Make all writes so far stable.
    Flush,
    /// Discard the ranges behind the header, that many bytes of them.
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
    pub(super) fn kind(&self) -> Option<Kind> {
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
    pub(super) fn cost(&self, ranges: &[Range]) -> Cost {
        let bytes = match *self {
            Self::Read { length, .. } | Self::Write { length, .. } => length.into(),
            Self::WriteZeroes { .. } => ranges.iter().map(|range| range.length).sum(),
            Self::Discard { .. } => 0,
            Self::Flush | Self::Identify { .. } | Self::Complete(_) => return Cost::default(),
        };
        Cost { bytes, operations: 1 }
    }

    /// Whether the request changes the disk's content.
    pub(super) fn is_write(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. }
        )
    }

    /// Name of the operation in an error report.
    pub(super) fn failure(&self) -> &'static str {
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
pub(super) struct Range {
    pub offset: u64,
    pub length: u64,
    pub unmap: bool,
}

impl Range {
    pub(super) fn operation(&self, zeroes: bool) -> Operation {
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
pub(super) struct Limits {
    /// Bytes in a logical block: 512 or 4096, a power of two in any case. Requests are whole blocks.
    pub block: u32,
    pub read_only: bool,
    /// Discards are on offer.
    pub discard: bool,
}

impl Limits {
    /// Decides on a request with that header, `outgoing` bytes behind it and `incoming` bytes before the status, on a
    /// disk of `capacity` bytes.
    pub(super) fn plan(&self, capacity: u64, header: &Header, outgoing: u32, incoming: u32) -> Plan {
        let sector = header.sector.get();
        match header.kind.get() {
            VIRTIO_BLK_T_IN => match self.place(capacity, sector, incoming.into()) {
                Some(_) if incoming == 0 => Plan::Complete(Status::Ok),
                Some(offset) => Plan::Read {
                    offset,
                    length: incoming,
                },
                None => Plan::Complete(Status::IoError),
            },
            VIRTIO_BLK_T_OUT => match self.place(capacity, sector, outgoing.into()) {
                _ if self.read_only => Plan::Complete(Status::IoError),
                Some(_) if outgoing == 0 => Plan::Complete(Status::Ok),
                Some(offset) => Plan::Write {
                    offset,
                    length: outgoing,
                },
                None => Plan::Complete(Status::IoError),
            },
            VIRTIO_BLK_T_FLUSH => Plan::Flush,
            VIRTIO_BLK_T_GET_ID => {
                let length = u32::try_from(ID_LENGTH).unwrap_or(u32::MAX);
                Plan::Identify {
                    length: incoming.min(length),
                }
            }
            kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => self.plan_ranges(kind, outgoing),
            _ => Plan::Complete(Status::Unsupported),
        }
    }

    fn plan_ranges(&self, kind: u32, outgoing: u32) -> Plan {
        let zeroes = kind == VIRTIO_BLK_T_WRITE_ZEROES;
        if self.read_only {
            return Plan::Complete(Status::IoError);
        }
        if !zeroes && !self.discard {
            return Plan::Complete(Status::Unsupported);
        }
        let most = u32::try_from(MAX_RANGES).unwrap_or(1).saturating_mul(RANGE);
        if outgoing == 0 || outgoing > most || !outgoing.is_multiple_of(RANGE) {
            return Plan::Complete(Status::IoError);
        }
        if zeroes {
            Plan::WriteZeroes { ranges: outgoing }
        } else {
            Plan::Discard { ranges: outgoing }
        }
    }

    /// Decides on one range of a discard or write-zeroes request; `None` when it is empty.
    pub(super) fn range(
        &self,
        capacity: u64,
        zeroes: bool,
        header: &RangeHeader,
    ) -> Result<Option<Range>, Status> {
        let (flags, sectors) = (header.flags.get(), header.sectors.get());
        let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        // 5.2.6.2: unknown flags, and the unmap flag of a discard.
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || unmap && !zeroes {
            return Err(Status::Unsupported);
        }
        let most = if zeroes {
            MAX_WRITE_ZEROES_SECTORS
        } else {
            MAX_DISCARD_SECTORS
        };
        let length = u64::from(sectors).saturating_mul(SECTOR);
        match self.place(capacity, header.sector.get(), length) {
            Some(offset) if sectors <= most => Ok((length > 0).then_some(Range {
                offset,
                length,
                unmap,
            })),
            _ => Err(Status::IoError),
        }
    }

    /// The byte at which `length` bytes begin, if they are whole blocks within the disk.
    fn place(&self, capacity: u64, sector: u64, length: u64) -> Option<u64> {
        // It is a power of two.
        let within_block = u64::from(self.block).wrapping_sub(1);
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(length)?;
        ((length | offset) & within_block == 0 && end <= capacity).then_some(offset)
    }
}

/// Whether the `length` bytes from `offset` on in `segments` are in no more buffers than [`SEG_MAX`].
pub(super) fn few_enough(segments: &[Segment], offset: u32, length: u32) -> bool {
    let most = usize::try_from(SEG_MAX).unwrap_or(usize::MAX);
    if segments.len() <= most {
        return true;
    }
    let end = u64::from(offset).saturating_add(length.into());
    let mut at = 0_u64;
    let overlapping = segments.iter().filter(|segment| {
        let begin = at;
        at = at.saturating_add(segment.length.into());
        begin < end && at > u64::from(offset)
    });
    overlapping.count() <= most
}
