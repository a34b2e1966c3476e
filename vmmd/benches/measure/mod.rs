//! What the benchmarks of the daemon measure alike.

use std::{
    collections::BTreeMap,
    fs,
    future::Future,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;

/// How long each call of one kind took.
pub struct Calls {
    name: &'static str,
    took: Vec<Duration>,
}

impl Calls {
    /// None yet.
    pub fn new(name: &'static str) -> Self {
        let took = Vec::new();
        Self { name, took }
    }

    /// Makes a call.
    pub async fn time<T>(&mut self, call: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let result = call.await;
        self.took.push(began.elapsed());
        result
    }

    /// As it is printed.
    pub fn figures(mut self) -> serde_json::Value {
        self.took.sort();
        let at = |percent: usize| {
            let rank = (self.took.len() * percent).div_ceil(100).max(1);
            self.took[rank - 1].as_secs_f64() * 1000.0
        };
        json!({"call": self.name, "count": self.took.len(), "p50_ms": at(50), "p99_ms": at(99)})
    }
}

/// RSS and PSS of a process in KiB.
pub fn memory(pid: i32) -> (u64, u64) {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    (number(&text, "Rss:"), number(&text, "Pss:"))
}

/// Of each thread of a process: nanoseconds of CPU time, and how often it has gone to sleep.
pub fn threads(pid: i32) -> BTreeMap<String, (u64, u64)> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let read = |path: PathBuf| {
        let schedstat = fs::read_to_string(path.join("schedstat")).ok()?;
        let status = fs::read_to_string(path.join("status")).ok()?;
        let cpu_ns = schedstat.split(' ').next()?.parse().ok()?;
        let name = path.file_name()?.to_str()?.to_owned();
        Some((name, (cpu_ns, number(&status, "voluntary_ctxt_switches:"))))
    };
    threads
        .filter_map(|thread| read(thread.unwrap().path()))
        .collect()
}

/// Nanoseconds of CPU time of a process since `before`, and how often its threads have gone to sleep.
pub fn since(pid: i32, before: &BTreeMap<String, (u64, u64)>) -> (u64, u64) {
    threads(pid).iter().fold((0, 0), |sum, (thread, after)| {
        let before = before.get(thread).copied().unwrap_or_default();
        (sum.0 + after.0 - before.0, sum.1 + after.1 - before.1)
    })
}

/// CPU time of the children of a process that have ended, in clock ticks of 10 ms (proc(5): cutime, cstime).
pub fn children(pid: i32) -> u64 {
    ticks(pid, 13, 2)
}

/// CPU time of a process and of its children that have ended, in clock ticks of 10 ms (proc(5): utime, stime, cutime, cstime).
pub fn processor_time(pid: i32) -> u64 {
    ticks(pid, 11, 4)
}

fn ticks(pid: i32, first: usize, count: usize) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let fields = rest.split_whitespace().skip(first).take(count);
    fields.map(|field| field.parse::<u64>().unwrap()).sum()
}

/// The number in a line "NAME   number …".
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
