//! A device that is off the bus, or was never on it, and has not ended yet.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::Instant,
};

use devices::virtio::transport::VirtioPciDevice;
use tracing::error;
use vmm_base::thread::{self, ThreadKind};
use vmm_protocol::vmm::ErrorKind;

use crate::lifecycle::{Failure, Notice, Notifier, Pluggable, Token};

/// A disk, NIC or share that leaves the machine.
pub(super) struct Leaving {
    what: Pluggable,
    pub name: String,
    pub forced: bool,
    /// It had a device, which may write to guest memory until it is gone.
    pub has_device: bool,
    /// Callers that wait for the end of the device, and their deadlines.
    pub waiting: Vec<(Token, Instant)>,
    /// Gets a message when the device is gone. Disconnected without a message if its requests never
    /// end.
    gone: Receiver<()>,
    phase: Phase,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Requests are under way, or the image is still being opened.
    Ending,
    /// Its threads have ended, and its image is closed.
    Gone,
    /// The state of its requests is unknown.
    Lost,
}

impl Leaving {
    /// State of a device that reports its end through `gone`.
    pub fn new(what: Pluggable, name: String, forced: bool, has_device: bool, gone: Receiver<()>) -> Self {
        Self {
            what,
            name,
            forced,
            has_device,
            waiting: Vec::new(),
            gone,
            phase: Phase::Ending,
        }
    }

    /// Ends a device that is off the bus on a thread of its own, however long its requests take. `rest` goes with it.
    /// [`Notice::Unplugged`] comes afterwards.
    pub fn end(
        (what, name, forced): (Pluggable, String, bool),
        device: VirtioPciDevice,
        rest: impl Send + 'static,
        notifier: Notifier,
    ) -> Self {
        let (here, gone) = channel::<()>();
        let of = name.clone();
        let end = move || {
            match device.end() {
                Ok(()) => {
                    // The send fails if the machine is gone.
                    let _machine_is_gone = here.send(());
                }
                Err(error) => error!(%what, name = of, %error, "a device can't be ended"),
            }
            drop((here, rest));
            notifier.notify(Notice::Unplugged);
        };
        // Without a thread the device is dropped here, which does not wait until it is drained: it is never told as gone.
        if let Err(error) = thread::spawn(ThreadKind::Helper, "unplug", end) {
            error!(%what, name, %error, "starting a thread that ends a device");
        }
        Self::new(what, name, forced, true, gone)
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

    /// Kind and name of the device if it is still ending at `deadline`, `None` if it is gone. An error if it will never be gone.
    pub fn ends_after(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        let which = format!("{} {}", self.what, self.name);
        match self.look(deadline) {
            Phase::Gone => Ok(None),
            Phase::Ending => Ok(Some(which)),
            Phase::Lost => Err(Failure::of(
                ErrorKind::Internal,
                format!("requests of {which}, which was taken away, will never end"),
            )),
        }
    }

    /// Errors for callers whose deadline has passed, or for all callers if the device is lost.
    pub fn give_up(&mut self, now: Instant) -> Vec<(Token, Result<(), Failure>)> {
        let lost = self.look(now) == Phase::Lost;
        let late = self
            .waiting
            .extract_if(.., |(_, deadline)| lost || now >= *deadline);
        late.map(|(token, _)| {
            let message = format!(
                "{} {} is taken away from the guest, but its requests did not end in time; what it is on is closed \
                 when they do",
                self.what, self.name
            );
            (token, Err(Failure::of(ErrorKind::Internal, message)))
        })
        .collect()
    }
}
