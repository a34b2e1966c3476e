//! Bulk removal and addition of clusters: discards, zeroes, growth.

use std::{io, sync::atomic::Ordering};

use imago::{Mapping, ShallowMapping, format::PreallocateMode};

use super::{super::layer, Disk, advance, bytes, exclusive, shared};

/// Zeroes are written in pieces of at most this size, which is that of [`ZERO_BUFFER`].
const ZEROES: u64 = 1 << 20;

/// Source of written zeroes. The buffer is in no file and is only read, so it takes page tables and
/// no memory of its own.
static ZERO_BUFFER: [u8; 1 << 20] = [0; 1 << 20];

/// How clusters are cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clear {
    /// They may read as anything.
    Discard,
    /// They are to read as zeroes, and their space is given back.
    Unmap,
    /// They are to read as zeroes, and keep their space.
    Zero,
}

impl Disk {
    /// Gives the space of whole clusters in this range back.
    pub(in crate::qcow2) fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check_change(offset, length)?;
        if self.below.is_some() && !self.zero_clusters {
            // The data of the image below would become visible instead.
            return Ok(());
        }
        let (start, end) = self.whole_clusters(offset, length);
        self.clear(start, end, Clear::Discard)
    }

    /// Makes a range read as zeroes.
    pub(in crate::qcow2) fn write_zeroes(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        self.check_change(offset, length)?;
        let end = offset.saturating_add(length);
        let (first, last) = self.whole_clusters(offset, length);
        if first >= last || !self.zero_clusters {
            return self.put_zeroes(offset, end);
        }
        self.put_zeroes(offset, first)?;
        self.put_zeroes(last, end)?;
        let how = if unmap { Clear::Unmap } else { Clear::Zero };
        self.clear(first, last, how)
    }

    /// The whole clusters in a range, as offsets; what ends with the disk ends with a cluster.
    fn whole_clusters(&self, offset: u64, length: u64) -> (u64, u64) {
        let end = offset.saturating_add(length);
        let start = offset.checked_next_multiple_of(self.cluster).unwrap_or(end);
        if end == self.capacity() {
            return (start, end);
        }
        (
            start,
            end.saturating_sub(end.checked_rem(self.cluster).unwrap_or(0)),
        )
    }

    /// Writes zeroes from `offset` to `end`, where there is anything else.
    fn put_zeroes(&self, offset: u64, end: u64) -> io::Result<()> {
        let _range = self.ranges.enter(offset..end)?;
        let access = shared(&self.access);
        let mut offset = offset;
        while offset < end {
            let tables = shared(&self.tables);
            let (mapping, run) = access.get_mapping(offset, end.saturating_sub(offset).min(ZEROES))?;
            let zero = matches!(mapping, Mapping::Zero { .. });
            drop(tables);
            if !zero {
                self.put(&access, offset, run, &mut |medium, at, length| {
                    medium.write_at(ZERO_BUFFER.get(..bytes(length)).unwrap_or_default(), at)
                })?;
            }
            offset = advance(offset, run)?;
        }
        Ok(())
    }

    /// Clears whole clusters from `start` to `end`, where there is anything to clear.
    fn clear(&self, start: u64, end: u64, how: Clear) -> io::Result<()> {
        if start >= end {
            return Ok(());
        }
        let _alone = self.ranges.clear(start..end)?;
        let access = shared(&self.access);
        let mut offset = start;
        while offset < end {
            let _turn = self.turns.take(self.l2_table(offset));
            let mut tables = exclusive(&self.tables);
            let (mapping, run) = access.get_shallow_mapping(offset, end.saturating_sub(offset))?;
            // The range has no entry in an L2 table of this file; the table may not exist either.
            let unallocated = matches!(
                mapping,
                ShallowMapping::Zero { explicit: false, .. } | ShallowMapping::Indirect { .. }
            );
            let nothing = match mapping {
                ShallowMapping::Zero { explicit: false, .. } => true,
                ShallowMapping::Zero { explicit: true, .. } => how == Clear::Zero,
                ShallowMapping::Indirect { .. } => how == Clear::Discard,
                _ => false,
            };
            if !nothing {
                if unallocated {
                    self.commit_before_allocation(&access, &mut tables)?;
                } else if tables.allocated {
                    self.commit_tables(&access, &mut tables)?;
                }
                self.uncommitted.store(true, Ordering::Release);
                tables.given_up = true;
                // Where there is no L2 table yet, one is made.
                tables.allocated |= unallocated;
                match how {
                    Clear::Discard if self.below.is_none() => layer::unmap(&access, offset, run)?,
                    Clear::Discard | Clear::Unmap => layer::unmap_to_zero(&access, offset, run)?,
                    Clear::Zero => access.write_zeroes(offset, run)?,
                }
            }
            offset = advance(offset, run)?;
        }
        Ok(())
    }

    /// Makes the disk larger; on return that is stable.
    pub(in crate::qcow2) fn grow(&self, capacity: u64) -> io::Result<()> {
        self.check_change(0, 0)?;
        let before = self.capacity();
        {
            let access = exclusive(&self.access);
            let mut tables = exclusive(&self.tables);
            self.commit_before_allocation(&access, &mut tables)?;
            self.uncommitted.store(true, Ordering::Release);
            tables.given_up = true;
            access.resize_grow(capacity, PreallocateMode::None)?;
            self.commit_tables(&access, &mut tables)?;
        }
        // Data of the image below beyond the old end must stay invisible.
        let appears = self.below.unwrap_or(0).min(capacity);
        if appears > before {
            let first = before.checked_next_multiple_of(self.cluster).unwrap_or(appears);
            self.put_zeroes(before, first.min(appears))?;
            if self.zero_clusters {
                let last = appears.checked_next_multiple_of(self.cluster).unwrap_or(appears);
                self.clear(first, last.min(capacity), Clear::Unmap)?;
            } else {
                self.put_zeroes(first, appears)?;
            }
            self.flush()?;
        }
        self.capacity.store(capacity, Ordering::Release);
        Ok(())
    }
}
