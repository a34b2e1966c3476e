//! Cost of packets between a guest and the node: the same traffic under each subject in turn, with
//! KVM's counters, the process' CPU time and its reads and writes. vhost's threads belong to the
//! process.

pub mod traffic;

use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use self::traffic::{Flow, Traffic};
use crate::{
    disk::counters::Counters,
    run::Running,
    vmm::{PEERS, Subject, place},
};

/// The bridge, where the node is 10.8.0.1.
const BRIDGE: &str = "measure0";
/// Before a measurement, so that streams are under way.
const SETTLE: Duration = Duration::from_millis(400);
/// What is measured.
const TIME: Duration = Duration::from_millis(1500);

/// The traffic, and its name in the tables.
pub const JOBS: [(&str, Traffic); 11] = [
    ("tcp-out-1", tcp(1, true)),
    ("tcp-out-4", tcp(4, true)),
    ("tcp-in-1", tcp(1, false)),
    ("tcp-in-4", tcp(4, false)),
    ("tcp-vm-1", Traffic::Between { streams: 1 }),
    ("tcp-vm-4", Traffic::Between { streams: 4 }),
    ("udp-out-64", udp(64, true)),
    ("udp-out-1400", udp(1400, true)),
    ("udp-in-64", udp(64, false)),
    ("udp-in-1400", udp(1400, false)),
    ("ping", Traffic::Ping),
];

const fn tcp(streams: usize, from_guest: bool) -> Traffic {
    Traffic::Tcp { streams, from_guest }
}

const fn udp(size: u16, from_guest: bool) -> Traffic {
    Traffic::Udp { size, from_guest }
}

/// Costs of one job in one turn, for each MiB of streams, each datagram, each round trip.
#[derive(Serialize)]
pub struct Cost {
    job: &'static str,
    units: f64,
    us_per_unit: f64,
    exits_per_unit: f64,
    /// CPU time of the VMM's process beside that in which the guest ran, in all its threads and in those of vhost.
    host_cpu_us_per_unit: f64,
    /// Reads and writes of files by the process (proc(5), /proc/pid/io), of which those of taps and eventfds are some.
    calls_per_unit: f64,
    /// KVM's counters that have changed: which exits they were, and interrupts.
    kvm_per_unit: BTreeMap<String, f64>,
}

/// The bridge with a tap for each subject, until it is dropped.
pub struct Wires(u8);

impl Wires {
    /// Makes them.
    pub fn new(count: u8) -> Result<Self> {
        let wires = Self(count);
        // Removes the remains of an earlier run.
        wires.remove();
        ip(&format!("link add {BRIDGE} type bridge"))?;
        ip(&format!("addr add 10.8.0.1/24 dev {BRIDGE}"))?;
        ip(&format!("link set {BRIDGE} up"))?;
        for number in 0..count {
            let (tap, ..) = place(number);
            ip(&format!("tuntap add {tap} mode tap vnet_hdr"))?;
            ip(&format!("link set {tap} master {BRIDGE} up"))?;
        }
        Ok(wires)
    }

    fn remove(&self) {
        for number in 0..self.0 {
            let _none = ip(&format!("link del {}", place(number).0));
        }
        let _none = ip(&format!("link del {BRIDGE}"));
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        self.remove();
    }
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .context("start ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {arguments}: {said}");
    Ok(())
}

/// Two guests of a subject.
struct Pair<'a> {
    number: u8,
    subject: &'a Subject,
    running: Running,
    /// Target of the first guest's traffic.
    peer: Running,
}

impl Pair<'_> {
    fn processes(&mut self) -> [&mut Running; 2] {
        [&mut self.running, &mut self.peer]
    }
}

/// Subjects with their numbers, and the same subjects with another tap, for traffic between both.
pub type Pairs<'a> = [(u8, &'a Subject, &'a Subject)];

/// Boots all guests, and runs each job whose name contains `wanted` on each guest in turn. Passes
/// each cost to `each`.
pub fn run(pairs: &Pairs<'_>, wanted: &str, turns: u32, each: impl Fn(&str, u32, &Cost)) -> Result<()> {
    let mut guests = Vec::new();
    for (number, subject, peer) in pairs {
        guests.push(Pair {
            number: *number,
            subject,
            running: Running::new(subject)?,
            peer: Running::new(peer)?,
        });
    }
    for pair in &mut guests {
        let name = pair.subject.name;
        for running in pair.processes() {
            let up = running.text_until("GUEST-READY");
            up.with_context(|| format!("{name}: boot"))?;
            running.type_line("measure serve &")?;
            let serves = running.text_until("TRAFFIC-READY");
            serves.with_context(|| format!("{name}: begin"))?;
            running.part()?;
        }
    }
    for (job, traffic) in JOBS.iter().filter(|(job, _)| job.contains(wanted)) {
        for turn in 0..turns {
            // None is always the one that comes after the same other.
            guests.rotate_left(1);
            for pair in &guests {
                let name = pair.subject.name;
                let cost = measure(job, *traffic, pair);
                each(name, turn, &cost.with_context(|| format!("{name}: {job}"))?);
            }
        }
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn measure(job: &'static str, traffic: Traffic, pair: &Pair<'_>) -> Result<Cost> {
    let mut pids = vec![pair.running.pid()];
    if let Traffic::Between { .. } = traffic {
        pids.push(pair.peer.pid());
    }
    let counted = || -> Result<Vec<(Counters, u64)>> {
        pids.iter()
            .map(|pid| Ok((Counters::read(*pid)?, calls(*pid)?)))
            .collect()
    };
    let address = |number| place(number).1;
    let flow = Flow::begin(
        address(pair.number),
        address(pair.number.saturating_add(PEERS)),
        traffic,
    )?;
    thread::sleep(SETTLE);
    let (arrived, before) = (flow.arrived()?, counted()?);
    let begin = Instant::now();
    thread::sleep(TIME);
    let after = counted()?;
    let (arrived, time) = (flow.arrived()?.saturating_sub(arrived), begin.elapsed());
    ensure!(arrived > 0, "nothing arrived");
    let units = match traffic {
        Traffic::Tcp { .. } | Traffic::Between { .. } => arrived as f64 / f64::from(1 << 20),
        Traffic::Udp { .. } | Traffic::Ping => arrived as f64,
    };
    let (mut cost, mut calls) = (Counters::default(), 0);
    for ((counters, called), (counters_before, called_before)) in after.iter().zip(&before) {
        cost.add(&counters.since(counters_before));
        calls += called.saturating_sub(*called_before);
    }
    let changed = cost.kvm.iter().filter(|(_, count)| **count > 0);
    let changed = changed.map(|(name, count)| (name.clone(), *count as f64 / units));
    let exits = cost.kvm.get("exits").copied().unwrap_or(0);
    Ok(Cost {
        job,
        units,
        us_per_unit: time.as_secs_f64() * 1e6 / units,
        exits_per_unit: exits as f64 / units,
        host_cpu_us_per_unit: cost.cpu_us / units,
        calls_per_unit: calls as f64 / units,
        kvm_per_unit: changed.collect(),
    })
}

/// Reads and writes of the process so far.
fn calls(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).context("read what the process called")?;
    let numbers = text.lines().filter_map(|line| {
        let (name, value) = line.split_once(": ")?;
        matches!(name, "syscr" | "syscw").then(|| value.parse::<u64>().ok())?
    });
    Ok(numbers.sum())
}
