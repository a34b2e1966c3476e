//! The moment of the first `kvm_entry` of a process, from the kernel's tracer (Documentation/trace/ftrace.rst).

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

const INSTANCE: &str = "/sys/kernel/tracing/instances/measure";

/// A tracer of `kvm_entry` of all processes, until dropped. Only one guest runs meanwhile.
pub struct FirstEntry {
    pipe: BufReader<File>,
}

/// Now, on the clock that the tracer is set to.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}

impl FirstEntry {
    /// Begins to trace.
    pub fn new() -> Result<Self> {
        let instance = Path::new(INSTANCE);
        if !instance.exists() {
            fs::create_dir(instance).context("make a trace instance (is tracefs mounted?)")?;
        }
        let set = |file: &str, value: &str| {
            fs::write(instance.join(file), value).with_context(|| format!("set the tracer's {file}"))
        };
        set("trace_clock", "mono")?;
        set("buffer_size_kb", "256")?;
        set("events/kvm/kvm_entry/enable", "1")?;
        let pipe = BufReader::new(File::open(instance.join("trace_pipe")).context("open the trace")?);
        Ok(Self { pipe })
    }

    /// Waits for the first entry and returns when it was.
    pub fn wait(mut self) -> Result<Duration> {
        // "<comm>-<pid> [cpu] flags  SECONDS.MICROS: kvm_entry: vcpu 0, rip 0x1000"
        let mut line = String::new();
        loop {
            line.clear();
            self.pipe.read_line(&mut line).context("read the trace")?;
            let time = line
                .split(": kvm_entry")
                .next()
                .and_then(|head| head.split_whitespace().last());
            if let (true, Some(time)) = (
                line.contains("kvm_entry"),
                time.and_then(|time| time.parse().ok()),
            ) {
                return Ok(Duration::from_secs_f64(time));
            }
        }
    }
}

impl Drop for FirstEntry {
    fn drop(&mut self) {
        // What can't be undone here is undone with the node.
        fs::write(Path::new(INSTANCE).join("events/kvm/kvm_entry/enable"), "0").ok();
        fs::remove_dir(INSTANCE).ok();
    }
}
