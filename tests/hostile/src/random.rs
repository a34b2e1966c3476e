//! A small seeded generator (xorshift64*), so that a run can be repeated.

/// Its state.
pub struct Random(u64);

impl Random {
    /// Begins at `seed`, which is not 0.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap_or(0)
    }

    /// A value that is more likely than chance to be one at which comparisons change: 0, all ones, a power of two,
    /// or one off.
    pub fn nasty(&mut self) -> u64 {
        let power = 1u64 << (self.next() % 64);
        match self.next() % 6 {
            0 => 0,
            1 => u64::MAX,
            2 => power,
            3 => power - 1,
            4 => power.wrapping_add(1),
            _ => self.next(),
        }
    }
}
