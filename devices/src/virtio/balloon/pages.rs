//! Set of guest pages in the balloon: one bit per page, allocated only while the set is not empty.
//!
//! The number of a page is the driver's number: the guest-physical address divided by
//! [`PAGE`](super::PAGE). The set contains only pages of guest memory, so its size stays between
//! zero and the size of memory.

use std::ops::Range;

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;

use super::config::PAGE_SHIFT;
use crate::state::{StateError, check, message};

const WORD_BITS: u64 = 64;
/// Words in a piece of a saved set: 32,768 pages.
const CHUNK: usize = 512;

/// A set of pages of guest memory.
#[derive(Debug, Default)]
pub(super) struct PageSet {
    regions: Vec<Region>,
    len: u64,
}

#[derive(Debug)]
struct Region {
    pages: Range<u64>,
    /// Empty as long as no page is in the set.
    words: Vec<u64>,
}

impl PageSet {
    /// An empty set for the pages of `memory`.
    pub(super) fn new(memory: &GuestMemory) -> Self {
        let regions = memory
            .iter()
            .map(|region| {
                let start = region.start_addr().0 >> PAGE_SHIFT;
                let count = region.len() >> PAGE_SHIFT;
                Region {
                    pages: start..start.saturating_add(count),
                    words: Vec::new(),
                }
            })
            .collect();
        Self { regions, len: 0 }
    }

    /// How many pages are in it.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The parts of `run` that are guest memory, each in one region.
    pub(super) fn within(&self, run: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        self.regions
            .iter()
            .map(move |region| intersection(&region.pages, run))
            .filter(|part| !part.is_empty())
    }

    /// Adds `run`; gives how many pages of it were not in the set.
    pub(super) fn insert(&mut self, run: &Range<u64>) -> u64 {
        let mut added: u64 = 0;
        for region in &mut self.regions {
            let part = intersection(&region.pages, run);
            if !part.is_empty() {
                region.allocate();
                added = added.saturating_add(region.change(&part, |word, mask| *word |= mask));
            }
        }
        self.len = self.len.saturating_add(added);
        added
    }

    /// Removes `run`; gives how many pages of it were in the set.
    pub(super) fn remove(&mut self, run: &Range<u64>) -> u64 {
        let mut removed: u64 = 0;
        for region in &mut self.regions {
            let part = intersection(&region.pages, run);
            if !part.is_empty() {
                removed = removed.saturating_add(region.change(&part, |word, mask| *word &= !mask));
            }
        }
        self.len = self.len.saturating_sub(removed);
        removed
    }

    /// The pages in it, in pieces of [`CHUNK`] words; those without any are left out.
    pub(super) fn save(&self) -> Vec<message::PageBitmap> {
        let mut pieces = Vec::new();
        for region in &self.regions {
            let mut first = region.pages.start;
            for words in region.words.chunks(CHUNK) {
                let mut bits: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                let length = bits
                    .iter()
                    .rposition(|byte| *byte != 0)
                    .map_or(0, |last| last.saturating_add(1));
                bits.truncate(length);
                if !bits.is_empty() {
                    pieces.push(message::PageBitmap { first, bits });
                }
                first = first.saturating_add((CHUNK as u64).saturating_mul(WORD_BITS));
            }
        }
        pieces
    }

    /// Restores a saved set of pages of `memory`.
    pub(super) fn restored(memory: &GuestMemory, saved: &[message::PageBitmap]) -> Result<Self, StateError> {
        let mut set = Self::new(memory);
        for piece in saved {
            for (at, byte) in (0_u64..).zip(&piece.bits) {
                let mut left = *byte;
                while left != 0 {
                    // A run of ones from the lowest.
                    let start = left.trailing_zeros();
                    let ones = (left >> start).trailing_ones();
                    let run = u8::MAX.checked_shr(8_u32.saturating_sub(ones)).unwrap_or(0) << start;
                    left &= !run;
                    let first = at
                        .checked_mul(8)
                        .and_then(|bit| bit.checked_add(start.into()))
                        .and_then(|bit| bit.checked_add(piece.first));
                    let end = first.and_then(|first| first.checked_add(ones.into()));
                    let (Some(first), Some(end)) = (first, end) else {
                        return Err(StateError::invalid("pages.first", "beyond the address space"));
                    };
                    let added = set.insert(&(first..end));
                    check(
                        added == u64::from(ones),
                        "pages",
                        "pages outside memory, or given twice",
                    )?;
                }
            }
        }
        Ok(set)
    }

