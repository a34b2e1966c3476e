//! The program's own process, by the names that all programs have for this.

use std::fs;

use prometheus_client::{
    metrics::counter::Counter,
    registry::{Registry, Unit},
};

/// Adds them.
pub fn register(registry: &mut Registry) {
    let cpu = Counter::<f64, std::sync::atomic::AtomicU64>::default();
    cpu.inc_by(cpu_seconds());
    registry.register_with_unit("process_cpu", "Processor time of the program", Unit::Seconds, cpu);
    super::register_with(
        registry,
        "process_resident_memory",
        "Memory of the program",
        Unit::Bytes,
        resident_bytes().unwrap_or_default(),
    );
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let time = std::time::Duration::try_from(time).unwrap_or_default();
    time.as_secs_f64()
}

fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u32 = line.split_whitespace().next()?.parse().ok()?;
    Some(f64::from(kibibytes) * 1024.0)
}
