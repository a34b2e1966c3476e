//! A limit for log lines that a guest can cause.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Passes a burst of log lines, then one per interval: log lines triggered by a guest must not fill
/// the host's log.
#[derive(Debug)]
pub struct LogLimit {
    state: Mutex<LimitState>,
}

#[derive(Debug)]
struct LimitState {
    left: u32,
    suppressed: u64,
    refilled: Option<Instant>,
}

impl LogLimit {
    /// Lines let through at once.
    const BURST: u32 = 5;
    /// Time after which the burst is allowed again.
    const INTERVAL: Duration = Duration::from_secs(60);

    /// One that lets its first lines through.
    pub const fn new() -> Self {
        let state = LimitState {
            left: Self::BURST,
            suppressed: 0,
            refilled: None,
        };
        Self {
            state: Mutex::new(state),
        }
    }

    /// Says whether a line may be written now, and how many were held back since the last one.
    pub fn allow(&self) -> Option<Suppressed> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<Suppressed> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let refilled = *state.refilled.get_or_insert(now);
        if now.saturating_duration_since(refilled) >= Self::INTERVAL {
            state.refilled = Some(now);
            state.left = Self::BURST;
        }
        match state.left.checked_sub(1) {
            Some(left) => {
                state.left = left;
                Some(Suppressed(std::mem::take(&mut state.suppressed)))
            }
            None => {
                state.suppressed = state.suppressed.saturating_add(1);
                None
            }
        }
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

/// Number of log lines that were held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suppressed(pub u64);

impl fmt::Display for Suppressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_log_lines_is_cut_and_counted_and_flows_again_after_the_interval() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        let passed = (0..100).filter(|_| limit.allow_at(start).is_some()).count();
        assert_eq!(passed, 5);
        assert_eq!(limit.allow_at(start + LogLimit::INTERVAL), Some(Suppressed(95)));
        assert_eq!(limit.allow_at(start + LogLimit::INTERVAL), Some(Suppressed(0)));
    }
}
