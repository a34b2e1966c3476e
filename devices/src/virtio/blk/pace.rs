//! When a worker looks at the ring for a while before it asks for a notification, and when it lets answers pile up for
//! one interrupt. Policy only: time comes in.
//!
//! A notification makes a vCPU leave the guest, which costs more than all the rest of a small request. A driver that was
//! just answered often has the next request soon. How soon is learnt: when a notification comes shortly after the
//! answers were told, the window in which the worker looks grows until it covers that time; when one comes late, there
//! is no window any more. A disk that is used now and then, or not at all, is never looked at.
//!
//! After the first moments the worker yields its processor between two looks, as it may be the one that the vCPU needs.
//! Is it taken away for long, then there are more threads than processors, and a worker that is woken gets on sooner than
//! one that yields: it stops looking, and does not learn for a while.

use std::time::{Duration, Instant};

/// The smallest window.
const MIN_WINDOW: Duration = Duration::from_micros(25);
/// The largest one; what takes longer is not waited for. A guest on a nested hypervisor, where an exit takes 40 µs, takes
/// about half of it from interrupt to next request.
const MAX_WINDOW: Duration = Duration::from_micros(250);

/// A yield that takes longer went to somebody else who is busy.
const CONTENDED: Duration = Duration::from_micros(50);
/// Notifications that nothing is learnt from after that.
const REST: u32 = 256;

/// So long the worker looks without yielding: a driver that polls answers in that time, and a yield costs as much as a
/// request that the page cache answers.
const AT_ONCE: Duration = Duration::from_micros(10);

/// With so many requests under way, answers wait for others a moment.
const MANY: usize = 8;
/// How long at most: half of what an interrupt costs a guest on a nested hypervisor, and little beside the latency of
/// a disk that has so many requests under way. It is spent looking, so it must not be long.
const MAX_PILE: Duration = Duration::from_micros(20);

/// What to do when there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Go to sleep.
    No,
    /// Look again at once.
    Now,
    /// Let others run, then look again.
    Yield,
}

/// What one worker has learnt.
#[derive(Debug, Default)]
pub(super) struct Pace {
    window: Duration,
    /// When the driver was last told of answers, if it has owed requests since.
    told: Option<Instant>,
    /// Answers after which no request has come yet.
    owed: usize,
    /// The last look, if nothing has happened since.
    looked: Option<Instant>,
    /// Notifications that nothing is learnt from.
    rest: u32,
}

impl Pace {
    /// The driver was told of that many answers.
    pub(super) fn told(&mut self, answers: usize, now: Instant) {
        self.owed = self.owed.saturating_add(answers);
        self.told = Some(now);
        self.looked = None;
    }

    /// That many requests were taken.
    pub(super) fn taken(&mut self, requests: usize) {
        self.owed = self.owed.saturating_sub(requests);
        self.looked = None;
    }

    /// The worker slept and was notified.
    pub(super) fn notified(&mut self, now: Instant) {
        let Some(told) = self.told.take() else {
            return;
        };
        if let Some(rest) = self.rest.checked_sub(1) {
            self.rest = rest;
            return;
        }
        let gap = now.saturating_duration_since(told);
        self.window = if gap > MAX_WINDOW {
            Duration::ZERO
        } else if gap > self.window {
            self.window.saturating_mul(2).max(MIN_WINDOW).min(MAX_WINDOW)
        } else {
            self.window
        };
    }

    /// Whether it is worth asking for the time.
    pub(super) fn may_look(&self) -> bool {
        self.owed > 0 && !self.window.is_zero() && self.told.is_some()
    }

    /// Whether to look at the ring again instead of going to sleep, and how.
    pub(super) fn look_again(&mut self, now: Instant) -> Look {
        let last = self.looked.replace(now).unwrap_or(now);
        if now.saturating_duration_since(last) > CONTENDED {
            self.window = Duration::ZERO;
            self.rest = REST;
        }
        match self.told.map(|told| now.saturating_duration_since(told)) {
            Some(since) if self.may_look() && since < self.window => {
                if since < AT_ONCE {
                    Look::Now
                } else {
                    Look::Yield
                }
            }
            _ => Look::No,
        }
    }

    /// Nothing is known any more.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Whether answers, the first of which is ready since `since`, wait for more: with many others under way, until they
/// are a quarter as many.
pub(super) fn pile_up(answers: usize, under_way: usize, since: Instant, now: Instant) -> bool {
    may_pile_up(answers, under_way) && now.saturating_duration_since(since) < MAX_PILE
}

/// Whether it is worth asking for the time.
pub(super) fn may_pile_up(answers: usize, under_way: usize) -> bool {
    answers > 0 && is_many(under_way) && answers.saturating_mul(4) < under_way
}

/// Whether so many are under way that others complete soon.
pub(super) fn is_many(under_way: usize) -> bool {
    under_way >= MANY
}

/// How many requests a driver may add without notifying, when completions of others will make the worker look anyway.
pub(super) fn unnotified(under_way: usize) -> u16 {
    u16::try_from(under_way.wrapping_div(2)).unwrap_or(u16::MAX)
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn the_window_grows_to_cover_quick_successions_and_only_them() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        pace.told(1, now);
        assert_eq!(
            pace.look_again(now),
            Look::No,
            "looked without having learnt anything"
        );
        for window in [25, 50, 100, 200, 200] {
            now += 150 * US;
            pace.notified(now);
            pace.taken(1);
            pace.told(1, now);
            assert_eq!(pace.look_again(now + (window - 1) * US), Look::Yield, "{window}");
            assert_eq!(pace.look_again(now + window * US), Look::No, "{window}");
            assert_eq!(pace.look_again(now + window * US), Look::No, "{window}");
        }
        pace.notified(now + 1000 * US);
        pace.told(1, now);
        assert_eq!(pace.look_again(now), Look::No);
    }

    #[test]
    fn a_worker_that_loses_its_processor_stops_looking_for_a_while() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let mut round = |pace: &mut Pace| {
            pace.told(1, now);
            let looks = pace.look_again(now) != Look::No;
            now += 120 * US;
            let looks_on = looks && pace.look_again(now) != Look::No;
            pace.notified(now);
            pace.taken(1);
            (looks, looks_on)
        };
        for expected in [(false, false), (true, false)] {
            assert_eq!(round(&mut pace), expected);
        }
        for _ in 0..REST {
            assert_eq!(round(&mut pace), (false, false));
        }
        assert_eq!(round(&mut pace), (true, false), "it may learn again");
    }

    #[test]
    fn nobody_is_looked_for_who_owes_nothing() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        pace.told(2, now);
        pace.notified(now + 10 * US);
        pace.taken(1);
        pace.told(0, now);
        assert_eq!(pace.look_again(now), Look::Now);
        pace.taken(1);
        assert_eq!(pace.look_again(now), Look::No);
    }

    #[test]
    fn answers_pile_up_only_with_many_requests_under_way_and_not_for_long() {
        let now = Instant::now();
        assert!(!pile_up(1, 0, now, now) && !pile_up(1, 7, now, now) && !pile_up(0, 100, now, now));
        assert!(pile_up(1, 8, now, now) && pile_up(3, 16, now, now) && !pile_up(4, 16, now, now));
        assert!(!pile_up(1, 8, now, now + MAX_PILE));
        assert_eq!((unnotified(1), unnotified(3), unnotified(32)), (0, 1, 16));
    }
}
