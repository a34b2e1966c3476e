//! Size and content of each packet, which its sequence number decides, and the counts of a receiver.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bytes of the sequence number at the beginning of a packet. A shorter packet has no sequence
/// number: only its count is checked.
pub const HEADER: usize = 4;
/// Packets of one size that are handed to the kernel at once, to be cut there or in the NIC. Seven of 9,000 bytes fit into a datagram.
pub const TRAIN: u32 = 7;
/// A prime that is larger than any packet: its multiples go through all sizes.
const STEP: u64 = 65_537;

/// The sizes of a stream of packets.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sizes {
    /// The largest, in bytes.
    pub max: usize,
    /// [`TRAIN`] packets in a row have one size.
    pub trains: bool,
}

impl Sizes {
    /// The size of a packet. As many packets in a row as there are sizes have all of them.
    pub fn of(self, sequence: u32) -> usize {
        let (number, min) = if self.trains {
            (sequence / TRAIN, HEADER)
        } else {
            (sequence, 0)
        };
        let count = (self.max - min + 1) as u64;
        min + usize::try_from(u64::from(number) * STEP % count).unwrap_or(0)
    }
}

/// Fills a packet: its number, then pseudo-random bytes made of that (splitmix64).
pub fn fill(packet: &mut [u8], sequence: u32) {
    let Some((header, content)) = packet.split_at_mut_checked(HEADER) else {
        packet.fill(0xa5);
        return;
    };
    header.copy_from_slice(&sequence.to_be_bytes());
    let mut state = u64::from(sequence) << 32;
    for piece in content.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        piece.copy_from_slice(&mixed.to_le_bytes()[..piece.len()]);
    }
}

/// Fate of the packets of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Handed to the kernel.
    pub sent: u64,
    /// Sent packets in trains that the kernel or the NIC cuts.
    pub in_trains: u64,
    /// Times that a window was not acknowledged in time, so that its probe was sent again.
    pub again: u64,
    /// Intact arrivals, each counted once.
    pub received: u64,
    /// Did not arrive.
    pub lost: u64,
    /// The first with a number that did not.
    pub first_lost: Option<u32>,
    /// Arrived once more.
    pub doubled: u64,
    /// Arrived after one that was sent later.
    pub reordered: u64,
    /// Arrived with another length or content, or were never sent.
    pub damaged: u64,
    /// Arrived when the stream had been over for this many milliseconds, its end acknowledged.
    pub late_ms: u64,
}

impl Counts {
    /// Adds those of another stream.
    pub fn add(&mut self, other: &Counts) {
        self.sent += other.sent;
        self.in_trains += other.in_trains;
        self.again += other.again;
        self.received += other.received;
        self.lost += other.lost;
        self.first_lost = self.first_lost.or(other.first_lost);
        self.doubled += other.doubled;
        self.reordered += other.reordered;
        self.damaged += other.damaged;
        self.late_ms = self.late_ms.max(other.late_ms);
    }
}

/// Arrived packets of a stream.
pub struct Arrived {
    sizes: Sizes,
    counts: Counts,
    /// A bit for each packet.
    seen: Vec<u64>,
    /// One more than the highest that was seen.
    next: u32,
    /// Packets without a number.
    short: u64,
    expected: Vec<u8>,
}

