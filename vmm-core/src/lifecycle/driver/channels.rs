//! Channels that programs of the guest open and close.

use std::time::{Duration, Instant};

use super::{super::publisher::Audience, Builder, Driver, Machine as _};

/// A guest decides how often its channels change: they are published at most this often.
const PACE: Duration = Duration::from_millis(100);

/// Times of publications.
#[derive(Debug, Default)]
pub(super) struct Published {
    last: Option<Instant>,
    /// When a change is published that came soon after the last one.
    pub due: Option<Instant>,
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// Publishes a change, at the latest after [`PACE`].
    pub(super) fn on_channels(&mut self) {
        let next = self.channels.last.map(|last| last + PACE);
        match next.filter(|next| Instant::now() < *next) {
            Some(next) => self.channels.due = Some(next),
            None => self.publish_channels(),
        }
    }

    pub(super) fn publish_channels(&mut self) {
        self.channels = Published {
            last: Some(Instant::now()),
            due: None,
        };
        if let Some(machine) = &self.machine {
            self.publisher.channels(machine.open_channels());
        }
    }
}
