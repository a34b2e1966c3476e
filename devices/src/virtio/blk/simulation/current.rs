//! The policy itself, with the part of the worker that asks it.

use super::{
    super::pace::{MANY, Pace},
    machine::{Next, Policy, Worker},
};

#[derive(Debug, Default)]
pub(super) struct Current {
    pace: Pace,
}

impl Policy for Current {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        worker.disable();
        self.pace.found(completed, taken, worker.now());
        let held = self.pace.holds(worker.in_flight(), worker.now());
        if !held && self.pace.held() > 0 {
            worker.signal();
            self.pace.signalled();
        }
        let busy = completed + taken > 0;
        let sleeps_on = taken > 0 && !held && worker.in_flight() < MANY && !self.pace.may_poll(true);
        if busy && !sleeps_on {
            return Next::Poll;
        }
        let in_flight = worker.in_flight() > 0;
        if !busy && (held || self.pace.polls(in_flight, worker.now())) {
            return Next::Yield;
        }
        if worker.enable(0) {
            return Next::Poll;
        }
        self.pace.sleeps(in_flight, worker.now());
        Next::Sleep {
            completions: 1,
            limit: None,
        }
    }
}
