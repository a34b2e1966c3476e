//! Costs of a VMM's process, and its disk I/O.

use std::fs;

use anyhow::{Context, Result};

use crate::kvm_stats;

/// Counters of a process at a moment, or their differences.
#[derive(Clone, Default)]
pub struct Counters {
    /// Of its VM.
    pub kvm: kvm_stats::Counters,
    /// CPU time beside that in which the guest ran, of all its threads.
    pub cpu_us: f64,
    /// Bytes that it has read from and written to the node's disk.
    pub disk_bytes: u64,
}

impl Counters {
    /// Those of now.
    pub fn read(pid: u32) -> Result<Self> {
        Ok(Self {
            kvm: kvm_stats::read(pid)?,
            cpu_us: cpu_us(pid)?,
            disk_bytes: disk_bytes(pid)?,
        })
    }

    /// Adds what others moved by.
    pub fn add(&mut self, other: &Self) {
        for (name, by) in &other.kvm {
            *self.kvm.entry(name.clone()).or_default() += by;
        }
        self.cpu_us += other.cpu_us;
        self.disk_bytes += other.disk_bytes;
    }

    /// Returns the differences since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let moved = |(name, after): (&String, &u64)| {
            let by = after.saturating_sub(before.kvm.get(name).copied().unwrap_or(0));
            (by > 0).then(|| (name.clone(), by))
        };
        Self {
            kvm: self.kvm.iter().filter_map(moved).collect(),
            cpu_us: (self.cpu_us - before.cpu_us).max(0.0),
            disk_bytes: self.disk_bytes.saturating_sub(before.disk_bytes),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn cpu_us(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("read the process' times")?;
    // proc(5): after the command in parentheses utime is the 12th field, stime the 13th, guest_time the 41st; utime
    // includes guest_time.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks = |index: usize| {
        let field = fields.get(index).and_then(|field| field.parse().ok());
        field.unwrap_or(0_u64)
    };
    let host = (ticks(11) + ticks(12)).saturating_sub(ticks(40));
    Ok(host as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}

/// Past the page cache, each byte that the guest reads or writes is one of these (proc(5), /proc/pid/io).
pub fn disk_bytes(pid: u32) -> Result<u64> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/io")).context("read what the process read and wrote")?;
    let number = |name: &str| -> Result<u64> {
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value
            .and_then(|value| value.parse().ok())
            .with_context(|| format!("the kernel does not count {name}"))
    };
    Ok(number("read_bytes")? + number("write_bytes")?)
}
