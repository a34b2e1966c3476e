//! A disk that is off the bus, or was never on it, and whose image is not closed yet.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::Instant,
};

use proto::vmm::ErrorKind;

use crate::lifecycle::{Failure, Token};

/// See the module.
pub(super) struct Leaving {
    pub name: String,
    pub forced: bool,
    /// It had a device, which may write to guest memory until the disk is gone.
    pub has_device: bool,
    /// Who is to be answered when it is gone, and by when at the latest.
    pub waiting: Vec<(Token, Instant)>,
    /// Says that it is gone. Disconnected without that when it will never be: requests are under way for ever.
    gone: Receiver<()>,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Requests are under way, or the image is still being opened.
    Ending,
    /// Its threads have ended and its image is closed.
    Gone,
    /// Nobody knows what its requests do.
    Lost,
}

impl Leaving {
    pub fn new(name: String, forced: bool, has_device: bool, gone: Receiver<()>) -> Self {
        Self {
            name,
            forced,
            has_device,
            waiting: Vec::new(),
            gone,
            phase: Phase::Ending,
        }
    }

    /// How it is by `deadline`, or as soon as that is certain.
    pub fn look(&mut self, deadline: Instant) -> Phase {
        if self.phase == Phase::Ending {
            let left = deadline.saturating_duration_since(Instant::now());
            self.phase = match self.gone.recv_timeout(left) {
                Ok(()) => Phase::Gone,
                Err(RecvTimeoutError::Timeout) => Phase::Ending,
                Err(RecvTimeoutError::Disconnected) => Phase::Lost,
            };
        }
        self.phase
    }

    /// Answers for those who wait in vain: their time has come, or it is lost.
    pub fn give_up(&mut self, now: Instant) -> Vec<(Token, Result<(), Failure>)> {
        let lost = self.look(now) == Phase::Lost;
        let late = self
            .waiting
            .extract_if(.., |(_, deadline)| lost || now >= *deadline);
        late.map(|(token, _)| {
            let failure = Failure {
                kind: ErrorKind::Internal,
                message: format!(
                    "disk {} is taken away from the guest, but requests to its image did not end in time; the image is \
                     closed when they do",
                    self.name
                ),
            };
            (token, Err(failure))
        })
        .collect()
    }
}
