//! The time that a recorded stop leaves to its guest.

use std::time::Duration;

use crate::StopRecord;

impl StopRecord {
    /// What is left of the guest's time at `now_ms`. A clock that was set back gives no more than there was.
    pub fn left(&self, now_ms: u64) -> Duration {
        Duration::from_millis(self.deadline_ms.saturating_sub(now_ms).min(self.grace_ms))
    }
}
