//! The policy itself, with the part of the worker that asks it.

use super::{
    super::worker::{self, HOLD_PART, PollPolicy, Round},
    machine::{Next, Policy, Worker},
};

#[derive(Debug, Default)]
pub(super) struct Current {
    policy: PollPolicy,
}

impl Policy for Current {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        round(&mut self.policy, worker, [completed, taken], |policy, worker| {
            policy.holds(worker.in_flight(), worker.now())
        })
    }
}

/// The policy of a worker that knows what none can: how many requests the driver has, and whether it is busy. It holds
/// completions back whenever the rules allow it, which are a busy driver and a sixteenth of what requests take. Where
/// this is far from the best of the others, no policy that keeps the rules is near it.
#[derive(Debug, Default)]
pub(super) struct Informed {
    policy: PollPolicy,
    taken: usize,
    unsignalled_since: Option<u64>,
}

impl Policy for Informed {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        self.taken += taken;
        let gap = worker.now() / self.taken.max(1) as u64;
        let limit = gap * worker.depth() as u64 / HOLD_PART;
        let mut since = self.unsignalled_since;
        let next = round(&mut self.policy, worker, [completed, taken], |policy, worker| {
            since = (policy.unsignalled() > 0).then(|| since.unwrap_or(worker.now()));
            since.is_some_and(|since| worker.driver_is_busy() && worker.now() - since < limit)
        });
        self.unsignalled_since = since.filter(|_| self.policy.unsignalled() > 0);
        next
    }
}

/// A round of the worker, in which `holds` says whether completions are held back.
fn round(
    policy: &mut PollPolicy,
    worker: &mut Worker<'_>,
    [completed, taken]: [usize; 2],
    holds: impl FnOnce(&PollPolicy, &Worker<'_>) -> bool,
) -> Next {
    worker.disable();
    if completed + taken > 0 {
        policy.found(completed, taken, worker.now());
    }
    let held = holds(policy, worker);
    if !held && policy.unsignalled() > 0 {
        worker.signal();
        policy.signalled();
    }
    let round = Round {
        completed,
        taken,
        in_flight: worker.in_flight(),
        bound: false,
        prompt: false,
    };
    match policy.next(&round, held, || worker.now()) {
        worker::Next::Again | worker::Next::Spin => return Next::Poll,
        worker::Next::Yield => return Next::Yield,
        worker::Next::Sleep => {}
    }
    if worker.enable() {
        return Next::Poll;
    }
    policy.sleeps(worker.in_flight() > 0, worker.now());
    Next::Sleep
}
