//! Counters of a disk.

use std::time::Duration;

use vmm_protocol::vmm;
use vmmd_api::v1;

/// Counters as the API has them.
pub fn public_stats(stats: vmm::DiskStats) -> v1::DiskStats {
    let operation = |stats: Option<vmm::OperationStats>| {
        let stats = stats.unwrap_or_default();
        let time = Duration::from_nanos(stats.total_ns);
        Some(v1::DiskOperationStats {
            requests: stats.requests,
            bytes: stats.bytes,
            errors: stats.errors,
            total_time: Some(vmmd_api::well_known::Duration {
                seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
                nanos: i32::try_from(time.subsec_nanos()).unwrap_or(0),
            }),
            latency: histogram(stats.latency_us_log2),
        })
    };
    v1::DiskStats {
        name: stats.name,
        capacity_bytes: stats.capacity_bytes,
        read: operation(stats.read),
        write: operation(stats.write),
        flush: operation(stats.flush),
        discard: operation(stats.discard),
        in_flight: stats.in_flight,
        throttled: stats.throttled,
        held: stats.held,
        waiting: stats.waiting,
    }
}

/// Converts the buckets of the private protocol. Bucket `i` counts operations that took less than
/// 2^i microseconds; the last bucket counts the longer ones.
fn histogram(counts: Vec<u64>) -> Option<v1::LatencyHistogram> {
    let bounds = u32::try_from(counts.len()).ok()?.checked_sub(1)?;
    let bounds_us = (0..bounds).map(|power| 1_u64.checked_shl(power).unwrap_or(u64::MAX));
    Some(v1::LatencyHistogram {
        bounds_us: bounds_us.collect(),
        counts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_keep_their_times() {
        let stats = vmm::DiskStats {
            name: "root".into(),
            read: Some(vmm::OperationStats {
                requests: 3,
                total_ns: 1_500_000_000,
                latency_us_log2: vec![1, 2],
                ..Default::default()
            }),
            ..Default::default()
        };
        let read = public_stats(stats).read.unwrap();
        let time = read.total_time.unwrap();
        assert_eq!((read.requests, time.seconds, time.nanos), (3, 1, 500_000_000));
        let latency = read.latency.unwrap();
        assert_eq!((latency.bounds_us, latency.counts), (vec![1], vec![1, 2]));
    }
}
