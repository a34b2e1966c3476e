//! Statistics of a disk.
//!
//! Each queue has its own counters in its own memory. Each counter has one writer, so counting is a
//! load and a store. A reader adds up the queues. The sums are only approximately from the same
//! moment.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use crate::virtio::gauge::Gauge;

/// Number of latency buckets.
pub const BUCKETS: usize = 24;

/// Kinds of requests that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    /// Discards and write-zeroes.
    Discard,
}

/// Statistics of a disk since its creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlkStats {
    /// Reads.
    pub read: OperationStats,
    /// Writes.
    pub write: OperationStats,
    /// Flushes.
    pub flush: OperationStats,
    /// Discards and write-zeroes.
    pub discard: OperationStats,
    /// Requests taken from the guest that have not completed yet.
    pub in_flight: u64,
    /// Requests that wait because of a rate limit at this moment.
    pub throttled: u64,
    /// Requests that failed and are kept to be tried again, and flushes that wait for them.
    pub held: u64,
    /// Requests that the driver made available and no worker has taken.
    pub waiting: u64,
}

/// Statistics of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperationStats {
    /// Answered requests, including errors. Invalid requests do not count.
    pub requests: u64,
    /// Bytes read, written, discarded or zeroed by requests that succeeded.
    pub bytes: u64,
    /// Answered with an error that the host caused.
    pub errors: u64,
    /// Sum of the times from taking a request to its completion.
    pub total_ns: u64,
    /// Bucket i counts requests that took less than 2^i microseconds and not less than 2^(i-1); the last one takes
    /// everything longer.
    pub latency_us_log2: [u64; BUCKETS],
}

impl OperationStats {
    fn add(&mut self, counters: &OperationCounters) {
        let add = |to: &mut u64, from: &AtomicU64| *to = to.saturating_add(from.load(Ordering::Relaxed));
        add(&mut self.requests, &counters.requests);
        add(&mut self.bytes, &counters.bytes);
        add(&mut self.errors, &counters.errors);
        add(&mut self.total_ns, &counters.total_ns);
        for (to, from) in self.latency_us_log2.iter_mut().zip(&counters.latency_us_log2) {
            add(to, from);
        }
    }
}

#[derive(Debug, Default)]
struct OperationCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    total_ns: AtomicU64,
    latency_us_log2: [AtomicU64; BUCKETS],
}

/// One queue's counters, written by its worker only. Apart from other queues' in memory.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct QueueCounters {
    read: OperationCounters,
    write: OperationCounters,
    flush: OperationCounters,
    discard: OperationCounters,
    in_flight: AtomicU64,
    throttled: AtomicU64,
    held: AtomicU64,
    /// Gauge of the ring, while the queue is served.
    ring: Mutex<Option<Arc<Gauge>>>,
}

impl QueueCounters {
    /// A request completed.
    pub(super) fn completed(&self, kind: Kind, bytes: u64, took_ns: u64, ok: bool) {
        let counters = match kind {
            Kind::Read => &self.read,
            Kind::Write => &self.write,
            Kind::Flush => &self.flush,
            Kind::Discard => &self.discard,
        };
        add(&counters.requests, 1);
        if ok {
            add(&counters.bytes, bytes);
        } else {
            add(&counters.errors, 1);
        }
        add(&counters.total_ns, took_ns);
        if let Some(bucket) = counters.latency_us_log2.get(bucket(took_ns)) {
            add(bucket, 1);
        }
    }

    pub(super) fn set_in_flight(&self, count: usize) {
        set(&self.in_flight, count);
    }

    pub(super) fn set_throttled(&self, count: usize) {
        set(&self.throttled, count);
    }

    pub(super) fn set_held(&self, count: usize) {
        set(&self.held, count);
    }

    /// The queue is served from now on, or no longer.
    pub(super) fn set_ring(&self, gauge: Option<Arc<Gauge>>) {
        *self.ring.lock().unwrap_or_else(PoisonError::into_inner) = gauge;
    }

    fn waiting(&self) -> u64 {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.as_ref().map_or(0, |ring| ring.waiting().into())
    }
}

/// The sum over queues.
pub(super) fn sum<'a>(queues: impl Iterator<Item = &'a QueueCounters>) -> BlkStats {
    let mut stats = BlkStats::default();
    for queue in queues {
        stats.read.add(&queue.read);
        stats.write.add(&queue.write);
        stats.flush.add(&queue.flush);
        stats.discard.add(&queue.discard);
        for (to, from) in [
            (&mut stats.in_flight, &queue.in_flight),
            (&mut stats.throttled, &queue.throttled),
            (&mut stats.held, &queue.held),
        ] {
            *to = to.saturating_add(from.load(Ordering::Relaxed));
        }
        stats.waiting = stats.waiting.saturating_add(queue.waiting());
    }
    stats
}

/// There is no other writer.
fn add(counter: &AtomicU64, value: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(value);
    counter.store(sum, Ordering::Relaxed);
}

fn set(gauge: &AtomicU64, value: usize) {
    gauge.store(u64::try_from(value).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn bucket(took_ns: u64) -> usize {
    let bits = u64::BITS.saturating_sub(took_ns.wrapping_div(1000).leading_zeros());
    usize::try_from(bits)
        .unwrap_or(usize::MAX)
        .min(BUCKETS.saturating_sub(1))
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_falls_into_the_bucket_of_its_power_of_two() {
        for (micros, index) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (1000, 10),
            (1 << 22, 23),
            (u64::MAX, 23),
        ] {
            assert_eq!(bucket(u64::saturating_mul(micros, 1000)), index, "{micros}");
        }
        assert_eq!(bucket(999), 0);
    }

    #[test]
    fn queues_are_added_up() {
        let queues = [QueueCounters::default(), QueueCounters::default()];
        for queue in &queues {
            queue.completed(Kind::Write, 512, 5000, true);
            queue.completed(Kind::Write, 512, 6000, false);
            queue.set_held(3);
        }
        let stats = sum(queues.iter());
        assert_eq!(
            (stats.write.requests, stats.write.bytes, stats.write.errors),
            (4, 1024, 2)
        );
        assert_eq!(
            (stats.write.total_ns, stats.held, stats.in_flight),
            (22_000, 6, 0)
        );
        assert_eq!(stats.write.latency_us_log2[3], 4);
        assert_eq!(stats.read, OperationStats::default());
    }
}
