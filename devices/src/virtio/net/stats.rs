//! Counters of a network device.
//!
//! Each pair of queues has its own counters in its own memory. Each counter has one writer, so
//! counting is a load and a store. A reader adds up the pairs. The sums are only approximately from
//! the same moment.

use std::sync::atomic::{AtomicU64, Ordering};

/// Statistics of a network device since its creation. Bytes are those of Ethernet frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetStats {
    /// Packets given to the guest.
    pub received: u64,
    /// Bytes given to the guest.
    pub received_bytes: u64,
    /// Packets for the guest that were lost: they did not fit into its buffers, the link was down, or the host failed to hand
    /// them over.
    pub receive_dropped: u64,
    /// Packets that the driver's filter kept out.
    pub receive_filtered: u64,
    /// Packets given to the host.
    pub sent: u64,
    /// Bytes given to the host.
    pub sent_bytes: u64,
    /// Packets not given to the host: the guest's header made no sense, the link was down, or the host refused.
    pub send_dropped: u64,
    /// Those of `send_dropped` whose header or length made no sense.
    pub send_invalid: u64,
}

/// Counters of one pair of queues, written by its worker only. Apart from other pairs' in memory.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct PairCounters {
    pub received: AtomicU64,
    pub received_bytes: AtomicU64,
    pub receive_dropped: AtomicU64,
    pub receive_filtered: AtomicU64,
    pub sent: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub send_dropped: AtomicU64,
    pub send_invalid: AtomicU64,
}

impl PairCounters {
    /// Adds to one of the counters, of which there is no other writer.
    pub(super) fn add(counter: &AtomicU64, value: u64) {
        let sum = counter.load(Ordering::Relaxed).wrapping_add(value);
        counter.store(sum, Ordering::Relaxed);
    }
}

/// The sum over pairs.
pub(super) fn sum<'a>(pairs: impl Iterator<Item = &'a PairCounters>) -> NetStats {
    let mut stats = NetStats::default();
    for pair in pairs {
        for (to, from) in [
            (&mut stats.received, &pair.received),
            (&mut stats.received_bytes, &pair.received_bytes),
            (&mut stats.receive_dropped, &pair.receive_dropped),
            (&mut stats.receive_filtered, &pair.receive_filtered),
            (&mut stats.sent, &pair.sent),
            (&mut stats.sent_bytes, &pair.sent_bytes),
            (&mut stats.send_dropped, &pair.send_dropped),
            (&mut stats.send_invalid, &pair.send_invalid),
        ] {
            *to = to.wrapping_add(from.load(Ordering::Relaxed));
        }
    }
    stats
}
