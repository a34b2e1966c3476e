//! What a request to a disk costs: the same fio jobs in the same guest under each subject, with KVM's counters and the
//! process' CPU time around each job.

use std::fs;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{kvm_stats, run::Running, vmm::Subject};

/// A fio job. `requests` of it are what everything is divided by.
struct Job {
    name: &'static str,
    options: &'static str,
    block_kib: u64,
    requests: u64,
}

/// Each transfers a fixed number of bytes. A job of one request comes first: what it costs is the cost of fio's start.
const JOBS: [Job; 8] = [
    Job {
        name: "start",
        options: "--rw=randread",
        block_kib: 4,
        requests: 1,
    },
    Job {
        name: "randread-qd1",
        options: "--rw=randread",
        block_kib: 4,
        requests: 1500,
    },
    Job {
        name: "randwrite-qd1",
        options: "--rw=randwrite",
        block_kib: 4,
        requests: 1500,
    },
    Job {
        name: "randread-qd32",
        options: "--rw=randread --iodepth=32",
        block_kib: 4,
        requests: 6000,
    },
    Job {
        name: "randwrite-qd32",
        options: "--rw=randwrite --iodepth=32",
        block_kib: 4,
        requests: 6000,
    },
    Job {
        name: "read-128k",
        options: "--rw=read --iodepth=4",
        block_kib: 128,
        requests: 800,
    },
    Job {
        name: "write-128k",
        options: "--rw=write --iodepth=4",
        block_kib: 128,
        requests: 800,
    },
    Job {
        name: "write-fsync",
        options: "--rw=randwrite --fsync=1",
        block_kib: 4,
        requests: 400,
    },
];

/// What one job cost.
#[derive(Serialize)]
pub struct Cost {
    job: &'static str,
    requests: u64,
    /// By fio's own clock, from its first request to its last answer.
    us_per_request: f64,
    /// Without those of fio's start.
    exits_per_request: f64,
    /// CPU time of the VMM's process beside that in which the guest ran, in all its threads, without that of fio's start.
    host_cpu_us_per_request: f64,
}

/// A moment's counters of the process.
struct Counters {
    exits: u64,
    cpu_us: f64,
}

impl Counters {
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn read(pid: u32) -> Result<Self> {
        let exits = kvm_stats::read(pid)?.get("exits").copied().unwrap_or(0);
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
            fields
                .get(index)
                .and_then(|field| field.parse().ok())
                .unwrap_or(0u64)
        };
        let host = (ticks(11) + ticks(12)).saturating_sub(ticks(40));
        Ok(Self {
            exits,
            cpu_us: host as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64,
        })
    }
}

/// Boots the subject's guest once and runs all jobs on its first disk.
pub fn run(subject: &Subject) -> Result<Vec<Cost>> {
    let mut running = Running::new(subject)?;
    running
        .wait_for("GUEST-READY")
        .with_context(|| format!("{} boots", subject.name))?;
    let mut costs: Vec<Cost> = Vec::new();
    let mut start = (0.0, 0.0);
    for job in &JOBS {
        let (cost, exits, cpu) = job
            .run(&mut running, start)
            .with_context(|| format!("{}: {}", subject.name, job.name))?;
        if job.name == "start" {
            start = (exits, cpu);
        } else {
            costs.push(cost);
        }
    }
    Ok(costs)
}

impl Job {
    /// Returns also the exits and the CPU time of the whole.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn run(&self, running: &mut Running, start: (f64, f64)) -> Result<(Cost, f64, f64)> {
        let kib = self.block_kib * self.requests;
        // The counters are read between the two lines that the shell prints: what is typed and shown is outside of them.
        // fio's runtime in milliseconds is field 9 of its terse output for reads, 50 for writes (fio(1), TERSE OUTPUT).
        running.type_line(&format!(
            "echo READY-$((1 + 1)); read x; fio --name=j --filename=/dev/vda --direct=1 --ioengine=io_uring --bs={bs}k --size=100% \
             --io_size={kib}k --randrepeat=1 --norandommap {options} --output-format=terse >/tmp/fio 2>&1; echo DONE-$?-; read x; \
             cut -d';' -f9,50 /tmp/fio | sed 's/.*/RUNTIME;&;/'",
            bs = self.block_kib,
            options = self.options,
        ))?;
        running.wait_for("READY-2")?;
        let pid = running.pid();
        let before = Counters::read(pid)?;
        running.type_line("")?;
        let done = running.wait_for("DONE-")?;
        let after = Counters::read(pid)?;
        if !done.contains("DONE-0-") {
            running.type_line("; cat /tmp/fio; echo TOLD-$((1 + 1))")?;
            let text = running.text_until("TOLD-2")?;
            bail!("fio fails in the guest: {text}");
        }
        running.type_line("")?;
        let line = running.wait_for("RUNTIME;")?;
        let milliseconds: u64 = line
            .split(';')
            .filter_map(|field| field.trim().parse::<u64>().ok())
            .sum();
        let requests = self.requests as f64;
        let exits = after.exits.saturating_sub(before.exits) as f64;
        let cpu = after.cpu_us - before.cpu_us;
        let cost = Cost {
            job: self.name,
            requests: self.requests,
            us_per_request: milliseconds as f64 * 1000.0 / requests,
            exits_per_request: (exits - start.0).max(0.0) / requests,
            host_cpu_us_per_request: (cpu - start.1).max(0.0) / requests,
        };
        Ok((cost, exits, cpu))
    }
}
