//! A token bucket: how many calls a connection may make.

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// Calls per second, with a burst of the same number. The refill depends on the elapsed time, so
/// the interval between calls does not matter.
#[derive(Debug)]
pub struct Bucket {
    per_second: f64,
    state: Mutex<(f64, Instant)>,
}

impl Bucket {
    /// A full one. `per_second` is at least 1.
    pub fn new(per_second: u32) -> Self {
        let per_second = f64::from(per_second.max(1));
        Self {
            per_second,
            state: Mutex::new((per_second, Instant::now())),
        }
    }

    /// Takes one token; false when there is none.
    pub fn take(&self) -> bool {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, last) = *state;
        let passed = now.saturating_duration_since(last).as_secs_f64();
        let tokens = (tokens + passed * self.per_second).min(self.per_second);
        let enough = tokens >= 1.0;
        *state = (if enough { tokens - 1.0 } else { tokens }, now.max(last));
        enough
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let bucket = Bucket::new(1000);
        let start = bucket.state.lock().unwrap().1;
        let taken = |from: Duration| (0..5000).filter(|_| bucket.take_at(start + from)).count();
        assert_eq!(taken(Duration::ZERO), 1000);
        assert_eq!(taken(Duration::from_micros(900)), 0);
        // Short intervals also refill the bucket.
        let drops = (1..=100).map(|step| taken(Duration::from_micros(900 + 500 * step)));
        assert!((50..=51).contains(&drops.sum::<usize>()));
        assert_eq!(taken(Duration::from_secs(60)), 1000, "never more than its burst");
    }
}
