//! The time that a recorded stop leaves to its guest.

use std::time::Duration;

use crate::StopRecord;

impl StopRecord {
    /// Remaining grace time of the guest at `now_ms`, at most `grace_ms` if the clock was set back.
    pub fn left(&self, now_ms: u64) -> Duration {
        Duration::from_millis(self.deadline_ms.saturating_sub(now_ms).min(self.grace_ms))
    }
}
