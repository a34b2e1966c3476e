//! Baseline: the previous pacing policy, unchanged.
//!
//! The policy decides when a worker polls the ring before it enables notifications, and when it
//! batches answers for one interrupt. The caller supplies the time.
//!
//! A notification makes a vCPU leave the guest, which costs more than all other work for a small
//! request. A driver often has its next request soon after an answer. The policy learns this time.
//! If a notification comes shortly after an interrupt for answers, the polling window grows until
//! the window covers that time. If a notification comes late, the window closes. A disk that is
//! rarely or never used is never polled.
//!
//! After a first period the worker yields its processor between two polls, because the vCPU may
//! need this processor. If a yield takes long, the host has more threads than processors, and a
//! woken thread runs sooner than one that yields. Then the worker stops polling and does not learn
//! for a while.

mod trial;

use std::time::{Duration, Instant};

use self::trial::Trial;
use super::machine::{Next, Policy, Worker};

/// The smallest window.
const MIN_WINDOW: Duration = Duration::from_micros(25);
/// The largest one; what takes longer is not waited for. A guest on a nested hypervisor, where an exit takes 40 µs, takes
/// about half of it from interrupt to next request.
const MAX_WINDOW: Duration = Duration::from_micros(250);

/// Threshold for a contended processor: after a longer yield, another thread is busy on it.
const CONTENDED: Duration = Duration::from_micros(50);
/// Notifications that nothing is learnt from after that.
const REST: u32 = 256;

/// Time that the worker polls without yielding. A driver that polls answers in that time, and a
/// yield costs as much as a request that the page cache answers.
const AT_ONCE: Duration = Duration::from_micros(10);

/// With so many requests under way, others complete soon.
const MANY: usize = 8;
/// From this number of requests on, answers wait for others as long as the driver has not yet
/// replaced the signalled ones: the driver is busy. An idle driver gets its interrupt at once,
/// because its processor would otherwise stand still.
const FEW: usize = 4;
/// Until they are that part of all, and two at least. While the driver works on these, the disk has the rest.
const PILE_PART: usize = 8;
/// Maximum delay, as a multiple of the time to send an interrupt. That time is the saving for the
/// device, and the guest saves even more. It is a microsecond if the processor delivers the
/// interrupt, and a hundred on a nested hypervisor.
const WORTH: u64 = 64;
/// Minimum of the delay limit.
const MIN_PILE: Duration = Duration::from_micros(20);
/// The last of it, less than that, is spent looking: to go to sleep and to wake up takes as long, with the slack that the
/// kernel gives timers (prctl(2), PR_SET_TIMERSLACK).
const NAP: Duration = Duration::from_micros(50);
/// And never longer than that.
const MAX_PILE: Duration = Duration::from_millis(4);
/// After this number of unwanted interrupts in a row, the driver is considered to poll. Batching
/// then saves no interrupt, and it delays requests that the driver adds while the worker waits.
const UNWANTED: u32 = 8;

/// Maximum doze of a worker, as a multiple of the time in which all requests of the driver arrive.
/// During a doze the driver need not notify of each request. By the end of this time, requests in
/// flight have completed, or the driver has notified.
const DOZE_ROUNDS: usize = 2;
/// And never later than that.
const MAX_DOZE: Duration = Duration::from_millis(4);
/// Where this is more between two requests, notifications cost little.
const FAR: Duration = Duration::from_millis(1);
/// Number of sleeps with a notification for each request, after requests had to wait for the end of
/// a doze. In that case the driver has less to do than assumed, or a request in flight takes long
/// (for example a flush beside reads).
const ALERT: u32 = 64;

/// Action for unsignalled answers if the worker has no other work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pile {
    /// Tell.
    No,
    /// Look for others at once.
    Look,
    /// Sleep until `more` answers exist, but at most for `limit`. The driver continues meanwhile.
    /// If too few requests are in flight for `more` answers, the driver must notify when it has
    /// added more than `unnotified` requests. Otherwise it need not notify.
    Sleep {
        more: usize,
        limit: Duration,
        unnotified: Option<u16>,
    },
}

