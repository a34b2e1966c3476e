//! How the API server is watched, and how soon one that does not answer is asked again.

use std::time::Duration;

use kube::runtime::{utils::Backoff, watcher};

/// The first time after a failure.
const FIRST: Duration = Duration::from_millis(500);
/// At most: what changed while it was away is known that soon after it is back.
const LONGEST: Duration = Duration::from_secs(10);

/// How long a watch lasts, in seconds. A connection that leads nowhere is noticed soon after that.
const WATCH: u32 = 60;

/// How things are watched.
pub fn watching() -> watcher::Config {
    watcher::Config::default().timeout(WATCH)
}

/// Of watches: twice as long each time, and up to half as long again at random, since many agents lose the API server at the same moment.
pub struct Watches(Duration);

impl Watches {
    /// As after a success.
    pub fn new() -> Self {
        Self(FIRST)
    }
}

impl Iterator for Watches {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.0;
        self.0 = wait.saturating_mul(2).min(LONGEST);
        let [random, ..] = *uuid::Uuid::new_v4().as_bytes();
        Some(wait + wait * u32::from(random) / 512)
    }
}

impl Backoff for Watches {
    fn reset(&mut self) {
        self.0 = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_begin_anew_after_a_success() {
        let mut waits = Watches::new();
        for least in [500, 1000, 2000, 4000, 8000, 10_000, 10_000] {
            let least = Duration::from_millis(least);
            let wait = waits.next().unwrap();
            assert!(wait >= least && wait < least * 3 / 2, "{wait:?} {least:?}");
        }
        waits.reset();
        assert!(waits.next().unwrap() < FIRST * 3 / 2);
    }
}
