//! The daemon's own process, by the names that all programs have for this.

use std::fs;

use super::families::{Families, as_f64};
use crate::stats::Usage;

/// Adds them.
pub fn add(families: &mut Families) {
    let usage = Usage::read(None, Some(std::process::id()));
    let seconds = as_f64(usage.user_ns.saturating_add(usage.system_ns)) / 1e9;
    families.counter_f64(
        "process_cpu_seconds",
        "Processor time of the daemon",
        &[],
        seconds,
    );
    families.gauge(
        "process_resident_memory_bytes",
        "Memory of the daemon",
        &[],
        as_f64(usage.memory_bytes),
    );
    let open = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    families.gauge(
        "process_open_fds",
        "Open descriptors of the daemon",
        &[],
        as_f64(open as u64),
    );
}