/// How to sleep while the driver is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doze {
    /// Requests that the driver may add without notifying.
    pub unnotified: u16,
    /// When to look at the ring at the latest.
    pub limit: Duration,
}

/// Action of an idle worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Go to sleep.
    No,
    /// Look again at once.
    Now,
    /// Let others run, then look again.
    Yield,
}

/// Learnt state of one worker.
#[derive(Debug, Default)]
pub(super) struct Pace {
    window: Duration,
    /// When the driver was last told of answers, if it has owed requests since.
    told: Option<Instant>,
    /// Answers without a following request so far. The driver can see answers before their
    /// interrupt.
    owed: usize,
    /// The last look, if nothing has happened since.
    looked: Option<Instant>,
    /// Notifications that nothing is learnt from.
    rest: u32,
    /// When requests were last taken.
    taken: Option<Instant>,
    /// From one request to the next, on average, in nanoseconds.
    gap: u64,
    /// Average time to send an interrupt, in nanoseconds.
    interrupt: u64,
    /// How many times in a row the driver did not want one.
    unwanted: u32,
    /// Sleeps in which the driver is to notify of each request.
    alert: u32,
    /// Whether it pays that it does not.
    trial: Trial,
}

impl Pace {
    /// A request was answered.
    pub(super) fn answered(&mut self) {
        self.owed = self.owed.saturating_add(1);
        self.looked = None;
    }

    /// Records an interrupt for answers.
    pub(super) fn told(&mut self, now: Instant) {
        self.told = Some(now);
        self.looked = None;
    }

