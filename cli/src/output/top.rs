//! Resource usage of VMs, as a table of rates.

use std::{collections::BTreeMap, time::Duration};

use vmmd_api::{
    v1::{DiskStats, NicStats, VmStats},
    well_known,
};

use super::table::Table;
use crate::manifest::quantity;

/// Rates between two samples; a VM without a first sample has no rates yet.
pub fn table(before: &BTreeMap<String, VmStats>, now: &BTreeMap<String, VmStats>) -> String {
    let rows: Vec<_> = now
        .iter()
        .map(|(name, stats)| row(name, before.get(name), stats))
        .collect();
    let headers = [
        "NAME", "CPU%", "STEAL%", "MEMORY", "READ/S", "WRITE/S", "IOPS", "RX/S", "TX/S", "EXITS/S",
    ];
    Table::new(headers.to_vec()).whole(&rows, true)
}

fn row(name: &str, before: Option<&VmStats>, now: &VmStats) -> Vec<String> {
    let memory = now.memory.as_ref().map_or(0, |memory| memory.used_bytes);
    let rate = |of: fn(&VmStats) -> u64| {
        let before = before?;
        let millis = elapsed_ms(before, now).filter(|millis| *millis > 0)?;
        // The counters of another run are smaller.
        let grown = u128::from(of(now).checked_sub(of(before))?);
        u64::try_from(grown * 1000 / u128::from(millis)).ok()
    };
    let show = |rate: Option<u64>, text: fn(u64) -> String| rate.map(text).unwrap_or_default();
    vec![
        name.to_owned(),
        show(rate(cpu_ns), percent),
        show(rate(steal_ns), percent),
        quantity::show(memory),
        show(
            rate(|stats| disks(stats, |disk| bytes(&disk.read))),
            quantity::show,
        ),
        show(
            rate(|stats| disks(stats, |disk| bytes(&disk.write))),
            quantity::show,
        ),
        show(rate(|stats| disks(stats, requests)), |rate| rate.to_string()),
        show(
            rate(|stats| nics(stats, |nic| nic.received_bytes)),
            quantity::show,
        ),
        show(rate(|stats| nics(stats, |nic| nic.sent_bytes)), quantity::show),
        show(rate(exits), |rate| rate.to_string()),
    ]
}

/// Nanoseconds per second as a percentage of one processor.
fn percent(rate: u64) -> String {
    let tenths = rate / 1_000_000;
    format!("{}.{}", tenths / 10, tenths % 10)
}

fn elapsed_ms(before: &VmStats, now: &VmStats) -> Option<u64> {
    let millis = |stats: &VmStats| {
        let time = stats.time?;
        Some(time.seconds.checked_mul(1000)? + i64::from(time.nanos / 1_000_000))
    };
    u64::try_from(millis(now)? - millis(before)?).ok()
}

fn nanos(time: Option<well_known::Duration>) -> u64 {
    let time = Duration::try_from(time.unwrap_or_default()).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn cpu_ns(stats: &VmStats) -> u64 {
    let cpu = stats.cpu.as_ref();
    cpu.map_or(0, |cpu| {
        nanos(cpu.user_time).saturating_add(nanos(cpu.system_time))
    })
}

fn steal_ns(stats: &VmStats) -> u64 {
    let vcpus = stats.cpu.iter().flat_map(|cpu| &cpu.vcpus);
    vcpus
        .map(|vcpu| nanos(vcpu.steal_time))
        .fold(0, u64::saturating_add)
}

fn exits(stats: &VmStats) -> u64 {
    let cpu = stats.cpu.as_ref();
    cpu.and_then(|cpu| cpu.exits.get("exits")).copied().unwrap_or(0)
}

fn disks(stats: &VmStats, of: fn(&DiskStats) -> u64) -> u64 {
    stats.disks.iter().map(of).fold(0, u64::saturating_add)
}

fn nics(stats: &VmStats, of: fn(&NicStats) -> u64) -> u64 {
    stats.nics.iter().map(of).fold(0, u64::saturating_add)
}

fn bytes(stats: &Option<vmmd_api::v1::DiskOperationStats>) -> u64 {
    stats.as_ref().map_or(0, |stats| stats.bytes)
}

fn requests(disk: &DiskStats) -> u64 {
    let kinds = [&disk.read, &disk.write, &disk.flush, &disk.discard];
    kinds
        .into_iter()
        .flatten()
        .map(|stats| stats.requests)
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use vmmd_api::v1::{CpuStats, VcpuStats};

    use super::*;

    fn sample(at_ms: u64, cpu_ms: u64, exits: u64) -> VmStats {
        let time = |ms| Some(Duration::from_millis(ms).into());
        VmStats {
            time: Some(well_known::Timestamp {
                seconds: i64::try_from(at_ms / 1000).unwrap(),
                nanos: i32::try_from(at_ms % 1000 * 1_000_000).unwrap(),
            }),
            cpu: Some(CpuStats {
                user_time: time(cpu_ms),
                vcpus: vec![VcpuStats {
                    steal_time: time(cpu_ms / 10),
                    ..VcpuStats::default()
                }],
                exits: [("exits".to_owned(), exits)].into(),
                ..CpuStats::default()
            }),
            ..VmStats::default()
        }
    }

    fn rates(before: Option<&VmStats>, now: &VmStats) -> (String, String, String) {
        let row = row("web", before, now);
        (row[1].clone(), row[2].clone(), row[9].clone())
    }

    #[test]
    fn rates_are_of_the_time_between_the_samples() {
        let now = sample(11_500, 4_000, 300);
        let expected = ("200.0".into(), "20.0".into(), "200".into());
        assert_eq!(rates(Some(&sample(10_000, 1_000, 0)), &now), expected);
    }

    #[test]
    fn a_vm_that_is_new_or_runs_anew_has_no_rates_yet() {
        let now = sample(11_000, 5, 5);
        let none = (String::new(), String::new(), String::new());
        assert_eq!(rates(None, &now), none);
        assert_eq!(rates(Some(&sample(10_000, 5_000, 500)), &now), none);
        assert_eq!(rates(Some(&sample(11_000, 1, 1)), &now), none);
    }
}
