//! Pacing of a worker: when to poll before sleeping, and when to hold completions back. Times are
//! nanoseconds of its clock.
//!
//! *Polling.* A notification makes a vCPU leave the guest, and a sleeping thread is slow to wake.
//! Each costs more than all other work for a small request. Therefore notifications are off while
//! the worker is awake, and an idle worker polls for a while before it sleeps. The worker learns
//! the duration. If something arrives soon after the worker went to sleep, its polling window
//! doubles until the window covers that time. If something arrives late, the window closes. One
//! window applies while the worker waits for the device, another while it waits for the driver
//! alone. Between two polls the worker yields its processor. If a yield takes long and nothing
//! arrived meanwhile, the processor is contended. Then the worker neither polls nor holds
//! completions back for a while.
//!
//! *Holding back.* Completions that one round finds raise one interrupt. The worker holds
//! completions back only while the driver is provably busy, because an interrupt would stop the
//! driver. The driver is busy if two conditions hold: it has not yet replaced completions that it
//! may have seen, and it added a request within half the average time between two requests. The
//! maximum time is a sixteenth of the duration of a request from the driver's point of view. This
//! duration is the number of the driver's requests times the average time between two (Little's
//! law). The worker keeps its processor meanwhile, otherwise the scheduler would determine the
//! bound.

// ANCHOR: policy
/// The smallest window.
const MIN_WINDOW: u64 = 25_000;
/// The largest window: twice the time from interrupt to next request of a guest on a host where an
/// exit takes 40 µs.
const MAX_WINDOW: u64 = 250_000;
/// Threshold for a contended processor: after a longer yield, another thread is busy on it.
const CONTENDED: u64 = 50_000;
/// Sleeps after that from which nothing is learnt.
const REST: u32 = 256;
/// The part of what requests take for which completions may be held back.
pub(super) const HOLD_PART: u64 = 16;
/// With so many requests in flight others complete soon: then submitting and sleeping in one system call does not pay.
pub(super) const MANY: usize = 8;
/// The longest time between two requests that counts in the average: longer ones are pauses.
const MAX_GAP: u64 = 1_000_000;

/// Learnt state of one worker.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// For how long to poll: with no request in flight, and with some.
    windows: [u64; 2],
    /// Since when there is nothing to do, and which window is for that.
    idle: Option<(u64, bool)>,
    /// The worker slept since then.
    slept: bool,
    /// The last poll that found nothing.
    polled: Option<u64>,
    /// Sleeps from which nothing is learnt.
    rest: u32,
    /// When the driver was last seen to have added requests.
    added: u64,
    /// From one request to the next, on average.
    gap: u64,
    /// Completions that the driver has not replaced by new requests yet.
    unreplaced: usize,
    /// Those among them that no interrupt was raised for.
    unsignalled: usize,
    /// When the first of these was found.
    unsignalled_since: u64,
}

impl Pace {
    /// A round found so many completions and took so many requests: one at least.
    pub(super) fn found(&mut self, completed: usize, taken: usize, now: u64) {
        self.polled = None;
        if let (Some((since, in_flight)), true) = (self.idle.take(), std::mem::take(&mut self.slept)) {
            self.learn(in_flight, now.saturating_sub(since));
        }
        if taken > 0 {
            let since = now.saturating_sub(self.added).min(MAX_GAP);
            let each = since.checked_div(taken as u64).unwrap_or(0);
            self.gap = self.gap.saturating_mul(7).saturating_add(each).wrapping_div(8);
            self.added = now;
            self.unreplaced = self.unreplaced.saturating_sub(taken);
        }
        if completed > 0 {
            if self.unsignalled == 0 {
                self.unsignalled_since = now;
            }
            self.unsignalled = self.unsignalled.saturating_add(completed);
            self.unreplaced = self.unreplaced.saturating_add(completed);
        }
    }

    /// After a sleep, something came when there had been nothing to do for that long.
    fn learn(&mut self, in_flight: bool, gap: u64) {
        if let Some(rest) = self.rest.checked_sub(1) {
            self.rest = rest;
            return;
        }
        let [without, with] = &mut self.windows;
        let window = if in_flight { with } else { without };
        if gap > MAX_WINDOW {
            *window = 0;
        } else if gap > *window {
            *window = window.saturating_mul(2).clamp(MIN_WINDOW, MAX_WINDOW);
        }
    }

    fn window(&self, in_flight: bool) -> u64 {
        let [without, with] = self.windows;
        if in_flight { with } else { without }
    }

    /// Whether completions that no interrupt was raised for are held back, with so many requests in flight.
    pub(super) fn holds(&self, in_flight: usize, now: u64) -> bool {
        if self.rest > 0 || self.unsignalled == 0 || self.unreplaced <= self.unsignalled {
            return false;
        }
        let all = self.unreplaced.saturating_add(in_flight);
        let limit = self.gap.saturating_mul(all as u64).wrapping_div(HOLD_PART);
        let silent = now.saturating_sub(self.added) >= self.gap.wrapping_div(2);
        !silent && now.saturating_sub(self.unsignalled_since) < limit
    }

    /// Completions that no interrupt was raised for.
    pub(super) fn unsignalled(&self) -> usize {
        self.unsignalled
    }

    /// An interrupt was raised for them, if the driver wanted one.
    pub(super) fn signalled(&mut self) {
        self.unsignalled = 0;
    }

    /// Whether to poll again instead of going to sleep. There is nothing to do, with requests in flight or not.
    pub(super) fn polls(&mut self, in_flight: bool, now: u64) -> bool {
        let (since, _) = *self.idle.get_or_insert((now, in_flight));
        let last = self.polled.replace(now).unwrap_or(now);
        if now.saturating_sub(last) > CONTENDED {
            self.windows = [0; 2];
            self.rest = REST;
        }
        now.saturating_sub(since) < self.window(in_flight)
    }

    /// Whether a worker with nothing to do would poll.
    pub(super) fn may_poll(&self, in_flight: bool) -> bool {
        self.window(in_flight) > 0
    }

    /// The worker goes to sleep.
    pub(super) fn sleeps(&mut self, in_flight: bool, now: u64) {
        self.idle.get_or_insert((now, in_flight));
        self.slept = true;
        self.polled = None;
        // A driver that adds nothing until then has fewer requests than before.
        self.unreplaced = self.unreplaced.wrapping_div(2);
    }
}
// ANCHOR_END: policy

#[cfg(test)]
mod tests;