    /// Removes all.
    pub(super) fn clear(&mut self) {
        for region in &mut self.regions {
            region.words = Vec::new();
        }
        self.len = 0;
    }
}

impl Region {
    fn allocate(&mut self) {
        if self.words.is_empty() {
            let pages = self.pages.end.saturating_sub(self.pages.start);
            // Zeroes that cost nothing until they are touched.
            self.words = vec![0; usize::try_from(pages.div_ceil(WORD_BITS)).unwrap_or(0)];
        }
    }

    /// Applies `op` to each word with a mask of the bits that `part` has there; gives how many bits changed.
    fn change(&mut self, part: &Range<u64>, op: impl Fn(&mut u64, u64)) -> u64 {
        let mut at = part.start.saturating_sub(self.pages.start);
        let end = part.end.saturating_sub(self.pages.start);
        let mut changed: u64 = 0;
        while at < end {
            let (index, bit) = (at >> WORD_BITS.trailing_zeros(), at & 63);
            let count = end.saturating_sub(at).min(WORD_BITS.saturating_sub(bit));
            let ones = u64::MAX
                .checked_shr(u32::try_from(WORD_BITS.saturating_sub(count)).unwrap_or(0))
                .unwrap_or(0);
            if let Some(word) = usize::try_from(index)
                .ok()
                .and_then(|index| self.words.get_mut(index))
            {
                let before = *word;
                op(word, ones << bit);
                changed = changed.saturating_add((before ^ *word).count_ones().into());
            }
            at = at.saturating_add(count);
        }
        changed
    }
}

fn intersection(left: &Range<u64>, right: &Range<u64>) -> Range<u64> {
    left.start.max(right.start)..left.end.min(right.end)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use vm_memory::GuestAddress;

    use super::*;

    /// Pages 0 to 199 and 300 to 399.
    fn set() -> PageSet {
        let ranges = [(GuestAddress(0), 200 << 12), (GuestAddress(300 << 12), 100 << 12)];
        PageSet::new(&GuestMemory::from_ranges(&ranges).unwrap())
    }

    fn is_memory(page: u64) -> bool {
        page < 200 || (300..400).contains(&page)
    }

    #[test]
    fn a_run_is_cut_to_memory_at_the_edges_of_regions() {
        let set = set();
        let parts = |run: Range<u64>| set.within(&run).collect::<Vec<_>>();
        assert_eq!(parts(0..500), [0..200, 300..400]);
        assert_eq!(parts(190..310), [190..200, 300..310]);
        assert_eq!(parts(200..300), []);
        assert_eq!(
            parts(399..u64::MAX),
            std::iter::once(399..400).collect::<Vec<_>>()
        );
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_pages_of_memory(
            steps in prop::collection::vec((any::<bool>(), 0_u64..420, 0_u64..150), 0..40)
        ) {
            let (mut set, mut model) = (set(), BTreeSet::new());
            for (insert, start, count) in steps {
                let run = start..start + count;
                let pages = run.clone().filter(|page| is_memory(*page));
                let (got, expected) = if insert {
                    (set.insert(&run), pages.filter(|page| model.insert(*page)).count())
                } else {
                    (set.remove(&run), pages.filter(|page| model.remove(page)).count())
                };
                prop_assert_eq!(got, expected as u64);
                prop_assert_eq!(set.len(), model.len() as u64);
            }
            set.clear();
            prop_assert_eq!((set.len(), set.insert(&(0..1000))), (0, 300));
        }
    }
}
