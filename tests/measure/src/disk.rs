//! What a request to a disk costs: the same fio jobs in the same guest under each subject, with KVM's counters and the
//! process' CPU time around each job.
//!
//! All guests are up all the time, and a short job goes through all of them before it is its next turn: how fast such a
//! machine is changes within a minute, and would else be taken for a difference between the subjects.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde::Serialize;

use crate::{kvm_stats, run::Running, vmm::Subject};

/// How often fio is started for nothing, to know what that costs.
const STARTS: u32 = 3;

/// A fio job. `requests` of it are what everything is divided by.
struct Job {
    name: &'static str,
    options: &'static str,
    block_kib: u64,
    requests: u64,
}

/// What it costs is the cost of fio's start.
const START: Job = Job {
    name: "start",
    options: "--rw=randread",
    block_kib: 4,
    requests: 1,
};

/// Each transfers a fixed number of bytes.
const JOBS: [Job; 7] = [
    Job {
        name: "randread-qd1",
        options: "--rw=randread",
        block_kib: 4,
        requests: 750,
    },
    Job {
        name: "randwrite-qd1",
        options: "--rw=randwrite",
        block_kib: 4,
        requests: 750,
    },
    Job {
        name: "randread-qd32",
        options: "--rw=randread --iodepth=32",
        block_kib: 4,
        requests: 3000,
    },
    Job {
        name: "randwrite-qd32",
        options: "--rw=randwrite --iodepth=32",
        block_kib: 4,
        requests: 3000,
    },
    Job {
        name: "read-128k",
        options: "--rw=read --iodepth=4",
        block_kib: 128,
        requests: 400,
    },
    Job {
        name: "write-128k",
        options: "--rw=write --iodepth=4",
        block_kib: 128,
        requests: 400,
    },
    Job {
        name: "write-fsync",
        options: "--rw=randwrite --fsync=1",
        block_kib: 4,
        requests: 200,
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
    /// KVM's counters that moved, `exits` also among them, without those of fio's start.
    kvm_per_request: BTreeMap<String, f64>,
}

/// A moment's counters of the process, or what they moved by.
#[derive(Clone, Default)]
struct Counters {
    kvm: kvm_stats::Counters,
    cpu_us: f64,
}

impl Counters {
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn read(pid: u32) -> Result<Self> {
        let kvm = kvm_stats::read(pid)?;
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
            kvm,
            cpu_us: host as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64,
        })
    }

    fn add(&mut self, other: &Self) {
        for (name, by) in &other.kvm {
            *self.kvm.entry(name.clone()).or_default() += by;
        }
        self.cpu_us += other.cpu_us;
    }

    fn divided_by(mut self, by: u32) -> Self {
        self.kvm.values_mut().for_each(|value| *value /= u64::from(by));
        self.cpu_us /= f64::from(by);
        self
    }

    fn since(&self, before: &Self) -> Self {
        let moved = |(name, after): (&String, &u64)| {
            let by = after.saturating_sub(before.kvm.get(name).copied().unwrap_or(0));
            (by > 0).then(|| (name.clone(), by))
        };
        Self {
            kvm: self.kvm.iter().filter_map(moved).collect(),
            cpu_us: (self.cpu_us - before.cpu_us).max(0.0),
        }
    }
}

/// Puts the process' vCPU on one processor and all its other threads, with those that they start, on another. Where the
/// scheduler has them on the same one a request takes half as long again, and it leaves them there for a whole job, or not:
/// that would be measured, and nothing else.
fn part(pid: u32) -> Result<()> {
    let allowed = sched_getaffinity(None).context("look which processors there are")?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (Some(vcpu), Some(others)) = (processors.next(), processors.next()) else {
        bail!("two processors are needed, one for the guest and one for its VMM");
    };
    let mut found = false;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("list the threads")? {
        let task = task?;
        let name = fs::read_to_string(task.path().join("comm")).context("read a thread's name")?;
        // Ours, and QEMU's.
        let is_vcpu = name.starts_with("vcpu-") || name.contains("/KVM");
        found |= is_vcpu;
        let mut set = CpuSet::new();
        set.set(if is_vcpu { vcpu } else { others });
        let thread = task.file_name().to_string_lossy().parse().ok();
        let thread = thread.and_then(Pid::from_raw).context("a thread's number")?;
        sched_setaffinity(Some(thread), &set).context("place a thread")?;
    }
    ensure!(found, "no thread is called like a vCPU's");
    Ok(())
}

/// A subject's guest, which waits for jobs.
struct Guest<'a> {
    subject: &'a Subject,
    running: Running,
    /// What fio's start costs.
    start: Counters,
}

impl<'a> Guest<'a> {
    fn job(&mut self, job: &Job) -> Result<(Cost, Counters)> {
        job.run(&mut self.running, &self.start)
            .with_context(|| format!("{}: {}", self.subject.name, job.name))
    }

    /// Begins to boot.
    fn new(subject: &'a Subject) -> Result<Self> {
        Ok(Self {
            subject,
            running: Running::new(subject)?,
            start: Counters::default(),
        })
    }

    /// Waits until it is up, and has each thread stay where it is.
    fn settle(&mut self) -> Result<()> {
        self.running
            .wait_for("GUEST-READY")
            .with_context(|| format!("{} boots", self.subject.name))?;
        part(self.running.pid())
    }

    /// Learns what fio's start costs.
    fn learn(&mut self) -> Result<()> {
        // The first one reads the program.
        self.job(&START)?;
        let mut sum = Counters::default();
        for _ in 0..STARTS {
            sum.add(&self.job(&START)?.1);
        }
        self.start = sum.divided_by(STARTS);
        Ok(())
    }
}

/// Boots all subjects' guests once and runs on their disks all jobs whose name contains `wanted`, `turns` times each.
/// `each` is told of each cost, and of the turn.
pub fn run(
    subjects: &[&Subject],
    wanted: &str,
    turns: u32,
    each: impl Fn(&Subject, u32, Cost),
) -> Result<()> {
    let mut guests: Vec<Guest<'_>> = subjects
        .iter()
        .map(|subject| Guest::new(subject))
        .collect::<Result<_>>()?;
    guests.iter_mut().try_for_each(Guest::settle)?;
    guests.iter_mut().try_for_each(Guest::learn)?;
    for job in JOBS.iter().filter(|job| job.name.contains(wanted)) {
        for turn in 0..turns {
            for guest in &mut guests {
                let (cost, _) = guest.job(job)?;
                each(guest.subject, turn, cost);
            }
            // None is always the one that comes after the same other.
            if turn % 2 == 0 {
                guests.reverse();
            } else {
                guests.rotate_left(1);
            }
        }
    }
    Ok(())
}

impl Job {
    /// Returns also what the whole of it cost.
    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
    fn run(&self, running: &mut Running, start: &Counters) -> Result<(Cost, Counters)> {
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
        let whole = after.since(&before);
        let own = whole.since(start);
        let kvm = own.kvm.into_iter();
        let kvm: BTreeMap<String, f64> = kvm.map(|(name, by)| (name, by as f64 / requests)).collect();
        let cost = Cost {
            job: self.name,
            requests: self.requests,
            us_per_request: milliseconds as f64 * 1000.0 / requests,
            exits_per_request: kvm.get("exits").copied().unwrap_or(0.0),
            host_cpu_us_per_request: own.cpu_us / requests,
            kvm_per_request: kvm,
        };
        Ok((cost, whole))
    }
}
