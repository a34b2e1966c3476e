//! Two policies without state.

use super::machine::{Next, Policy, Worker};

/// Completions raise an interrupt at once; the worker sleeps as soon as there is nothing to do.
#[derive(Debug, Default)]
pub(super) struct NeverHold;

impl Policy for NeverHold {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        worker.disable();
        worker.signal();
        if completed + taken > 0 || worker.enable() {
            return Next::Poll;
        }
        Next::Sleep
    }
}

/// Completions raise an interrupt at once; the worker never sleeps, but gives its processor up between two polls.
#[derive(Debug, Default)]
pub(super) struct AlwaysPoll;

impl Policy for AlwaysPoll {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        worker.disable();
        worker.signal();
        if completed + taken > 0 {
            return Next::Poll;
        }
        Next::Yield
    }
}
