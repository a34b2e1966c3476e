//! What a driver asks for, and whether it may be done (virtio 1.3, 5.2.6).

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U32, U64},
};

use crate::block::SECTOR;

/// Length of [`Header`] in bytes.
pub(super) const HEADER: u32 = 16;

/// Length of the disk's identification (5.2.6.1).
pub(super) const ID_LENGTH: usize = 20;

/// The device-readable head of each request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes)]
#[repr(C)]
pub(super) struct Header {
    pub kind: U32,
    pub reserved: U32,
    /// In units of 512 bytes.
    pub sector: U64,
}

/// Answers (5.2.6).
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

/// What is to be done for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Read `length` bytes into the writable part's beginning.
    Read { offset: u64, length: u32 },
    /// Write the `length` bytes behind the header.
    Write { offset: u64, length: u32 },
    /// Make all writes so far stable.
    Flush,
    /// Give the first `length` bytes of the identification.
    Identify { length: u32 },
    /// Nothing: that is the answer.
    Answer(Status),
}

/// What a disk allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// In bytes.
    pub capacity: u64,
    pub read_only: bool,
}

impl Limits {
    /// Decides on a request with that header, `outgoing` bytes behind it and `incoming` bytes before the status.
    pub(super) fn plan(&self, header: &Header, outgoing: u32, incoming: u32) -> Plan {
        match header.kind.get() {
            VIRTIO_BLK_T_IN => match self.range(header, incoming) {
                Some(offset) => Plan::Read {
                    offset,
                    length: incoming,
                },
                None => Plan::Answer(Status::IoError),
            },
            VIRTIO_BLK_T_OUT => match self.range(header, outgoing) {
                Some(offset) if !self.read_only => Plan::Write {
                    offset,
                    length: outgoing,
                },
                _ => Plan::Answer(Status::IoError),
            },
            VIRTIO_BLK_T_FLUSH => Plan::Flush,
            VIRTIO_BLK_T_GET_ID => {
                let length = u32::try_from(ID_LENGTH).unwrap_or(u32::MAX);
                Plan::Identify {
                    length: incoming.min(length),
                }
            }
            _ => Plan::Answer(Status::Unsupported),
        }
    }

    /// The byte at which `length` bytes begin, if they are whole sectors within the disk.
    fn range(&self, header: &Header, length: u32) -> Option<u64> {
        let length = u64::from(length);
        let offset = header.sector.get().checked_mul(SECTOR)?;
        let end = offset.checked_add(length)?;
        (length.is_multiple_of(SECTOR) && end <= self.capacity).then_some(offset)
    }
}
