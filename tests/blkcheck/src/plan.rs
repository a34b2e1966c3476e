//! Operations of each thread, and the resulting sector contents.
//!
//! Each thread owns parts of the disk, so that the order of its operations determines the contents
//! of these parts. In the lower half, each thread owns one large run of sectors. In the upper half,
//! the owners alternate every 35 sectors, so that threads share 4 KiB blocks.

/// The most threads that a round may have.
pub const MOST_THREADS: u64 = 64;
/// Bytes of a sector.
pub const SECTOR: usize = 512;
/// Sectors of a thread's share of each stripe in the upper half; odd, so that its ends are in the middle of blocks.
const SHARE: u64 = 35;
/// The longest operation in the lower half, in sectors.
const LONGEST: u64 = 256;
const MAGIC: u64 = 0x6b63_6568_636b_6c62;

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Kind of an operation on a run of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Filled with the operation's content.
    Write,
    /// Zeroed; the space may be given back.
    Unmap,
    /// Zeroed; the space stays.
    Zero,
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Unique id on this disk in all rounds; never 0.
    pub id: u64,
    /// What is done.
    pub kind: Kind,
    /// First sector.
    pub start: u64,
    /// Number of sectors, at least 1.
    pub count: u64,
    /// Whether the thread flushes after it.
    pub flush: bool,
}

impl Operation {
    /// Content of its sectors afterwards: its id, or 0 for zeroes.
    pub fn content(&self) -> u64 {
        match self.kind {
            Kind::Write => self.id,
            Kind::Unmap | Kind::Zero => 0,
        }
    }
}

/// The operations of one of a round's `threads` on a disk of `sectors` sectors, without end.
pub fn operations(round: u32, thread: u64, threads: u64, sectors: u64) -> impl Iterator<Item = Operation> {
    let mut random = Random::new(u64::from(round) << 8 | thread);
    let half = sectors / 2;
    (1..).map(move |number: u64| {
        let (start, count) = if random.below(2) == 0 {
            let run = half / threads;
            let count = 1 + random.below(LONGEST.min(run));
            (thread * run + random.below(run - count + 1), count)
        } else {
            let stripe = random.below((sectors - half) / (SHARE * threads));
            let count = 1 + random.below(SHARE);
            let within = random.below(SHARE - count + 1);
            (half + stripe * SHARE * threads + thread * SHARE + within, count)
        };
        Operation {
            id: u64::from(round) << 40 | thread << 32 | number,
            kind: match random.below(16) {
                0 => Kind::Unmap,
                1 => Kind::Zero,
                _ => Kind::Write,
            },
            start,
            count,
            flush: random.below(4) == 0,
        }
    })
}

/// Fills `buffer`, one sector, with the content `id` for the place `sector`: 0 is zeroes.
pub fn fill(buffer: &mut [u8], id: u64, sector: u64) {
    if id == 0 {
        buffer.fill(0);
        return;
    }
    let mut random = Random::new(id ^ sector.rotate_left(40));
    for (index, word) in buffer.chunks_exact_mut(8).enumerate() {
        let value = match index {
            0 => MAGIC,
            1 => id,
            2 => sector,
            _ => random.next(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Returns the id of a sector's content if the whole sector matches [`fill`] for this id.
pub fn identify(buffer: &[u8], sector: u64) -> Option<u64> {
    let id = match buffer.get(8..16).and_then(|word| word.try_into().ok()) {
        Some(word) => u64::from_le_bytes(word),
        None => return None,
    };
    let mut expected = [0; SECTOR];
    fill(&mut expected, id, sector);
    (expected == buffer).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTORS: u64 = 64 << 11;

    #[test]
    fn threads_never_touch_each_others_sectors_and_stay_on_the_disk() {
        for threads in [1, 4, 32, MOST_THREADS] {
            let mut owner = vec![None; usize::try_from(SECTORS).expect("small")];
            for thread in 0..threads {
                for operation in operations(3, thread, threads, SECTORS).take(2_000) {
                    for sector in operation.start..operation.start + operation.count {
                        let owner = &mut owner[usize::try_from(sector).expect("small")];
                        assert!(owner.is_none_or(|other| other == thread), "{operation:?}");
                        *owner = Some(thread);
                    }
                }
            }
        }
    }

    #[test]
    fn plan_depends_on_round_and_thread_alone() {
        let plan = |round, thread| operations(round, thread, 4, SECTORS).take(50).collect::<Vec<_>>();
        assert_eq!(plan(1, 2), plan(1, 2));
        assert_ne!(plan(1, 2), plan(2, 2));
        assert_ne!(plan(1, 2), plan(1, 3));
        let kinds: Vec<Kind> = plan(1, 2).iter().map(|operation| operation.kind).collect();
        assert!(
            [Kind::Write, Kind::Unmap, Kind::Zero]
                .iter()
                .all(|kind| kinds.contains(kind))
        );
    }

    #[test]
    fn a_sector_is_known_only_whole_and_in_its_place() {
        let mut sector = [0; SECTOR];
        assert_eq!(identify(&sector, 7), Some(0));
        fill(&mut sector, 0x1234, 7);
        assert_eq!(identify(&sector, 7), Some(0x1234));
        assert_eq!(identify(&sector, 8), None);
        sector[511] ^= 1;
        assert_eq!(identify(&sector, 7), None);
        assert_eq!(identify(&[], 7), None);
    }
}
