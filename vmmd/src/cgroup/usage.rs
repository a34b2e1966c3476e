//! What a VM has used, by the account of its control group.

use std::{fs, path::Path};

/// An account. What the node does not count is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time.
    pub cpu: Option<Cpu>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Block devices.
    pub io: Option<Io>,
    /// Processes and threads that there are now.
    pub tasks: Option<u64>,
}

/// Of `cpu.stat`, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// In all.
    pub usage_us: u64,
    /// Of that, outside of the kernel. A guest's time is in here.
    pub user_us: u64,
    /// Of that, in the kernel.
    pub system_us: u64,
    /// How long threads waited because of the cap.
    pub throttled_us: u64,
    /// Periods in which they did.
    pub throttled_periods: u64,
}

/// Of `memory.current`, `memory.max` and `memory.events`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// In bytes; guest memory in huge pages of the node is not in it.
    pub current_bytes: u64,
    /// In bytes; `None` when there is no limit.
    pub max_bytes: Option<u64>,
    /// How often the limit was met and memory had to be taken back.
    pub max_events: u64,
    /// Processes that the kernel killed for want of memory.
    pub oom_kills: u64,
}

/// Of `io.stat`, all devices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Io {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes discarded.
    pub discarded_bytes: u64,
}

/// Reads the account of the group at `dir`. Blocking, some microseconds.
pub fn read(dir: &Path) -> Usage {
    let file = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
    Usage {
        cpu: file("cpu.stat").map(|text| cpu(&text)),
        memory: number("memory.current").map(|current_bytes| {
            let events = file("memory.events").unwrap_or_default();
            Memory {
                current_bytes,
                max_bytes: number("memory.max"),
                max_events: count(&events, "max"),
                oom_kills: count(&events, "oom_kill"),
            }
        }),
        io: file("io.stat").map(|text| io(&text)),
        tasks: number("pids.current"),
    }
}

fn cpu(text: &str) -> Cpu {
    Cpu {
        usage_us: count(text, "usage_usec"),
        user_us: count(text, "user_usec"),
        system_us: count(text, "system_usec"),
        throttled_us: count(text, "throttled_usec"),
        throttled_periods: count(text, "nr_throttled"),
    }
}

/// Lines of `MAJOR:MINOR key=value …`.
fn io(text: &str) -> Io {
    let pairs = text.split_whitespace().filter_map(|word| word.split_once('='));
    let mut io = Io::default();
    for (key, value) in pairs {
        let value: u64 = value.parse().unwrap_or(0);
        let sum = match key {
            "rbytes" => &mut io.read_bytes,
            "wbytes" => &mut io.written_bytes,
            "rios" => &mut io.reads,
            "wios" => &mut io.writes,
            "dbytes" => &mut io.discarded_bytes,
            _ => continue,
        };
        *sum = sum.saturating_add(value);
    }
    io
}

/// A counter of a flat keyed file; 0 when it isn't there.
pub fn count(text: &str, key: &str) -> u64 {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| *name == key)
        .find_map(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_read_and_what_is_not_counted_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), Usage::default());
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write(
            "cpu.stat",
            "usage_usec 30\nuser_usec 20\nsystem_usec 10\nnr_periods 5\nnr_throttled 2\nthrottled_usec 7\n",
        );
        write("memory.current", "4096\n");
        write("memory.max", "max\n");
        write(
            "memory.events",
            "low 0\nhigh 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 1\n",
        );
        write(
            "io.stat",
            "8:0 rbytes=100 wbytes=20 rios=3 wios=4 dbytes=5 dios=6\n\n253:1 rbytes=1 wbytes=2 rios=3 wios=4\n",
        );
        write("pids.current", "12\n");
        let usage = read(dir.path());
        let cpu = Cpu {
            usage_us: 30,
            user_us: 20,
            system_us: 10,
            throttled_us: 7,
            throttled_periods: 2,
        };
        let memory = Memory {
            current_bytes: 4096,
            max_bytes: None,
            max_events: 3,
            oom_kills: 1,
        };
        let io = Io {
            read_bytes: 101,
            written_bytes: 22,
            reads: 6,
            writes: 8,
            discarded_bytes: 5,
        };
        assert_eq!(
            usage,
            Usage {
                cpu: Some(cpu),
                memory: Some(memory),
                io: Some(io),
                tasks: Some(12),
            }
        );
    }

    #[test]
    fn a_counter_is_read_by_its_whole_name() {
        let text = "low 0\noom 7\noom_kill 2\noom_group_kill 5\n";
        assert_eq!(count(text, "oom_kill"), 2);
        assert_eq!(count("", "oom_kill"), 0);
    }
}
