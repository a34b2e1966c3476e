//! Schedule of polling the boot screen for changes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::POLLS;
use crate::display::BootScreen;

pub(super) struct Poller {
    boot: Arc<BootScreen>,
    interval: Duration,
    /// Time of the next poll; `None` while the screen shows another source, until the next
    /// notification.
    next: Option<Instant>,
}

impl Poller {
    pub fn new(boot: Arc<BootScreen>) -> Self {
        Self {
            boot,
            interval: POLLS.0,
            next: None,
        }
    }

    /// Polls the boot screen, if it is shown and the poll is due. A client waits for changes.
    pub fn poll(&mut self, now: Instant) {
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        let Some(changed) = self.boot.poll() else {
            self.next = None;
            return;
        };
        let (least, most) = POLLS;
        self.interval = if changed {
            least
        } else {
            self.interval.saturating_mul(2).min(most)
        };
        self.next = now.checked_add(self.interval);
    }

    /// The guest was given a key or the pointer: what that changes is soon there.
    pub fn hurry(&mut self, now: Instant) {
        self.interval = POLLS.0;
        let soon = now.checked_add(self.interval);
        self.next = self.next.min(soon);
    }

    /// When it is to be asked again; `None` while something else is shown.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }
}
