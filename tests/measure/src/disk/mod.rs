//! What a request to a disk costs: the same fio jobs in the same guest under each subject, with KVM's counters and the
//! process' CPU time beside them.
//!
//! How fast an emulated machine is changes from second to second, and would be taken for a difference between the
//! subjects. So all guests are up with the same job under way, and one at a time runs for a moment while the others are
//! stopped. Nothing of a job's beginning and end is in the figures.
//!
//! An emulated processor may let a guest down: an interrupt while these are off, after which its kernel waits for ever for a
//! lock that it holds itself. Such a turn does not count, and it is told whose guest it was.

mod counters;
mod guest;
mod job;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, ensure};
use serde::Serialize;

use self::{counters::Counters, guest::Guest, job::JOBS};
use crate::vmm::Subject;

/// How often each guest runs in a turn.
const SLICES: u32 = 6;

/// What one job cost in one turn.
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

/// So many times all may have to be booted anew within a job.
const MAX_FALLS: u32 = 5;

/// What [`run`] tells of.
pub enum News {
    /// A job's cost in a turn.
    Cost(Box<Cost>),
    /// The guest did nothing any more in a turn, which does not count. All are booted anew.
    StoodStill {
        /// The job.
        job: &'static str,
    },
}

/// Boots all subjects' guests and runs on their disks all jobs whose name contains `wanted`, for that many turns. `each` is
/// told what happened in which turn.
pub fn run(
    subjects: &[&Subject],
    wanted: &str,
    turns: u32,
    each: impl Fn(&Subject, u32, News),
) -> Result<()> {
    let mut up: Option<Vec<Guest<'_>>> = None;
    for job in JOBS.iter().filter(|job| job.name.contains(wanted)) {
        let (mut turn, mut falls) = (0, 0);
        while turn < turns {
            let mut guests = match up.take() {
                Some(guests) => guests,
                None => boot(subjects)?,
            };
            guests.iter_mut().try_for_each(|guest| guest.begin(job))?;
            let mut still = None;
            while turn < turns && still.is_none() {
                still = self::turn(&mut guests, job, |subject, cost| {
                    each(subject, turn, News::Cost(Box::new(cost)));
                })?;
                turn += u32::from(still.is_none());
            }
            if let Some(subject) = still {
                each(subject, turn, News::StoodStill { job: job.name });
                falls += 1;
                ensure!(
                    falls < MAX_FALLS,
                    "guests stand still again and again in {}",
                    job.name
                );
            } else {
                guests.iter_mut().try_for_each(Guest::end)?;
                up = Some(guests);
            }
        }
    }
    Ok(())
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

/// One turn of all; gives the first that did nothing, and tells of no cost then.
fn turn<'a>(
    guests: &mut [Guest<'a>],
    job: &job::Job,
    each: impl Fn(&Subject, Cost),
) -> Result<Option<&'a Subject>> {
    let mut order: Vec<usize> = (0..guests.len()).collect();
    let mut sums = vec![(Duration::ZERO, Counters::default()); guests.len()];
    for slice in 0..SLICES {
        'guests: for number in &order {
            let (Some(guest), Some((time, sum))) = (guests.get_mut(*number), sums.get_mut(*number)) else {
                continue;
            };
            // The host may have taken the processor away for all of one.
            for _ in 0..2 {
                let (took, cost) = guest.slice()?;
                *time += took;
                sum.add(&cost);
                if job.requests(cost.disk_bytes) > 0 {
                    continue 'guests;
                }
            }
            return Ok(Some(guest.subject));
        }
        // None is always the one that comes after the same other.
        if slice % 2 == 0 {
            order.reverse();
        } else {
            order.rotate_left(1);
        }
    }
    for (guest, (time, sum)) in guests.iter().zip(sums) {
        each(guest.subject, cost(job, time, sum));
    }
    Ok(None)
}

/// For each request. There were some.
#[allow(clippy::cast_precision_loss, reason = "small numbers")]
fn cost(job: &job::Job, time: Duration, sum: Counters) -> Cost {
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
