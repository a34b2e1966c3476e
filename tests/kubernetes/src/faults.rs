//! Random selection of the programs to kill. The same seed yields the same choices, but not the
//! same times.
//!
//! `VMMD_KUBERNETES_ROUNDS` is the number of rounds, `VMMD_KUBERNETES_SEED` the seed (1).

use std::env;

/// The number of rounds.
pub fn rounds(default: u64) -> u64 {
    number("VMMD_KUBERNETES_ROUNDS", default)
}

/// The seed.
pub fn seed() -> u64 {
    number("VMMD_KUBERNETES_SEED", 1)
}

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |value| value.parse().unwrap())
}

/// Xorshift, 64 bits.
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number from 0 up to `end`, which is not among them.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % end
    }
}

/// A program that is killed, of two where there are two.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The agent of a node.
    Agent(usize),
    /// A controller.
    Controller(usize),
    /// The vmmd of a node.
    Daemon(usize),
    /// One vmm of a node.
    Vmm(usize),
    /// The API server.
    ApiServer,
    /// The API server's store.
    Etcd,
}

impl Fault {
    /// How many kinds there are.
    const KINDS: usize = 6;

    /// Any of them.
    pub fn any(random: &mut Random) -> Self {
        let one = random.below(2);
        Self::of_kind(random.below(Self::KINDS), one)
    }

    fn of_kind(kind: usize, one: usize) -> Self {
        match kind {
            0 => Self::Agent(one),
            1 => Self::Controller(one),
            2 => Self::Daemon(one),
            3 => Self::Vmm(one),
            4 => Self::ApiServer,
            _ => Self::Etcd,
        }
    }

    /// The name of its kind.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Agent(_) => "agent",
            Self::Controller(_) => "controller",
            Self::Daemon(_) => "vmmd",
            Self::Vmm(_) => "vmm",
            Self::ApiServer => "API server",
            Self::Etcd => "etcd",
        }
    }

    /// This one, and each third time one of another kind at the same moment.
    pub fn and_another(self, random: &mut Random) -> Vec<Self> {
        let mut faults = vec![self];
        if random.below(3) == 0 {
            let second = Self::any(random);
            if self.kind() != second.kind() {
                faults.push(second);
            }
        }
        faults
    }
}

/// Kinds of faults in such an order that each comes once before any comes again.
#[derive(Default)]
pub struct Deck(Vec<usize>);

impl Deck {
    /// The next one.
    pub fn deal(&mut self, random: &mut Random) -> Fault {
        if self.0.is_empty() {
            self.0.extend(0..Fault::KINDS);
        }
        let kind = self.0.swap_remove(random.below(self.0.len()));
        Fault::of_kind(kind, random.below(2))
    }
}
