//! Plan of a request that was taken from the ring. The parts of the chain are copied and checked
//! before the operation starts.

use vmm_base::GuestMemory;

use super::request::{HEADER, Header, Limits, Plan, RANGE, Range, RangeHeader, Status, few_enough};
use crate::virtio::chain::Chain;

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
