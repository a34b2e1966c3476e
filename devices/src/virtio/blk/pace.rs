//! When a worker polls before it sleeps, and when it holds completions back. Policy only: time comes in, in nanoseconds
//! by the worker's clock.
//!
//! *Polling.* A notification makes a vCPU leave the guest, and a sleeping thread is slow to wake: both cost more than all
//! the rest of a small request. So notifications are off while the worker is awake, and it stays awake for a while when
//! it has nothing to do. For how long is learnt: when something comes soon after the worker went to sleep, the window in
//! which it polls grows until it covers that time; when it comes late, there is no window any more. There is one window
//! for waiting on the device and one for waiting on the driver alone. Between two polls the worker yields its processor.
//! When a yield takes long and nothing has come of it, the processor is contended: the worker does not poll for a while.
//!
//! *Holding back.* Completions that one round finds raise one interrupt. They are held back only while the driver is
//! provably busy: it has yet to replace completions that it was interrupted for, and it added a request within half the
//! average time between two. An interrupt would stop it. They are never held longer than a sixteenth of what requests
//! take from the driver's point of view: the requests that it has, times the average time between two (Little's law).

// ANCHOR: policy
/// The smallest window, in nanoseconds.
const MIN_WINDOW: u64 = 25_000;
/// The largest window, in nanoseconds. A guest on a nested hypervisor, where an exit takes 40 µs, takes about half of it
/// from interrupt to next request.
const MAX_WINDOW: u64 = 250_000;
/// A yield that takes longer than so many nanoseconds went to somebody who is busy.
const CONTENDED: u64 = 50_000;
/// Sleeps after that from which nothing is learnt.
const REST: u32 = 256;
/// The part of what requests take for which completions may be held back.
const HOLD_PART: u64 = 16;
/// With so many requests in flight, others complete soon: it does not pay to hand what was taken to the host and to sleep in
/// one system call.
pub(super) const MANY: usize = 8;
/// The longest time between two requests that counts in the average, in nanoseconds: longer ones are pauses.
const MAX_GAP: u64 = 1_000_000;

/// What one worker has learnt.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// For how long to poll, in nanoseconds: with no request in flight, and with some.
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
    taken: u64,
    /// From one request to the next, on average.
    gap: u64,
    /// Completions that the driver was interrupted for and has not replaced yet.
    owed: usize,
    /// Completions that no interrupt was raised for.
    held: usize,
    /// When the first of them was found.
    held_since: u64,
}

impl Pace {
    /// A round found so many completions and took so many requests.
    pub(super) fn found(&mut self, completed: usize, taken: usize, now: u64) {
        if completed == 0 && taken == 0 {
            return;
        }
        self.polled = None;
        if let (Some((since, in_flight)), true) = (self.idle.take(), std::mem::take(&mut self.slept)) {
            self.learn(in_flight, now.saturating_sub(since));
        }
        if taken > 0 {
            let since = now.saturating_sub(self.taken).min(MAX_GAP);
            let each = since.checked_div(taken as u64).unwrap_or(0);
            let others = self.gap.wrapping_sub(self.gap.wrapping_div(8));
            self.gap = others.saturating_add(each.wrapping_div(8));
            self.taken = now;
            self.owed = self.owed.saturating_sub(taken);
        }
        if completed > 0 {
            if self.held == 0 {
                self.held_since = now;
            }
            self.held = self.held.saturating_add(completed);
        }
    }

    /// After a sleep, something came when there had been nothing to do for that long.
    fn learn(&mut self, in_flight: bool, gap: u64) {
        if let Some(rest) = self.rest.checked_sub(1) {
            self.rest = rest;
            return;
        }
        let window = self.window_mut(in_flight);
        if gap > MAX_WINDOW {
            *window = 0;
        } else if gap > *window {
            *window = window.saturating_mul(2).clamp(MIN_WINDOW, MAX_WINDOW);
        }
    }

    fn window_mut(&mut self, in_flight: bool) -> &mut u64 {
        let [without, with] = &mut self.windows;
        if in_flight { with } else { without }
    }

    /// Whether completions that no interrupt was raised for are held back, with so many requests in flight.
    pub(super) fn holds(&self, in_flight: usize, now: u64) -> bool {
        if self.held == 0 || self.owed == 0 {
            return false;
        }
        let all = self.owed.saturating_add(self.held).saturating_add(in_flight);
        let limit = self.gap.saturating_mul(all as u64).wrapping_div(HOLD_PART);
        let silent = now.saturating_sub(self.taken) >= self.gap.wrapping_div(2);
        !silent && now.saturating_sub(self.held_since) < limit
    }

    /// Completions that no interrupt was raised for.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// An interrupt was raised for them, if the driver wanted one.
    pub(super) fn signalled(&mut self) {
        self.owed = self.owed.saturating_add(std::mem::take(&mut self.held));
    }

    /// Whether to poll again instead of going to sleep. There is nothing to do, with requests in flight or not.
    pub(super) fn polls(&mut self, in_flight: bool, now: u64) -> bool {
        let (since, _) = *self.idle.get_or_insert((now, in_flight));
        let last = self.polled.replace(now).unwrap_or(now);
        if now.saturating_sub(last) > CONTENDED {
            self.windows = [0; 2];
            self.rest = REST;
        }
        now.saturating_sub(since) < *self.window_mut(in_flight)
    }

    /// Whether a worker with nothing to do would poll.
    pub(super) fn may_poll(&self, in_flight: bool) -> bool {
        let [without, with] = self.windows;
        (if in_flight { with } else { without }) > 0
    }

    /// The worker goes to sleep.
    pub(super) fn sleeps(&mut self, in_flight: bool, now: u64) {
        self.idle.get_or_insert((now, in_flight));
        self.slept = true;
        self.polled = None;
        // One that adds nothing until then has fewer requests than before.
        self.owed = self.owed.wrapping_div(2);
    }
}
// ANCHOR_END: policy

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests;
