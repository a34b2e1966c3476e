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

/// When the driver has so many requests, answers wait for others a moment.
const MANY: usize = 8;
/// For that part of what requests take at most, since it is what the disk's latency grows by.
const PILE_PART: u64 = 4;
/// And for so many times what it takes to send an interrupt, which is what is saved, to us and more so to the guest: a
/// microsecond where the processor delivers it, a hundred on a nested hypervisor.
const WORTH: u64 = 32;
/// So long they may always wait. It is spent looking, as to go to sleep and to wake up takes as long.
const MIN_PILE: Duration = Duration::from_micros(20);
/// And never longer than that.
const MAX_PILE: Duration = Duration::from_millis(2);

/// What to do with answers that the driver was not told of, when nothing else is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pile {
    /// Tell.
    No,
    /// Look for others at once.
    Look,
    /// Sleep until there are so many more, but no longer than that.
    Sleep(usize, Duration),
}

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
    /// What reads and writes take, on average, in nanoseconds.
    latency: u64,
    /// What it takes to send an interrupt, on average, in nanoseconds.
    interrupt: u64,
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

    /// A read or a write took so many nanoseconds.
    pub(super) fn took(&mut self, nanos: u64) {
        learn(&mut self.latency, nanos);
    }

    /// It took so many nanoseconds to send an interrupt.
    pub(super) fn interrupted(&mut self, nanos: u64) {
        learn(&mut self.interrupt, nanos);
    }

    /// How long answers wait for others at most.
    fn patience(&self) -> Duration {
        let part = self.latency.wrapping_div(PILE_PART);
        let worth = self.interrupt.saturating_mul(WORTH);
        Duration::from_nanos(part.min(worth)).clamp(MIN_PILE, MAX_PILE)
    }

    /// Whether answers, the first of which waits for so long already, wait for more: with many others under way or soon
    /// expected, until they are a quarter of all.
    pub(super) fn pile_up(&mut self, answers: usize, under_way: usize, waited: Duration) -> Pile {
        let all = answers.saturating_add(under_way).saturating_add(self.owed);
        let wanted = all.div_ceil(4);
        if answers == 0 || all < MANY || answers >= wanted {
            return Pile::No;
        }
        let patience = self.patience();
        let left = patience.saturating_sub(waited);
        if left.is_zero() {
            // The driver may have less to do than before.
            self.owed = self.owed.wrapping_div(2);
            Pile::No
        } else if patience <= MIN_PILE {
            Pile::Look
        } else {
            Pile::Sleep(wanted.saturating_sub(answers), left)
        }
    }

    /// Whether it is worth asking for the time.
    pub(super) fn may_pile_up(&self, answers: usize, under_way: usize) -> bool {
        answers > 0 && answers.saturating_add(under_way).saturating_add(self.owed) >= MANY
    }

    /// Nothing is known any more.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Moves an average of about the last eight.
fn learn(average: &mut u64, value: u64) {
    let others = average.wrapping_sub(average.wrapping_div(8));
    *average = others.saturating_add(value.wrapping_div(8));
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
#[allow(clippy::arithmetic_side_effects, clippy::cast_possible_truncation)]
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
    fn answers_pile_up_only_when_the_driver_has_many_requests_and_not_for_long() {
        let mut pace = Pace::default();
        for (answers, under_way) in [(0, 100), (1, 0), (1, 6), (4, 12), (100, 0)] {
            let pile = pace.pile_up(answers, under_way, Duration::ZERO);
            assert_eq!(pile, Pile::No, "{answers} of {under_way}");
        }
        assert_eq!(pace.pile_up(1, 7, Duration::ZERO), Pile::Look);
        assert_eq!(pace.pile_up(3, 13, Duration::ZERO), Pile::Look);
        assert_eq!(pace.pile_up(1, 7, MIN_PILE), Pile::No);
        assert_eq!((unnotified(1), unnotified(3), unnotified(32)), (0, 1, 16));
    }

    fn patience(latency: Duration, interrupt: Duration) -> Duration {
        let mut pace = Pace::default();
        for _ in 0..400 {
            pace.took(latency.as_nanos() as u64);
            pace.interrupted(interrupt.as_nanos() as u64);
        }
        pace.patience()
    }

    #[test]
    fn patience_is_a_part_of_the_latency_and_what_an_interrupt_is_worth() {
        let close = |found: Duration, expected: Duration| {
            assert!(
                found <= expected && expected - found < US,
                "{found:?}, not {expected:?}"
            );
        };
        // A fast disk; a slow one, where an interrupt costs little, or much, or less than nothing is worth.
        close(patience(100 * US, 2 * US), 25 * US);
        close(patience(5000 * US, 2 * US), 64 * US);
        close(patience(5000 * US, 100 * US), 1250 * US);
        close(
            patience(Duration::from_secs(3600), Duration::from_secs(1)),
            MAX_PILE,
        );
        close(patience(10 * US, US), MIN_PILE);
    }

    #[test]
    fn with_patience_it_sleeps_for_a_quarter_of_what_the_driver_has_then_expects_less() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        for _ in 0..400 {
            pace.took(4_000_000);
            pace.interrupted(100_000);
        }
        let sleeps = |pile, wanted| matches!(pile, Pile::Sleep(more, _) if more == wanted);
        assert!(sleeps(pace.pile_up(1, 31, 100 * US), 7), "8 of 32");
        // It was told of all, and one has come back.
        pace.told(32, now);
        pace.taken(1);
        assert!(sleeps(pace.pile_up(1, 0, 100 * US), 7), "31 may come");
        for owed in [15, 7] {
            assert_eq!(pace.pile_up(1, 0, MAX_PILE), Pile::No, "it was in vain");
            assert!(sleeps(
                pace.pile_up(1, 0, 100 * US),
                (owed + 1_usize).div_ceil(4) - 1
            ));
        }
        assert_eq!(pace.pile_up(1, 0, MAX_PILE), Pile::No);
        assert!(!pace.may_pile_up(1, 0), "the driver has few requests");
    }
}
