//! The policy itself, with the part of the worker that asks it.

use super::{
    super::worker::{self, HOLD_PART, Pace, Round},
    machine::{Next, Policy, Worker},
};

#[derive(Debug, Default)]
pub(super) struct Current {
    pace: Pace,
}

impl Policy for Current {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        round(&mut self.pace, worker, [completed, taken], |pace, worker| {
            pace.holds(worker.in_flight(), worker.now())
        })
    }
}

/// The policy of a worker that knows what none can: how many requests the driver has, and whether it is busy. It holds
/// completions back whenever the rules allow it, which are a busy driver and a sixteenth of what requests take. Where
/// this is far from the best of the others, no policy that keeps the rules is near it.
#[derive(Debug, Default)]
pub(super) struct Informed {
    pace: Pace,
    taken: usize,
    unsignalled_since: Option<u64>,
}

impl Policy for Informed {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        self.taken += taken;
        let gap = worker.now() / self.taken.max(1) as u64;
        let limit = gap * worker.depth() as u64 / HOLD_PART;
        let mut since = self.unsignalled_since;
        let next = round(&mut self.pace, worker, [completed, taken], |pace, worker| {
            since = (pace.unsignalled() > 0).then(|| since.unwrap_or(worker.now()));
            since.is_some_and(|since| worker.driver_is_busy() && worker.now() - since < limit)
        });
        self.unsignalled_since = since.filter(|_| self.pace.unsignalled() > 0);
        next
    }
}

/// A round of the worker, in which `holds` says whether completions are held back.
fn round(
    pace: &mut Pace,
    worker: &mut Worker<'_>,
    [completed, taken]: [usize; 2],
    holds: impl FnOnce(&Pace, &Worker<'_>) -> bool,
) -> Next {
    worker.disable();
    if completed + taken > 0 {
        pace.found(completed, taken, worker.now());
    }
    let held = holds(pace, worker);
    if !held && pace.unsignalled() > 0 {
        worker.signal();
        pace.signalled();
    }
    let round = Round {
        completed,
        taken,
        in_flight: worker.in_flight(),
        bound: false,
        prompt: false,
    };
    match pace.next(&round, held, || worker.now()) {
        worker::Next::Again | worker::Next::Spin => return Next::Poll,
        worker::Next::Yield => return Next::Yield,
        worker::Next::Sleep => {}
    }
    if worker.enable() {
        return Next::Poll;
    }
    pace.sleeps(worker.in_flight() > 0, worker.now());
    Next::Sleep
}
