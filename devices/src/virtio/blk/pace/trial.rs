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

#[cfg(test)]
impl Trial {
    /// One in which requests may wait.
    pub(super) fn of_waiting() -> Self {
        Self {
            waiting: true,
            ..Self::default()
        }
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// Requests come one by one, and so far apart when they may not wait and when they may; gives the part of them that
    /// might.
    fn run(trial: &mut Trial, now: &mut Instant, requests: u32, apart: Duration, waiting: Duration) -> f64 {
        let mut might = 0;
        for _ in 0..requests {
            *now += if trial.may_wait() { waiting } else { apart };
            might += u32::from(trial.may_wait());
            trial.taken(1, *now);
        }
        f64::from(might) / f64::from(requests)
    }

    #[test]
    fn requests_wait_where_more_of_them_come_then_or_as_many() {
        for (apart, waiting, least, most) in [
            (100, 85, 0.9, 1.0),
            (100, 100, 0.9, 1.0),
            // Readers who wait for each other.
            (80, 160, 0.0, 0.03),
            (100, 110, 0.0, 0.1),
        ] {
            let (mut trial, mut now) = (Trial::default(), Instant::now());
            assert!(!trial.may_wait(), "nothing is known");
            run(&mut trial, &mut now, 1000, apart * US, waiting * US);
            let part = run(&mut trial, &mut now, 50_000, apart * US, waiting * US);
            assert!(part >= least && part <= most, "{apart} and {waiting}: {part}");
        }
    }

    #[test]
    fn another_load_is_found_out_about() {
        let (mut trial, mut now) = (Trial::default(), Instant::now());
        for _ in 0..3 {
            run(&mut trial, &mut now, 20_000, 100 * US, 80 * US);
            assert!(run(&mut trial, &mut now, 20_000, 100 * US, 80 * US) > 0.9);
            run(&mut trial, &mut now, 20_000, 80 * US, 160 * US);
            assert!(run(&mut trial, &mut now, 20_000, 80 * US, 160 * US) < 0.03);
        }
    }

    #[test]
    fn a_disk_that_is_used_now_and_then_says_nothing() {
        let (mut trial, mut now) = (Trial::default(), Instant::now());
        let part = run(&mut trial, &mut now, 10_000, SILENCE, SILENCE);
        assert!(part <= 0.0 && trial.cost == [0, 0], "{trial:?}");
    }
}
