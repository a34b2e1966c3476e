//! Parser of a driver's buffers: lists of page numbers, reported ranges, statistics (virtio 1.3,
//! 5.5.6).
//!
//! Each buffer is copied once and checked in the copy.

use std::{collections::BTreeMap, ops::Range};

use vmm_base::{
    GuestMemory,
    ram::{Segment, TooShort},
};

use super::config::{PAGE, PAGE_SHIFT};
use crate::virtio::chain::Chain;

/// Bytes in a page number (le32).
pub(super) const NUMBER: u32 = 4;
/// Most page numbers that are copied at once.
pub(super) const NUMBERS: usize = 1024;
/// Bytes in a statistic: a tag (le16) and its value (le64), packed.
const STATISTIC: usize = 10;
/// Most statistics that are read of one buffer; the specification knows 16.
const STATISTICS: usize = 64;

/// Copies the page numbers from byte `offset` of the readable part on, at most [`NUMBERS`], into `numbers`.
pub(super) fn read_numbers(
    chain: &Chain,
    memory: &GuestMemory,
    offset: u32,
    numbers: &mut Vec<u32>,
) -> Result<(), TooShort> {
    let mut bytes = [0; NUMBERS * NUMBER as usize];
    let left = chain.readable_len().saturating_sub(offset) as usize;
    let count = left.min(bytes.len());
    let bytes = bytes.get_mut(..count).ok_or(TooShort)?;
    chain.read(memory, offset, bytes)?;
    numbers.clear();
    numbers.extend(
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|number| u32::from_le_bytes(*number)),
    );
    Ok(())
}

/// The numbers as runs of neighbours, in order, without duplicates.
pub(super) fn runs(numbers: &mut [u32]) -> impl Iterator<Item = Range<u64>> {
    numbers.sort_unstable();
    let mut numbers = numbers.iter().map(|number| u64::from(*number)).peekable();
    std::iter::from_fn(move || {
        let start = numbers.next()?;
        let mut end = start.saturating_add(1);
        while let Some(next) = numbers.next_if(|next| *next <= end) {
            end = next.saturating_add(1);
        }
        Some(start..end)
    })
}

/// The whole pages in a reported buffer.
pub(super) fn pages_of(segment: &Segment) -> Range<u64> {
    let end = segment.address.0.saturating_add(segment.length.into());
    let first = segment.address.0.div_ceil(PAGE);
    first..(end >> PAGE_SHIFT).max(first)
}

/// Returns the statistics in the readable part, by tag (5.5.6.3). Unknown tags are kept. An
/// incomplete statistic at the end is dropped.
pub(super) fn statistics(chain: &Chain, memory: &GuestMemory) -> BTreeMap<u16, u64> {
    let mut bytes = [0; STATISTICS * STATISTIC];
    let length = bytes.len().min(chain.readable_len() as usize);
    let mut found = BTreeMap::new();
    let Some(bytes) = bytes.get_mut(..length) else {
        return found;
    };
    if chain.read(memory, 0, bytes).is_err() {
        return found;
    }
    for entry in bytes.as_chunks::<STATISTIC>().0 {
        let [t0, t1, value @ ..] = *entry;
        found.insert(u16::from_le_bytes([t0, t1]), u64::from_le_bytes(value));
    }
    found
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::GuestAddress;

    use super::*;

    #[test]
    fn neighbours_become_one_run_whatever_their_order() {
        let of = |numbers: &[u32]| runs(&mut numbers.to_vec()).collect::<Vec<_>>();
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[5, 3, 4, 9, 3]), [3..6, 9..10]);
        assert_eq!(
            of(&[u32::MAX, u32::MAX - 1]),
            std::iter::once(0xffff_fffe..0x1_0000_0000).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_reported_buffer_gives_the_pages_that_lie_wholly_in_it() {
        for (address, length, pages) in [
            (0, 4096, 0..1),
            (4096, 8192, 1..3),
            (1, 4096, 1..1),
            (1, 8191, 1..2),
            (4095, 4098, 1..2),
            (0, 1, 0..0),
            (100, 1, 1..1),
        ] {
            let segment = Segment {
                address: GuestAddress(address),
                length,
            };
            assert_eq!(pages_of(&segment), pages, "{address} {length}");
        }
    }

    proptest! {
        #[test]
        fn runs_hold_the_same_pages_and_never_touch(numbers in prop::collection::vec(0_u32..300, 0..200)) {
            let runs: Vec<_> = runs(&mut numbers.clone()).collect();
            prop_assert!(runs.windows(2).all(|pair| matches!(pair, [left, right] if left.end < right.start)));
            let mut expected: Vec<u64> = numbers.into_iter().map(u64::from).collect();
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(runs.into_iter().flatten().collect::<Vec<_>>(), expected);
        }
    }
}
