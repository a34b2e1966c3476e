//! Cost of a disk request: the same fio jobs in the same guest under each subject, with KVM's
//! counters and the process' CPU time.
//!
//! The speed of an emulated machine varies from second to second, which would look like a
//! difference between the subjects. Therefore all guests are up with the same job under way, and
//! one at a time runs for a slice while the others are stopped. The figures exclude the begin and
//! the end of a job.
//!
//! An emulated processor may hang a guest: it delivers an interrupt while interrupts are off, and
//! the guest's kernel then waits forever for a lock that it holds itself. Such a turn does not
//! count, and its subject is reported. The same applies to a guest that does not boot.

pub mod counters;
mod guest;
mod job;

use std::{collections::BTreeMap, ops::Range, time::Duration};

use anyhow::{Result, ensure};
use serde::Serialize;

use self::{
    counters::Counters,
    guest::{Guest, StoodStill},
    job::{JOBS, Job},
};
use crate::vmm::Subject;

/// How often each guest runs in a turn.
const SLICES: u32 = 6;

/// Costs of one job in one turn.
#[derive(Serialize)]
pub struct Cost {
    job: &'static str,
    requests: u64,
    us_per_request: f64,
    exits_per_request: f64,
    /// CPU time of the VMM's process beside that in which the guest ran, in all its threads.
    host_cpu_us_per_request: f64,
    /// KVM's counters that moved, `exits` also among them.
    kvm_per_request: BTreeMap<String, f64>,
}

/// Maximum number of reboots of all guests within a job.
const MAX_FALLS: u32 = 5;

/// Report of [`run`].
pub enum News {
    /// A job's cost in a turn.
    Cost(Box<Cost>),
    /// The guest hung, in a turn, which does not count, or before it. All guests are rebooted.
    StoodStill {
        /// The job.
        job: &'static str,
    },
}

/// Boots all subjects' guests, and runs all jobs whose name contains `wanted` on their disks for
/// the given number of turns. Passes each event to `each`, with the subject and the turn.
pub fn run(subjects: &[&Subject], wanted: &str, turns: u32, each: impl Fn(&str, u32, News)) -> Result<()> {
    let mut up = None;
    for job in JOBS.iter().filter(|job| job.name.contains(wanted)) {
        let mut left = 0..turns;
        let mut falls = 0;
        while left.start < left.end {
            match some_turns(up.take(), subjects, job, &mut left, &each) {
                Ok(guests) => up = Some(guests),
                Err(error) => {
                    let still: StoodStill = error.downcast()?;
                    each(still.subject, left.start, News::StoodStill { job: job.name });
                    falls += 1;
                    ensure!(
                        falls < MAX_FALLS,
                        "guests stand still again and again in {}",
                        job.name
                    );
                }
            }
        }
    }
    Ok(())
}

/// Runs a job in turns on the guests in `up`, or on newly booted ones, until all turns are done or
/// a guest hangs.
fn some_turns<'a>(
    up: Option<Vec<Guest<'a>>>,
    subjects: &[&'a Subject],
    job: &Job,
    left: &mut Range<u32>,
    each: impl Fn(&str, u32, News),
) -> Result<Vec<Guest<'a>>> {
    let mut guests = up.map_or_else(|| boot(subjects), Ok)?;
    guests.iter_mut().try_for_each(|guest| guest.begin(job))?;
    while left.start < left.end {
        turn(&mut guests, job, |subject, cost| {
            each(subject, left.start, News::Cost(Box::new(cost)));
        })?;
        left.next();
    }
    guests.iter_mut().try_for_each(Guest::end)?;
    Ok(guests)
}

/// Boots them beside each other; all are stopped then.
fn boot<'a>(subjects: &[&'a Subject]) -> Result<Vec<Guest<'a>>> {
    let mut guests: Vec<Guest<'_>> = subjects
        .iter()
        .map(|subject| Guest::new(subject))
        .collect::<Result<_>>()?;
    guests.iter_mut().try_for_each(Guest::settle)?;
    Ok(guests)
}

/// Runs one turn of all guests. If a guest hangs, the turn reports no costs.
fn turn(guests: &mut [Guest<'_>], job: &Job, each: impl Fn(&str, Cost)) -> Result<()> {
    let mut order: Vec<usize> = (0..guests.len()).collect();
    let mut sums = vec![(Duration::ZERO, Counters::default()); guests.len()];
    for slice in 0..SLICES {
        for number in &order {
            if let (Some(guest), Some((time, sum))) = (guests.get_mut(*number), sums.get_mut(*number)) {
                let (took, cost) = guest.slice(job)?;
                *time += took;
                sum.add(&cost);
            }
        }
        // None is always the one that comes after the same other.
        if slice % 2 == 0 {
            order.reverse();
        } else {
            order.rotate_left(1);
        }
    }
    for (guest, (time, sum)) in guests.iter().zip(sums) {
        each(guest.subject.name, cost(job, time, sum));
    }
    Ok(())
}

/// For each request. There were some.
#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn cost(job: &Job, time: Duration, sum: Counters) -> Cost {
    let requests = job.requests(sum.disk_bytes);
    let each = |value: f64| value / requests as f64;
    let kvm: BTreeMap<String, f64> = sum
        .kvm
        .into_iter()
        .map(|(name, by)| (name, each(by as f64)))
        .collect();
    Cost {
        job: job.name,
        requests,
        us_per_request: each(time.as_secs_f64() * 1e6),
        exits_per_request: kvm.get("exits").copied().unwrap_or(0.0),
        host_cpu_us_per_request: each(sum.cpu_us),
        kvm_per_request: kvm,
    }
}
