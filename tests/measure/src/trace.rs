//! The moment of the first `kvm_entry` of a process, from the kernel's tracer (Documentation/trace/ftrace.rst).

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::{
    fs::OFlags,
    time::{ClockId, clock_gettime},
};

const INSTANCE: &str = "/sys/kernel/tracing/instances/measure";

/// A tracer of `kvm_entry` of all processes, until dropped. Only one guest runs meanwhile.
pub struct FirstEntry {
    pipe: File,
    /// Text read from the pipe so far.
    text: String,
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
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).context("flags")?;
        let mut options = File::options();
        let pipe = options
            .read(true)
            .custom_flags(flags)
            .open(instance.join("trace_pipe"));
        Ok(Self {
            pipe: pipe.context("open the trace")?,
            text: String::new(),
        })
    }

    /// Returns when the first entry was, once there is one.
    pub fn poll(&mut self) -> Result<Option<Duration>> {
        let mut text = vec![0; 1 << 16];
        loop {
            match self.pipe.read(&mut text) {
                Ok(read) => self.text += &String::from_utf8_lossy(text.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("read the trace"),
            }
            if let Some(first) = first(&self.text) {
                return Ok(Some(first));
            }
        }
        Ok(None)
    }
}

/// When the first `kvm_entry` was, of a trace whose last line may not be whole.
fn first(trace: &str) -> Option<Duration> {
    // "<comm>-<pid> [cpu] flags  SECONDS.MICROS: kvm_entry: vcpu 0, rip 0x1000"
    let whole = trace.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let mut times = whole.filter_map(|line| {
        let (head, _) = line.split_once(": kvm_entry")?;
        head.split_whitespace().last()?.parse().ok()
    });
    times.next().map(Duration::from_secs_f64)
}

impl AsFd for FirstEntry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

impl Drop for FirstEntry {
    fn drop(&mut self) {
        // Best effort: the node is disposable.
        fs::write(Path::new(INSTANCE).join("events/kvm/kvm_entry/enable"), "0").ok();
        fs::remove_dir(INSTANCE).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_entry_is_found_once_its_line_is_whole() {
        let trace = "  vcpu-0-17  [001] d..1.   12.250000: kvm_entry: vcpu 0, rip 0xfff0";
        assert_eq!(first(trace), None);
        let trace =
            format!("CPU:1 [LOST 3 EVENTS]\n{trace}\n  vcpu-0-17 [001] d..1. 12.5: kvm_entry: vcpu 0\n");
        assert_eq!(first(&trace), Some(Duration::from_millis(12_250)));
    }
}
