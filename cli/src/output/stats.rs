//! Counters of VMs and their disks, as text.

use std::time::Duration;

use vmmd_api::{
    v1::{DiskOperationStats, DiskStats, LatencyHistogram, VmStats},
    well_known,
};

use super::{describe::Lines, table::Table};
use crate::manifest::quantity;

/// Everything that a VM counts.
pub fn vm(stats: &VmStats) -> String {
    let mut text = Lines::default();
    let cpu = stats.cpu.clone().unwrap_or_default();
    let time = |time: Option<well_known::Duration>| {
        short(Duration::try_from(time.unwrap_or_default()).unwrap_or_default())
    };
    text.put("Name", &stats.name);
    text.put("CPU user", &time(cpu.user_time));
    text.put("CPU system", &time(cpu.system_time));
    text.put("CPU throttled", &time(cpu.throttled_time));
    let memory = stats.memory.unwrap_or_default();
    text.put("Memory", &quantity::show(memory.size_bytes));
    text.put("  Used", &quantity::show(memory.used_bytes));
    if let Some(limit) = memory.limit_bytes {
        text.put("  Limit", &quantity::show(limit));
    }
    if let Some(balloon) = memory.balloon {
        text.put("  Balloon", &quantity::show(balloon.actual_bytes));
        text.put("  Balloon target", &quantity::show(balloon.target_bytes));
    }
    let vcpus = cpu
        .vcpus
        .iter()
        .map(|vcpu| vec![vcpu.index.to_string(), time(vcpu.time), time(vcpu.steal_time)]);
    text.list("vCPUs", vec!["VCPU", "TIME", "STEAL"], &vcpus.collect::<Vec<_>>());
    let mut exits: Vec<_> = cpu.exits.iter().filter(|(_, count)| **count > 0).collect();
    exits.sort();
    let exits = exits
        .into_iter()
        .map(|(name, count)| vec![name.clone(), count.to_string()]);
    text.list("KVM", vec!["COUNTER", "COUNT"], &exits.collect::<Vec<_>>());
    let nics = stats.nics.iter().map(|nic| {
        vec![
            nic.name.clone(),
            nic.received_packets.to_string(),
            quantity::show(nic.received_bytes),
            nic.received_dropped.to_string(),
            nic.sent_packets.to_string(),
            quantity::show(nic.sent_bytes),
            nic.sent_dropped.to_string(),
        ]
    });
    let headers = vec!["NIC", "RECEIVED", "BYTES", "DROPPED", "SENT", "BYTES", "DROPPED"];
    text.list("NICs", headers, &nics.collect::<Vec<_>>());
    if stats.disks.is_empty() {
        text.put("Disks", "none");
    } else {
        text.title("Disks");
        for line in table(&stats.disks).lines() {
            text.0.push_str(&format!("  {line}\n"));
        }
    }
    text.0
}

/// One row for each disk as a whole, and one for each kind of request that there was.
pub fn table(disks: &[DiskStats]) -> String {
    let mut rows = Vec::new();
    for disk in disks {
        let kinds = [
            ("read", &disk.read),
            ("write", &disk.write),
            ("flush", &disk.flush),
            ("discard", &disk.discard),
        ];
        let present = |(name, stats): (_, &Option<DiskOperationStats>)| Some((name, stats.clone()?));
        let kinds: Vec<(&str, _)> = kinds.into_iter().filter_map(present).collect();
        let all = sum(kinds.iter().map(|(_, stats)| stats));
        let gauges = [disk.waiting, disk.in_flight, disk.throttled, disk.held].map(|count| count.to_string());
        rows.push([row(&disk.name, "all", &all), gauges.to_vec()].concat());
        for (name, stats) in kinds.iter().filter(|(_, stats)| stats.requests != 0) {
            rows.push([row(&disk.name, name, stats), vec![String::new(); gauges.len()]].concat());
        }
    }
    let headers = [
        "DISK",
        "KIND",
        "REQUESTS",
        "BYTES",
        "ERRORS",
        "MEAN",
        "P99",
        "WAITING",
        "IN FLIGHT",
        "THROTTLED",
        "HELD",
    ];
    Table::new(headers.to_vec()).whole(&rows, true)
}

fn row(disk: &str, kind: &str, stats: &DiskOperationStats) -> Vec<String> {
    vec![
        disk.to_owned(),
        kind.to_owned(),
        stats.requests.to_string(),
        quantity::show(stats.bytes),
        stats.errors.to_string(),
        mean(stats).map(short).unwrap_or_default(),
        stats
            .latency
            .as_ref()
            .and_then(|latency| percentile(latency, 99))
            .unwrap_or_default(),
    ]
}

