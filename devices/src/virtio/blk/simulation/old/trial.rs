//! Trials of letting requests wait in the ring until more arrive or one completes. The worker
//! measures both kinds in turn.
//!
//! If the driver is the bottleneck, each notification costs it time, and a request that waits in
//! the ring costs nothing, because the driver has other work. If the disk is the bottleneck,
//! waiting could halve the throughput of two driver threads that depend on each other's requests.
//! The worker can distinguish the two cases only by the rate of requests.

use std::time::{Duration, Instant};

use super::{learn, nanos};

/// Requests after which a trial says something.
const LENGTH: usize = 128;
/// After a silence as long as that it says nothing: it begins anew.
const SILENCE: Duration = Duration::from_millis(4);
/// Trials of the better kind before the worker tries the other kind again.
const OFTEN: u32 = 32;
/// The same where the other was far worse.
const SELDOM: u32 = 64;

/// State of the current trial, and results of earlier trials.
#[derive(Debug, Default)]
pub(super) struct Trial {
    /// Requests may wait in it.
    waiting: bool,
    begin: Option<Instant>,
    last: Option<Instant>,
    requests: usize,
    /// From one request to the next in nanoseconds, on average of the last trials without waiting and with it; 0 when there
    /// was none.
    cost: [u64; 2],
    /// The previous trial was of the other kind, so the result of this kind is outdated.
    first: bool,
    /// Trials before the other is tried.
    left: u32,
}

impl Trial {
    /// Whether requests may wait.
    pub(super) fn may_wait(&self) -> bool {
        self.waiting
    }

    /// So many requests were taken.
    pub(super) fn taken(&mut self, requests: usize, now: Instant) {
        let silent = self
            .last
            .replace(now)
            .is_none_or(|last| now.saturating_duration_since(last) >= SILENCE);
        let (Some(begin), false) = (self.begin, silent) else {
            self.begin = Some(now);
            self.requests = 0;
            return;
        };
        self.requests = self.requests.saturating_add(requests);
        if self.requests < LENGTH {
            return;
        }
        let took = nanos(now.saturating_duration_since(begin));
        let each = took.checked_div(self.requests as u64).unwrap_or(0).max(1);
        let [apart, waiting] = &mut self.cost;
        let cost = if self.waiting { waiting } else { apart };
        if std::mem::take(&mut self.first) || *cost == 0 {
            *cost = each;
        } else {
            // The last ones count most.
            learn(cost, each);
            learn(cost, each);
        }
        self.begin = Some(now);
        self.requests = 0;
        let before = self.waiting;
        self.decide();
        self.first = self.waiting != before;
    }

    /// Whether the next trial is of the same kind.
    fn decide(&mut self) {
        let [apart, waiting] = self.cost;
        if apart == 0 || waiting == 0 {
            self.waiting = !self.waiting;
            return;
        }
        // A kind that costs slightly more time per request is better in all other respects.
        let better = waiting <= apart.saturating_add(apart.wrapping_div(16));
        if self.waiting != better {
            self.waiting = better;
            let far = apart.abs_diff(waiting) > apart.wrapping_div(8);
            self.left = if far { SELDOM } else { OFTEN };
            return;
        }
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.waiting = !better,
        }
    }
}
