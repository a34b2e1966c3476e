//! Refcounts as they lie in a refcount block (QEMU's `docs/interop/qcow2.rst`, "Refcount table and blocks").

use std::ops::Range;

/// How refcounts of one width are packed. Widths of a byte and more are big-endian; of narrower ones the first is in
/// the lowest bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    order: u32,
}

impl Width {
    /// `order` is log2 of the bits of a refcount, at most 6.
    pub fn new(order: u32) -> Self {
        Self { order: order.min(6) }
    }

    /// Refcounts in so many bytes.
    pub fn count(self, bytes: usize) -> usize {
        (bytes.saturating_mul(8)) >> self.order
    }

    /// The largest refcount.
    pub fn max(self) -> u64 {
        u64::MAX >> (64_u32.saturating_sub(1 << self.order))
    }

    fn bytes(self, index: usize) -> Range<usize> {
        let size = 1_usize << self.order.saturating_sub(3);
        let start = index.saturating_mul(size);
        start..start.saturating_add(size)
    }

    /// Byte, and shift in it, of a refcount narrower than a byte.
    fn bits(self, index: usize) -> (usize, u32) {
        let bit = index << self.order;
        (bit / 8, u32::try_from(bit % 8).unwrap_or(0))
    }

    /// The refcount with this index in `block`; 0 outside of it.
    pub fn get(self, block: &[u8], index: usize) -> u64 {
        if self.order < 3 {
            let (byte, shift) = self.bits(index);
            let byte = block.get(byte).copied().unwrap_or(0);
            return (u64::from(byte) >> shift) & self.max();
        }
        let bytes = block.get(self.bytes(index)).unwrap_or_default();
        bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// Sets the refcount with this index in `block`, to as much as its width can hold.
    pub fn set(self, block: &mut [u8], index: usize, value: u64) {
        let value = value.min(self.max());
        if self.order < 3 {
            let (byte, shift) = self.bits(index);
            let mask = (self.max() << shift).to_le_bytes()[0];
            if let Some(byte) = block.get_mut(byte) {
                *byte = (*byte & !mask) | (value << shift).to_le_bytes()[0];
            }
            return;
        }
        let bytes = block.get_mut(self.bytes(index)).unwrap_or_default();
        for (place, byte) in bytes.iter_mut().rev().zip(value.to_le_bytes()) {
            *place = byte;
        }
    }

    /// Raises each refcount in `block` to at least that in `other`.
    pub fn raise(self, block: &mut [u8], other: &[u8]) {
        for index in 0..self.count(block.len()) {
            let value = self.get(other, index);
            if value > self.get(block, index) {
                self.set(block, index, value);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_refcount_is_read_back_and_its_neighbours_stay(order in 0_u32..=6, seed in any::<[u8; 64]>(), index in 0_usize..512, value: u64) {
            let width = Width::new(order);
            let index = index % width.count(64);
            let mut block = seed;
            let value = value & width.max();
            width.set(&mut block, index, value);
            for other in 0..width.count(64) {
                let expected = if other == index { value } else { width.get(&seed, other) };
                prop_assert_eq!(width.get(&block, other), expected);
            }
        }

        #[test]
        fn raising_gives_the_larger_of_each(order in 0_u32..=6, a in any::<[u8; 32]>(), b in any::<[u8; 32]>()) {
            let width = Width::new(order);
            let mut raised = a;
            width.raise(&mut raised, &b);
            for index in 0..width.count(32) {
                prop_assert_eq!(width.get(&raised, index), width.get(&a, index).max(width.get(&b, index)));
            }
        }
    }

    #[test]
    fn wide_refcounts_are_big_endian_and_narrow_ones_begin_at_the_lowest_bits() {
        assert_eq!(Width::new(4).get(&[0, 1, 2, 3], 1), 0x203);
        assert_eq!(Width::new(2).get(&[0x21], 0), 1);
        assert_eq!(Width::new(0).get(&[0b100], 2), 1);
        assert_eq!(Width::new(6).max(), u64::MAX);
    }
}
