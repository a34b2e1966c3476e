//! The kernel's counters of a VM's processes: those of its cgroup, or those of its process without
//! a cgroup.

use std::fs;

use vmmd_host::cgroup::{Group, count};

/// Clock ticks of a second in /proc: USER_HZ, which is the same on all kernels (asm-generic/param.h).
const TICKS: u64 = 100;
/// Bytes of a page (x86-64).
const PAGE: u64 = 4096;

/// Resource usage. Unknown values are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time in user mode, the guest's included.
    pub user_ns: u64,
    /// In the kernel.
    pub system_ns: u64,
    /// Time in which the cgroup's limit held it back.
    pub throttled_ns: u64,
    /// Memory that it holds now.
    pub memory_bytes: u64,
    /// 0 for none.
    pub memory_limit_bytes: u64,
}

impl Usage {
    /// As it is now. Blocking, but on the kernel's memory alone.
    pub fn read(group: Option<&Group>, pid: Option<u32>) -> Self {
        let file = |name| group.and_then(|group| group.read(name)).unwrap_or_default();
        let mut usage = of_cgroup(&file("cpu.stat"), &file("memory.current"), &file("memory.max"));
        let process = |name| {
            let text = pid.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/{name}")).ok());
            text.unwrap_or_default()
        };
        if usage.user_ns == 0 && usage.system_ns == 0 {
            let nanos = |ticks: u64| ticks.saturating_mul(1_000_000_000 / TICKS);
            let (user, system) = process_ticks(&process("stat")).unwrap_or_default();
            (usage.user_ns, usage.system_ns) = (nanos(user), nanos(system));
        }
        if usage.memory_bytes == 0 {
            usage.memory_bytes = resident_pages(&process("statm"))
                .unwrap_or(0)
                .saturating_mul(PAGE);
        }
        usage
    }
}

/// Nanoseconds for which a thread of a process could have run and the host ran something else (the second number of
/// schedstat; the kernel's Documentation/scheduler/sched-stats.rst).
pub(super) fn waiting_ns(pid: u32, thread: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Files of Documentation/admin-guide/cgroup-v2.rst.
fn of_cgroup(cpu: &str, current: &str, max: &str) -> Usage {
    let nanos = |key| count(cpu, key).saturating_mul(1000);
    Usage {
        user_ns: nanos("user_usec"),
        system_ns: nanos("system_usec"),
        throttled_ns: nanos("throttled_usec"),
        memory_bytes: current.trim().parse().unwrap_or(0),
        // "max" is none.
        memory_limit_bytes: max.trim().parse().unwrap_or(0),
    }
}

/// utime and stime, fields 14 and 15 of proc_pid_stat(5); the name in field 2 may hold anything.
fn process_ticks(stat: &str) -> Option<(u64, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Field 2 of proc_pid_statm(5).
fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_cgroup_are_read() {
        let cpu = "usage_usec 30\nuser_usec 20\nsystem_usec 10\nnr_throttled 1\nthrottled_usec 7\n";
        let usage = Usage {
            user_ns: 20_000,
            system_ns: 10_000,
            throttled_ns: 7_000,
            memory_bytes: 4096,
            memory_limit_bytes: 0,
        };
        assert_eq!(of_cgroup(cpu, "4096\n", "max\n"), usage);
        assert_eq!(of_cgroup(cpu, "4096\n", "8192\n").memory_limit_bytes, 8192);
        assert_eq!(of_cgroup("", "", ""), Usage::default());
    }

    #[test]
    fn the_files_of_a_process_are_read_whatever_its_name_is() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 55 66 0 0 20 0";
        assert_eq!(process_ticks(stat), Some((55, 66)));
        assert_eq!(process_ticks("7 (a"), None);
        assert_eq!((resident_pages("10 5 1 0"), resident_pages("")), (Some(5), None));
    }

    #[test]
    fn a_process_without_a_cgroup_is_counted_too() {
        let usage = Usage::read(None, Some(std::process::id()));
        assert!(usage.memory_bytes > 0);
    }
}
