//! What the policy is compared with: the pace that this one replaced, never holding back, always polling.

use std::time::{Duration, Instant};

use super::{
    machine::{Next, Policy, Worker},
    old::{self, Doze, Look, Pile},
};

/// Completions raise an interrupt at once; the worker sleeps as soon as there is nothing to do.
#[derive(Debug, Default)]
pub(super) struct NeverHold;

impl Policy for NeverHold {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        worker.disable();
        worker.signal();
        if completed + taken > 0 || worker.enable(0) {
            return Next::Poll;
        }
        Next::Sleep {
            completions: 1,
            limit: None,
        }
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

/// The pace of before, with the part of the worker that it was made for.
pub(super) struct Old {
    pace: old::Pace,
    begin: Instant,
    untold: usize,
    untold_since: Option<u64>,
    dozed: bool,
}

impl Old {
    pub(super) fn new() -> Self {
        Self {
            pace: old::Pace::default(),
            begin: Instant::now(),
            untold: 0,
            untold_since: None,
            dozed: false,
        }
    }

    fn at(&self, now: u64) -> Instant {
        self.begin + Duration::from_nanos(now)
    }

    fn tell(&mut self, worker: &mut Worker<'_>) {
        self.untold_since = None;
        if std::mem::take(&mut self.untold) == 0 {
            return;
        }
        let before = worker.now();
        if worker.signal() {
            self.pace.interrupted(Duration::from_nanos(worker.now() - before));
        } else {
            self.pace.unwanted();
        }
        self.pace.told(self.at(worker.now()));
    }

    fn piles_up(&mut self, worker: &mut Worker<'_>) -> Option<Next> {
        let under_way = worker.in_flight();
        if worker.notified || !self.pace.may_pile_up(self.untold, under_way) {
            return None;
        }
        let (now, since) = (self.at(worker.now()), self.untold_since.unwrap_or(worker.now()));
        let since = self.at(since);
        match self.pace.pile_up(self.untold, under_way, since, now) {
            Pile::No => None,
            Pile::Look => Some(Next::Poll),
            Pile::Sleep {
                more,
                limit,
                unnotified,
            } => {
                if let Some(unnotified) = unnotified
                    && worker.enable(unnotified.into())
                {
                    worker.disable();
                    return Some(Next::Poll);
                }
                Some(Next::Sleep {
                    completions: under_way.clamp(1, more),
                    limit: Some(old::nanos(limit)),
                })
            }
        }
    }
}

impl Policy for Old {
    fn round(&mut self, worker: &mut Worker<'_>, completed: usize, taken: usize) -> Next {
        worker.disable();
        if worker.notified {
            self.pace.notified(self.at(worker.now()));
        }
        for _ in 0..completed {
            self.pace.answered();
            self.untold += 1;
            self.untold_since.get_or_insert(worker.now());
        }
        let busy = completed + taken > 0;
        if self.dozed && completed == 0 && !worker.notified {
            self.pace.overslept(taken);
        }
        self.dozed &= !busy;
        if taken > 0 {
            self.pace.taken(taken, self.at(worker.now()));
        }
        let under_way = worker.in_flight();
        if self.pace.is_enough(self.untold, under_way) {
            self.tell(worker);
        }
        let sleeps_on = taken > 0 && !old::is_many(under_way) && !self.pace.may_look();
        if busy && !sleeps_on {
            return Next::Poll;
        }
        if !busy && let Some(next) = self.piles_up(worker) {
            return next;
        }
        self.tell(worker);
        if !busy && self.pace.may_look() {
            match self.pace.look_again(self.at(worker.now())) {
                Look::No => {}
                Look::Now => return Next::Poll,
                Look::Yield => return Next::Yield,
            }
        }
        if !worker.notified
            && !self.dozed
            && let Some(Doze { unnotified, limit }) = self.pace.doze(under_way)
        {
            if worker.enable(unnotified.into()) {
                worker.disable();
                return Next::Poll;
            }
            self.dozed = true;
            return Next::Sleep {
                completions: 1,
                limit: Some(old::nanos(limit)),
            };
        }
        if worker.enable(0) {
            return Next::Poll;
        }
        Next::Sleep {
            completions: 1,
            limit: None,
        }
    }
}