    /// That many requests were taken, one at least.
    pub(super) fn taken(&mut self, requests: usize, now: Instant) {
        self.owed = self.owed.saturating_sub(requests);
        self.looked = None;
        self.trial.taken(requests, now);
        if let Some(last) = self.taken.replace(now) {
            let since = now.saturating_duration_since(last).min(MAX_PILE);
            learn(
                &mut self.gap,
                nanos(since).checked_div(requests as u64).unwrap_or(0),
            );
        }
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

    /// It took so long to send an interrupt.
    pub(super) fn interrupted(&mut self, took: Duration) {
        learn(&mut self.interrupt, nanos(took));
        self.unwanted = 0;
    }

    /// The driver was to be told, and did not want an interrupt.
    pub(super) fn unwanted(&mut self) {
        self.unwanted = self.unwanted.saturating_add(1);
    }

    /// How long answers wait for so many at most: as long as these take to come, which is that part of what each request
    /// takes, as the driver sees it.
    fn patience(&self, wanted: usize) -> Duration {
        let worth = self.interrupt.saturating_mul(WORTH);
        Duration::from_nanos(self.time_of(wanted).min(worth)).clamp(MIN_PILE, MAX_PILE)
    }

    /// In which so many requests come, in nanoseconds.
    fn time_of(&self, requests: usize) -> u64 {
        self.gap.saturating_mul(requests as u64)
    }

    /// Number of answers that one interrupt is to report.
    fn wanted(&self, under_way: usize) -> usize {
        self.all(under_way).div_ceil(PILE_PART).max(2)
    }

    /// Whether the driver is to be told of so many answers before anything else is done.
    pub(super) fn is_enough(&self, answers: usize, under_way: usize) -> bool {
        answers > 0 && self.unwanted < UNWANTED && answers >= self.wanted(under_way)
    }

    /// Whether answers that the driver was not told of, the first of which was given at `since`, wait for more.
    pub(super) fn pile_up(&mut self, answers: usize, under_way: usize, since: Instant, now: Instant) -> Pile {
        let wanted = self.wanted(under_way);
        if answers >= wanted || !self.may_pile_up(answers, under_way) {
            return Pile::No;
        }
        let patience = self.patience(wanted);
        let left = patience.saturating_sub(now.saturating_duration_since(since));
        if left.is_zero() {
            let silent = |taken| now.saturating_duration_since(taken) >= patience.div_f32(2.0);
            if self.taken.is_none_or(silent) {
                // It waits for these: it has less to do than before.
                self.owed = self.owed.wrapping_div(2);
            }
            return Pile::No;
        }
        let more = wanted.saturating_sub(answers);
        let limit = left.min(Duration::from_nanos(self.time_of(more)).max(NAP));
        if limit < NAP {
            return Pile::Look;
        }
        let to_do = self.owed.saturating_sub(answers);
        Pile::Sleep {
            more,
            limit,
            unnotified: (under_way < more).then(|| before_half(to_do)),
        }
    }

    /// Whether it is worth asking for the time.
    pub(super) fn may_pile_up(&self, answers: usize, under_way: usize) -> bool {
        answers > 0 && self.unwanted < UNWANTED && self.all(under_way) >= FEW && self.owed > answers
    }

    /// Requests that the driver has, as far as is known.
    fn all(&self, under_way: usize) -> usize {
        self.owed.saturating_add(under_way)
    }

    /// How to sleep with so many requests under way and all answers told, while the driver has others to add and where that
    /// pays. It need not notify of as many as are under way, as a completion makes the worker look. If it has more to add,
    /// it is to notify when it has half of them: the disk works on these while it adds the rest. Told of each, the worker
    /// would hand them over one by one, and the driver would be told of each one's answer.
    pub(super) fn doze(&mut self, under_way: usize) -> Option<Doze> {
        let unnotified = if under_way < self.owed {
            before_half(self.owed)
        } else {
            u16::try_from(under_way).unwrap_or(u16::MAX)
        };
        if self.owed == 0 || unnotified == 0 || !self.trial.may_wait() {
            return None;
        }
        if let Some(alert) = self.alert.checked_sub(1) {
            self.alert = alert;
            return None;
        }
        let round = self.time_of(self.all(under_way));
        let limit = Duration::from_nanos(round.saturating_mul(DOZE_ROUNDS as u64));
        (self.gap <= nanos(FAR)).then_some(Doze {
            unnotified,
            limit: limit.clamp(MIN_PILE, MAX_DOZE),
        })
    }

    /// A doze has ended by its limit, and so many requests have waited in the ring.
    pub(super) fn overslept(&mut self, waited: usize) {
        self.owed = 0;
        if waited > 0 {
            self.alert = ALERT;
        }
    }
}

/// Returns the number of requests before the one in the middle: the driver must notify of the
/// request after them.
fn before_half(requests: usize) -> u16 {
    u16::try_from(requests.saturating_sub(1).div_euclid(2)).unwrap_or(u16::MAX)
}

/// Moves an average of about the last eight.
fn learn(average: &mut u64, value: u64) {
    let others = average.wrapping_sub(average.wrapping_div(8));
    *average = others.saturating_add(value.wrapping_div(8));
}

/// A span in nanoseconds.
pub(super) fn nanos(time: Duration) -> u64 {
    time.as_secs()
        .saturating_mul(1_000_000_000)
        .saturating_add(time.subsec_nanos().into())
}

/// Whether so many are under way that others complete soon.
pub(super) fn is_many(under_way: usize) -> bool {
    under_way >= MANY
}

/// The policy, with the part of the worker that asked it.
pub(super) struct Old {
    pace: Pace,
    begin: Instant,
    untold: usize,
    untold_since: Option<u64>,
    dozed: bool,
}

impl Old {
    pub(super) fn new() -> Self {
        Self {
            pace: Pace::default(),
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
                    limit: Some(nanos(limit)),
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
        let sleeps_on = taken > 0 && !is_many(under_way) && !self.pace.may_look();
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
                limit: Some(nanos(limit)),
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