impl Arrived {
    /// Nothing yet.
    pub fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            counts: Counts::default(),
            seen: Vec::new(),
            next: 0,
            short: 0,
            expected: Vec::new(),
        }
    }

    /// How many have arrived, those without a number among them.
    pub fn received(&self) -> u64 {
        self.counts.received + self.short
    }

    /// Compares a packet with its expected content, and counts it. `late` is the time since the end
    /// of the stream.
    pub fn take(&mut self, packet: &[u8], late: Option<Duration>) {
        let late = late.map_or(0, |late| late.as_millis());
        self.counts.late_ms = u64::try_from(late).unwrap_or(u64::MAX).max(self.counts.late_ms);
        let Some((header, _)) = packet.split_first_chunk::<HEADER>() else {
            let right = !self.sizes.trains && packet.iter().all(|byte| *byte == 0xa5);
            *(if right {
                &mut self.short
            } else {
                &mut self.counts.damaged
            }) += 1;
            return;
        };
        let sequence = u32::from_be_bytes(*header);
        self.expected.resize(self.sizes.of(sequence), 0);
        fill(&mut self.expected, sequence);
        if self.expected != packet {
            self.counts.damaged += 1;
            return;
        }
        let (word, bit) = (sequence as usize / 64, 1 << (sequence % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        if self.seen[word] & bit != 0 {
            self.counts.doubled += 1;
            return;
        }
        self.seen[word] |= bit;
        self.counts.received += 1;
        self.counts.reordered += u64::from(sequence < self.next);
        self.next = self.next.max(sequence + 1);
    }

    /// Returns the counts, given the sender's `sent`. A packet that was not sent is damage.
    pub fn counts(mut self, sent: &Counts) -> Counts {
        let total = u32::try_from(sent.sent).unwrap_or(u32::MAX);
        let short = (0..total)
            .filter(|sequence| self.sizes.of(*sequence) < HEADER)
            .count() as u64;
        self.counts.doubled += self.short.saturating_sub(short);
        self.counts.received += self.short.min(short);
        self.counts.damaged += u64::from(self.next.saturating_sub(total));
        let arrived = |sequence: u32| {
            let word = self.seen.get(sequence as usize / 64).copied().unwrap_or(0);
            word >> (sequence % 64) & 1 == 1 || self.sizes.of(sequence) < HEADER
        };
        self.counts.first_lost = (0..total).find(|sequence| !arrived(*sequence));
        self.counts.lost = sent.sent.saturating_sub(self.counts.received);
        self.counts.sent = sent.sent;
        self.counts.in_trains = sent.in_trains;
        self.counts.again = sent.again;
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes {
        max: 1472,
        trains: false,
    };

    fn packet(sequence: u32) -> Vec<u8> {
        let mut packet = vec![0; SIZES.of(sequence)];
        fill(&mut packet, sequence);
        packet
    }

    #[test]
    fn packets_in_a_row_have_all_sizes() {
        for max in [1452, 1472, 8972, 65_507] {
            let sizes = Sizes { max, trains: false };
            let all: std::collections::BTreeSet<usize> = (0..=u32::try_from(max).expect("a size"))
                .map(|sequence| sizes.of(sequence))
                .collect();
            assert_eq!(all, (0..=max).collect());
        }
    }

    #[test]
    fn each_fault_is_counted() {
        let mut arrived = Arrived::new(SIZES);
        let numbers: Vec<u32> = (0..20).filter(|number| SIZES.of(*number) >= 64).collect();
        let [a, b, c, d, e, ..] = numbers[..] else {
            panic!("{numbers:?}")
        };
        let (mut changed, mut cut) = (packet(a), packet(b));
        changed[63] ^= 1;
        cut.truncate(40);
        for packet in [
            packet(d),
            packet(c),
            packet(d),
            changed,
            cut,
            packet(e),
            vec![0xa5; 3],
            vec![0; 3],
        ] {
            arrived.take(&packet, None);
        }
        let sent = Counts {
            sent: 20,
            ..Counts::default()
        };
        let short = (0..20).filter(|number| SIZES.of(*number) < HEADER).count() as u64;
        assert_eq!(short, 1, "the packet without content");
        let expected = Counts {
            received: 4,
            lost: 16,
            first_lost: Some(1),
            doubled: 1,
            reordered: 1,
            damaged: 3,
            ..sent
        };
        assert_eq!(arrived.counts(&sent), expected);
    }

    #[test]
    fn a_packet_that_was_not_sent_is_damage() {
        let mut arrived = Arrived::new(SIZES);
        arrived.take(&packet(21), Some(Duration::from_millis(70)));
        let sent = Counts {
            sent: 21,
            ..Counts::default()
        };
        let counts = arrived.counts(&sent);
        assert_eq!((counts.damaged, counts.late_ms), (1, 70));
    }
}
