//! Tracks the blocks of a disk that the guest changes while the disk is being copied.
//!
//! Invariant: a copy contains every change that was completed to the driver. The writer marks a
//! block after the change and before the completion to the driver. The copier clears the mark first
//! and then reads the block. A change that the read misses is therefore marked after the mark was
//! cleared, and the block is copied again.

use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::content::{BLOCK, PIECE};

/// Most blocks of a disk: the marks take 4 MiB.
const MAX_BLOCKS: u64 = 1 << 25;

/// Blocks in a word.
const WORD_BITS: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct Changes {
    /// Bytes in a block (log2).
    shift: u32,
    capacity: u64,
    /// A bit for each block.
    words: Box<[AtomicU64]>,
    /// Something behind the end was changed: the disk has grown.
    grown: AtomicBool,
}

impl Changes {
    /// Creates a tracker for a disk of `capacity` bytes, without marked blocks.
    pub fn new(capacity: u64) -> Self {
        let most = capacity.div_ceil(MAX_BLOCKS).max(BLOCK);
        let shift = most.checked_next_power_of_two().map_or(63, u64::trailing_zeros);
        let blocks = capacity.checked_shr(shift).unwrap_or(0).saturating_add(1);
        let words = blocks.div_ceil(WORD_BITS);
        Self {
            shift,
            capacity,
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            grown: AtomicBool::new(false),
        }
    }

    /// Bytes in a block.
    pub fn block(&self) -> u64 {
        1_u64.checked_shl(self.shift).unwrap_or(u64::MAX)
    }

    /// Marks the blocks of a range as changed.
    pub fn mark(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        if length == 0 {
            return;
        }
        if end > self.capacity {
            self.grown.store(true, Ordering::Release);
        }
        let first = offset.checked_shr(self.shift).unwrap_or(0);
        let last = end.saturating_sub(1).checked_shr(self.shift).unwrap_or(0);
        let word = |block: u64| block / WORD_BITS;
        for index in word(first)..=word(last) {
            let Some(bits) = usize::try_from(index).ok().and_then(|at| self.words.get(at)) else {
                return;
            };
            let begin = index.saturating_mul(WORD_BITS);
            let low = first.saturating_sub(begin);
            let high = last.saturating_sub(begin).min(63);
            bits.fetch_or(ones(low, high), Ordering::SeqCst);
        }
    }

    /// Bytes in marked blocks.
    pub fn bytes(&self) -> u64 {
        let marked = self
            .words
            .iter()
            .map(|bits| u64::from(bits.load(Ordering::Relaxed).count_ones()));
        marked
            .sum::<u64>()
            .saturating_mul(self.block())
            .min(self.capacity)
    }

    /// Takes the marks away of the first marked blocks that lie side by side at `offset` or behind it, at most a [`PIECE`] (or one block), and says
    /// where these are. An error when the disk has grown.
    pub fn take(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        if self.grown.load(Ordering::Acquire) {
            return Err(io::Error::other("the disk has become larger while it was copied"));
        }
        let per_piece = PIECE.checked_shr(self.shift).unwrap_or(0).max(1);
        let from = offset.checked_shr(self.shift).unwrap_or(0);
        let mut index = usize::try_from(from / WORD_BITS).unwrap_or(usize::MAX);
        let mut skip = from % WORD_BITS;
        while let Some(bits) = self.words.get(index) {
            let seen = bits.load(Ordering::Relaxed) & ones(skip, 63);
            if seen != 0 {
                let low = u64::from(seen.trailing_zeros());
                let run = u64::from(
                    seen.checked_shr(seen.trailing_zeros())
                        .unwrap_or(0)
                        .trailing_ones(),
                );
                let run = run.min(per_piece);
                let high = low.saturating_add(run).saturating_sub(1);
                bits.fetch_and(!ones(low, high), Ordering::SeqCst);
                let first = (index as u64)
                    .saturating_mul(u64::BITS.into())
                    .saturating_add(low);
                let start = first.saturating_mul(self.block());
                let end = first
                    .saturating_add(run)
                    .saturating_mul(self.block())
                    .min(self.capacity);
                if start < end {
                    return Ok(Some(start..end));
                }
            } else {
                index = index.saturating_add(1);
                skip = 0;
            }
        }
        Ok(None)
    }
}

/// The bits from `low` to `high`, both of a word.
fn ones(low: u64, high: u64) -> u64 {
    let up = u64::MAX
        .checked_shl(u32::try_from(low).unwrap_or(u32::MAX))
        .unwrap_or(0);
    let unused = u32::try_from(63_u64.saturating_sub(high)).unwrap_or(u32::MAX);
    up & u64::MAX.checked_shr(unused).unwrap_or(0)
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn taken(changes: &Changes) -> Vec<Range<u64>> {
        let (mut from, mut all) = (0, Vec::new());
        while let Some(range) = changes.take(from).unwrap() {
            from = range.end;
            all.push(range);
        }
        all
    }

    #[test]
    fn what_was_changed_is_taken_once_as_whole_blocks() {
        let changes = Changes::new(1 << 20);
        changes.mark(5000, 1);
        changes.mark(4095, 2);
        changes.mark(300 * 512, 512);
        assert_eq!(changes.bytes(), 3 * 4096);
        assert_eq!(taken(&changes), [0..8192, 153_600 - 2048..155_648]);
        assert_eq!((taken(&changes), changes.bytes()), (vec![], 0));
    }

    #[test]
    fn the_last_block_ends_with_the_disk_and_pieces_are_bounded() {
        let changes = Changes::new((3 << 20) + 512);
        changes.mark(0, (3 << 20) + 512);
        let ranges = taken(&changes);
        assert!(
            ranges.iter().all(|range| range.end - range.start <= PIECE),
            "{ranges:?}"
        );
        assert_eq!(
            ranges.iter().map(|range| range.end - range.start).sum::<u64>(),
            (3 << 20) + 512
        );
        assert_eq!(ranges.last().unwrap().end, (3 << 20) + 512);
    }

    #[test]
    fn a_large_disk_has_larger_blocks_and_no_more_marks() {
        let changes = Changes::new(64 << 40);
        assert_eq!(changes.block(), 2 << 20);
        assert!(changes.words.len() <= (1 << 19) + 1);
        changes.mark((64 << 40) - 512, 512);
        let last = (64 << 40) - (2 << 20)..64 << 40;
        assert_eq!(taken(&changes), vec![last]);
    }

    #[test]
    fn a_disk_that_has_grown_is_not_copied_on() {
        let changes = Changes::new(8192);
        changes.mark(4096, 4096);
        assert!(changes.take(0).unwrap().is_some());
        changes.mark(8192, 512);
        assert!(changes.take(0).unwrap_err().to_string().contains("larger"));
    }

    proptest! {
        #[test]
        fn marks_are_those_of_a_set(writes in proptest::collection::vec((0..2_000_u64, 0..300_u64), 0..20)) {
            let changes = Changes::new(2_300 * 512);
            let mut blocks = BTreeSet::new();
            for (sector, sectors) in writes {
                changes.mark(sector * 512, sectors * 512);
                blocks.extend((sector..sector + sectors).map(|sector| sector / 8));
            }
            let ranges = taken(&changes);
            let found: BTreeSet<_> = ranges
                .into_iter()
                .flat_map(|range| range.start / 4096..range.end.div_ceil(4096))
                .collect();
            prop_assert_eq!(found, blocks);
        }
    }
}