fn sum<'a>(kinds: impl Iterator<Item = &'a DiskOperationStats>) -> DiskOperationStats {
    let mut sum = DiskOperationStats::default();
    let mut time = Duration::ZERO;
    for stats in kinds {
        sum.requests = sum.requests.saturating_add(stats.requests);
        sum.bytes = sum.bytes.saturating_add(stats.bytes);
        sum.errors = sum.errors.saturating_add(stats.errors);
        time = time.saturating_add(total_time(stats));
        match (&mut sum.latency, &stats.latency) {
            (Some(sum), Some(latency)) if sum.bounds_us == latency.bounds_us => {
                for (total, count) in sum.counts.iter_mut().zip(&latency.counts) {
                    *total = total.saturating_add(*count);
                }
            }
            // Those of one daemon all have the same bounds.
            (Some(_), _) => {}
            (none, latency) => none.clone_from(latency),
        }
    }
    sum.total_time = Some(time.into());
    sum
}

fn total_time(stats: &DiskOperationStats) -> Duration {
    let time = stats.total_time.unwrap_or_default();
    Duration::try_from(time).unwrap_or_default()
}

fn mean(stats: &DiskOperationStats) -> Option<Duration> {
    let nanos = total_time(stats).as_nanos().checked_div(stats.requests.into())?;
    Some(Duration::from_nanos(u64::try_from(nanos).ok()?))
}

/// Upper bound on the latency of `percent` of the requests, by bucket: `<512us`.
fn percentile(latency: &LatencyHistogram, percent: u64) -> Option<String> {
    let buckets = &latency.counts;
    let total: u128 = buckets.iter().copied().map(u128::from).sum();
    if total == 0 {
        return None;
    }
    let mut below = 0_u128;
    let index = buckets.iter().position(|count| {
        below += u128::from(*count);
        below * 100 >= total * u128::from(percent)
    })?;
    let shown = |bound: &u64| short(Duration::from_micros(*bound));
    match latency.bounds_us.get(index) {
        Some(bound) => Some(format!("<{}", shown(bound))),
        None => latency
            .bounds_us
            .last()
            .map(|bound| format!(">={}", shown(bound))),
    }
}

/// Three digits and a unit: `85us`, `1.02ms`, `2.1s`.
fn short(time: Duration) -> String {
    let nanos = time.as_nanos();
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    let Some((unit, name)) = units.into_iter().find(|(unit, _)| nanos >= *unit) else {
        return format!("{nanos}ns");
    };
    let (whole, hundredths) = (nanos / unit, nanos % unit * 100 / unit);
    let text = match whole {
        0..10 => format!("{whole}.{hundredths:02}"),
        10..100 => format!("{whole}.{}", hundredths / 10),
        _ => whole.to_string(),
    };
    let text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    format!("{text}{name}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, "0ns")]
    #[case(999, "999ns")]
    #[case(1_000, "1us")]
    #[case(85_400, "85.4us")]
    #[case(512_000, "512us")]
    #[case(1_024_000, "1.02ms")]
    #[case(100_000_000, "100ms")]
    #[case(2_100_000_000, "2.1s")]
    #[case(120_000_000_000, "120s")]
    fn a_latency_is_short(#[case] nanos: u64, #[case] text: &str) {
        assert_eq!(short(Duration::from_nanos(nanos)), text);
    }

    #[rstest]
    #[case::nothing(&[], None)]
    #[case::no_requests(&[0, 0, 0], None)]
    #[case::all_in_the_first(&[7, 0, 0], Some("<1us"))]
    #[case::exactly_99_percent(&[0, 99, 1, 0], Some("<2us"))]
    #[case::just_more(&[0, 98, 2, 0], Some("<4us"))]
    #[case::one(&[0, 0, 0, 1, 0], Some("<8us"))]
    #[case::far(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0], Some("<1.02ms"))]
    #[case::beyond_the_last_bound(&[1, 0, 0, 9], Some(">=4us"))]
    #[case::large(&[u64::MAX, u64::MAX, 0], Some("<2us"))]
    fn a_percentile_is_the_bound_of_its_bucket(#[case] buckets: &[u64], #[case] text: Option<&str>) {
        let latency = LatencyHistogram {
            bounds_us: (1..buckets.len()).map(|power| 1 << (power - 1)).collect(),
            counts: buckets.to_vec(),
        };
        assert_eq!(percentile(&latency, 99).as_deref(), text);
    }
}
