//! Parser of a driver's request, the check whether the disk permits it (virtio 1.3, 5.2.6), and its plan. The parts of
//! the chain are copied and checked before the operation starts.

use block::SECTOR;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vmm_base::{GuestMemory, ram::Segment};
use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U32, U64},
};

use super::plan::{Limits, Plan, Range, Status};
use crate::virtio::chain::Chain;

/// Length of [`Header`] in bytes.
pub(super) const HEADER: u32 = 16;

/// Length of the disk's identification (5.2.6.1).
pub(super) const ID_LENGTH: usize = 20;

/// Length of [`RangeHeader`] in bytes.
const RANGE: u32 = 16;

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
struct Header {
    pub kind: U32,
    pub reserved: U32,
    /// In units of 512 bytes.
    pub sector: U64,
}

/// `struct virtio_blk_discard_write_zeroes`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes)]
#[repr(C)]
struct RangeHeader {
    pub sector: U64,
    pub sectors: U32,
    pub flags: U32,
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

impl Limits {
    /// Decides on a request with that header, `outgoing` bytes behind it and `incoming` bytes before the status, on a
    /// disk of `capacity` bytes.
    fn plan(&self, capacity: u64, header: &Header, outgoing: u32, incoming: u32) -> Plan {
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
    fn range(&self, capacity: u64, zeroes: bool, header: &RangeHeader) -> Result<Option<Range>, Status> {
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
}

/// Whether the `length` bytes from `offset` on in `segments` are in no more buffers than [`SEG_MAX`].
fn few_enough(segments: &[Segment], offset: u32, length: u32) -> bool {
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

/// Features that the driver accepted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Negotiated {
    /// Without a negotiated flush the cache is write-through (5.2.6.2): each write, and each range that is discarded or zeroed, is
    /// stable when its request completes.
    pub stable_writes: bool,
    pub discard: bool,
    pub write_zeroes: bool,
}

/// Request with its plan and its progress.
#[derive(Debug)]
pub(super) struct Work {
    pub chain: Chain,
    pub plan: Plan,
    /// Ranges of a discard or write-zeroes request; the engine processes them one after the other.
    pub ranges: Vec<Range>,
    /// The one being done; behind the last one, what makes them stable.
    pub range: usize,
    /// When it was taken, in nanoseconds by its worker's clock.
    pub since: u64,
    /// It is counted as unsettled.
    pub unsettled: bool,
}

impl Work {
    /// None yet.
    pub(super) fn empty() -> Self {
        Self {
            chain: Chain::new(),
            plan: Plan::Flush,
            ranges: Vec::new(),
            range: 0,
            since: 0,
            unsettled: false,
        }
    }

    /// Offset and length, in bytes, of the part of the disk that the engine's current call for this
    /// request changes.
    pub(super) fn changes(&self) -> Option<(u64, u64)> {
        match self.plan {
            Plan::Write { offset, length } => Some((offset, length.into())),
            Plan::Discard { .. } | Plan::WriteZeroes { .. } => {
                let range = self.ranges.get(self.range)?;
                Some((range.offset, range.length))
            }
            _ => None,
        }
    }

    /// Whether all its ranges are done, and have to be made stable.
    pub(super) fn settles(&self, negotiated: Negotiated) -> bool {
        let count = self.ranges.len();
        negotiated.stable_writes && count > 0 && self.range == count
    }

    /// Whether the engine has more to do for its ranges.
    pub(super) fn goes_on(&self, negotiated: Negotiated) -> bool {
        self.range < self.ranges.len() || self.settles(negotiated)
    }

    /// Plans the request in the chain, on a disk of `capacity` bytes; false when it has no place for the status.
    pub(super) fn plan(
        &mut self,
        limits: &Limits,
        negotiated: Negotiated,
        capacity: u64,
        memory: &GuestMemory,
    ) -> bool {
        self.ranges.clear();
        self.range = 0;
        self.unsettled = false;
        let Some(incoming) = self.chain.writable_len().checked_sub(1) else {
            return false;
        };
        self.plan = match self.planned(limits, negotiated, capacity, incoming, memory) {
            Ok(plan) => plan,
            Err(status) => Plan::Complete(status),
        };
        true
    }

    fn planned(
        &mut self,
        limits: &Limits,
        negotiated: Negotiated,
        capacity: u64,
        incoming: u32,
        memory: &GuestMemory,
    ) -> Result<Plan, Status> {
        let chain = &self.chain;
        let header: Header = chain
            .read_front(memory)
            .map(|front| zerocopy::transmute!(front))
            .map_err(|_| Status::IoError)?;
        let outgoing = chain.readable_len().checked_sub(HEADER).ok_or(Status::IoError)?;
        let plan = limits.plan(capacity, &header, outgoing, incoming);
        let accepted = match plan {
            Plan::Read { length, .. } => few_enough(chain.writable(), 0, length),
            Plan::Write { length, .. } => few_enough(chain.readable(), HEADER, length),
            Plan::Discard { .. } if !negotiated.discard => return Err(Status::Unsupported),
            Plan::WriteZeroes { .. } if !negotiated.write_zeroes => return Err(Status::Unsupported),
            _ => true,
        };
        if !accepted {
            return Err(Status::IoError);
        }
        let (zeroes, length) = match plan {
            Plan::Discard { ranges } => (false, ranges),
            Plan::WriteZeroes { ranges } => (true, ranges),
            _ => return Ok(plan),
        };
        read_ranges(chain, memory, length, &mut self.ranges, |range| {
            limits.range(capacity, zeroes, range)
        })?;
        Ok(if self.ranges.is_empty() {
            Plan::Complete(Status::Ok)
        } else {
            plan
        })
    }
}

/// Reads the `length` bytes of ranges behind the header.
fn read_ranges(
    chain: &Chain,
    memory: &GuestMemory,
    length: u32,
    ranges: &mut Vec<Range>,
    check: impl Fn(&RangeHeader) -> Result<Option<Range>, Status>,
) -> Result<(), Status> {
    let mut at = HEADER;
    let end = HEADER.saturating_add(length);
    while at < end {
        let range = chain
            .read_obj::<RangeHeader>(memory, at)
            .map_err(|_| Status::IoError)?;
        ranges.extend(check(&range)?);
        at = at.saturating_add(RANGE);
    }
    Ok(())
}
