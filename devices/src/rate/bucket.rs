//! A token bucket as a point in time.

/// Burst for a configured burst of 0: the inflow in that many nanoseconds.
const DEFAULT_BURST: u64 = 100_000_000;

const SECOND: u128 = 1_000_000_000;

/// Holds tokens that flow in at a rate, up to a burst, and may be in debt. How many it holds follows from when it is (or
/// was) empty, so there is nothing to refill: at time `t` it has `(t - empty_at) · rate` tokens, negative before.
/// Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    /// Tokens per second; 0 is no limit.
    rate: u64,
    /// Time in which a full bucket fills.
    span: u64,
    empty_at: u64,
}

impl Bucket {
    /// A full one.
    pub(super) fn new(rate: u64, burst: u64) -> Self {
        let span = if burst == 0 {
            DEFAULT_BURST
        } else {
            time(burst, rate)
        };
        Self {
            rate,
            span,
            empty_at: 0,
        }
    }

    /// Changes rate and burst; the tokens that are there, or missing, stay.
    pub(super) fn set(&mut self, rate: u64, burst: u64, now: u64) {
        let old = *self;
        *self = Self::new(rate, burst);
        if old.rate == 0 {
            return;
        }
        let convert = |span: u64| {
            let tokens = u128::from(span).saturating_mul(u128::from(old.rate));
            let span = tokens.checked_div(u128::from(rate)).unwrap_or(0);
            u64::try_from(span).unwrap_or(u64::MAX)
        };
        self.empty_at = if old.empty_at > now {
            now.saturating_add(convert(old.empty_at.saturating_sub(now)))
        } else {
            let filled = now.saturating_sub(old.empty_at).min(old.span);
            now.saturating_sub(convert(filled))
        };
    }

    /// From when on it is not in debt.
    pub(super) fn empty_at(&self) -> u64 {
        if self.rate == 0 { 0 } else { self.empty_at }
    }

    /// The time in which that many tokens flow in; 0 without a limit.
    pub(super) fn price(&self, tokens: u64) -> u64 {
        time(tokens, self.rate)
    }

    /// Takes tokens out, whether they are there or not.
    pub(super) fn pay(&mut self, tokens: u64, now: u64) {
        // More than the burst it does not hold.
        let from = self.empty_at.max(now.saturating_sub(self.span));
        self.empty_at = from.saturating_add(self.price(tokens));
    }
}

fn time(tokens: u64, rate: u64) -> u64 {
    let nanos = u128::from(tokens)
        .saturating_mul(SECOND)
        .checked_div(u128::from(rate))
        .unwrap_or(0);
    u64::try_from(nanos).unwrap_or(u64::MAX)
}
