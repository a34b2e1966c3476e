//! Whether it pays to have requests wait in the ring until others are there or one completes: found out by doing both in turn.
//!
//! Where the driver is what everybody waits for, each notification costs it time, and a request that waits in the ring costs
//! nothing: others keep it busy. Where the disk is, two drivers' threads that wait for each other's requests would halve
//! what it does. From here both look alike but for how many requests come in a time.

use std::time::{Duration, Instant};

use super::{learn, nanos};

/// Requests after which a trial says something.
const LENGTH: usize = 128;
/// After a silence as long as that it says nothing: it begins anew.
const SILENCE: Duration = Duration::from_millis(4);
/// Trials of what is better before the other is tried again.
const OFTEN: u32 = 32;
/// The same where the other was far worse.
const SELDOM: u32 = 64;

/// A trial, and what came of those before.
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
    /// The one before was of the other kind: what is known of this kind is old.
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
        // What is hardly worse in time is better in all else.
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
