//! Resets of the machine, in the same process.
//!
//! A reset has two reasons to wait. While the machine is paused for a capture (a snapshot or a migration), its memory and disks must
//! not change: the reset follows when the capture has ended, and a capture that still needs the memory is given up. And requests that
//! the host's storage has not answered may still write to guest memory: the machine stands still until they have ended, however
//! long that takes. Only a client's stop ends it earlier.

use std::time::{Duration, Instant};

use tracing::{info, warn};
use vmm_protocol::vmm::{ErrorKind, ExitKind, request::Op};

use super::{Driver, Next, exit_record};
use crate::lifecycle::{
    Builder, Failure, Input, Machine, Notice, Reset, Token, admission::State, publisher::Audience,
};

/// How often a reset that waits for requests is tried again. A try waits for them for a moment itself.
const AGAIN: Duration = Duration::from_millis(100);
/// After this time clients are notified that a reset waits, and for what.
const TELL_AFTER: Duration = Duration::from_secs(10);

/// Why the machine is reset.
pub(super) enum ResetCause {
    /// The guest asked for it.
    Guest,
    /// A triple fault: what happened.
    Crash(String),
    /// A client asked for it and waits for the answer.
    Request(Token),
}

impl ResetCause {
    fn asker(&self) -> Option<Token> {
        match self {
            Self::Request(token) => Some(*token),
            Self::Guest | Self::Crash(_) => None,
        }
    }
}

/// A reset that is not done yet.
pub(super) struct Waiting {
    cause: ResetCause,
    until: Until,
}

enum Until {
    /// The machine is not paused for a capture any more.
    Captured,
    /// Requests have ended. The vCPUs are stopped, and some devices are reset.
    Drained {
        /// When to look again.
        again: Instant,
        /// When to notify clients; `None` when that is done.
        tell: Option<Instant>,
    },
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// Resets the machine, now or as soon as that is possible. A paused machine stays paused. A guest that resets or
    /// crashes in a loop is not held back, as on a PC: each time is counted, the log takes a few lines of them.
    pub(super) fn reset(&mut self, cause: ResetCause) -> Next {
        if self.waiting.is_some() {
            // Another vCPU asked for the reset that is to come.
            return Next::GoOn;
        }
        if self.stands_for_capture() {
            self.give_up_memory("the guest has reset the machine, or crashed");
            let until = Until::Captured;
            self.waiting = Some(Waiting { cause, until });
            return Next::GoOn;
        }
        let tell = Instant::now().checked_add(TELL_AFTER);
        self.try_reset(cause, tell)
    }

    /// Continues a reset that does not have to wait any longer.
    pub(super) fn continue_reset(&mut self) -> Next {
        let stands = self.stands_for_capture();
        let due = self.waiting.take_if(|waiting| match waiting.until {
            Until::Captured => !stands,
            Until::Drained { again, .. } => Instant::now() >= again,
        });
        match due {
            None => Next::GoOn,
            Some(Waiting { cause, until }) => match until {
                Until::Captured => self.reset(cause),
                Until::Drained { tell, .. } => self.try_reset(cause, tell),
            },
        }
    }

    /// When that is to be called if nothing happens before.
    pub(super) fn continues_reset_at(&self) -> Option<Instant> {
        match self.waiting.as_ref()?.until {
            Until::Captured => None,
            Until::Drained { again, .. } => Some(again),
        }
    }

    /// Whether a part of the machine is reset and another is not.
    pub(super) fn is_resetting(&self) -> bool {
        let until = self.waiting.as_ref().map(|waiting| &waiting.until);
        matches!(until, Some(Until::Drained { .. }))
    }

    /// Why a request is refused now, if the machine is being reset. Those pass that only look, or end something.
    pub(super) fn refused_by_reset(&self, op: &Op) -> Option<Failure> {
        let passes = matches!(
            op,
            Op::Stop(_) | Op::GetDiskStats(_) | Op::GetMachineStats(_) | Op::Release(_)
        );
        (self.is_resetting() && !passes).then(|| {
            Failure::of(
                ErrorKind::State,
                "the machine is being reset, which waits for its storage: try again later",
            )
        })
    }

    fn try_reset(&mut self, cause: ResetCause, tell: Option<Instant>) -> Next {
        match self.machine().and_then(Machine::reset) {
            Ok(Reset::Done) => self.was_reset(&cause),
            Ok(Reset::Waits(device)) => {
                self.wait_for(&device, cause, tell);
                Next::GoOn
            }
            Err(failure) => self.failed_reset("reset", failure, &cause),
        }
    }

    fn wait_for(&mut self, device: &str, cause: ResetCause, tell: Option<Instant>) {
        if let Some(token) = cause.asker()
            && !self.pending.contains(&token)
        {
            self.pending.push(token);
        }
        // The machine cannot be paused for its state now.
        self.give_up_memory("the machine is being reset, which waits for its storage");
        let now = Instant::now();
        let (due, tell) = match tell {
            Some(when) if now >= when => (true, None),
            tell => (false, tell),
        };
        if due {
            let message = "the reset of the machine waits for requests that the host has not answered";
            warn!(device, "{message}");
            self.publisher.device_error(device.to_owned(), message.to_owned());
        }
        let again = now.checked_add(AGAIN).unwrap_or(now);
        self.waiting = Some(Waiting {
            cause,
            until: Until::Drained { again, tell },
        });
    }

    fn was_reset(&mut self, cause: &ResetCause) -> Next {
        self.panicked = false;
        self.publisher.reset();
        self.suspicion = None;
        self.pause_again = None;
        let asker = cause.asker();
        self.publish_reset(cause);
        self.collect();
        // Another vCPU may have asked for the reset that just happened, or panicked before it.
        let waiting: Vec<_> = self
            .inputs
            .try_iter()
            .filter(|input| !is_of_the_guest(input))
            .collect();
        let running = self.publisher.state() == State::Running;
        if running && let Err(failure) = self.machine().and_then(Machine::start) {
            return self.failed_reset("start after a reset", failure, cause);
        }
        if let Some(token) = asker {
            self.pending.retain(|pending| *pending != token);
            self.publisher.reply(token, Ok(()));
        }
        for input in waiting {
            if let end @ Next::End(..) = self.take(input) {
                return end;
            }
        }
        Next::GoOn
    }

    fn publish_reset(&mut self, cause: &ResetCause) {
        match cause {
            ResetCause::Request(_) => info!("the machine was reset by request"),
            ResetCause::Guest => {
                if let Some(left_out) = self.log_limit.allow() {
                    info!(%left_out, "the guest reset itself");
                }
                self.publisher.guest_reset();
            }
            ResetCause::Crash(message) => {
                if let Some(left_out) = self.log_limit.allow() {
                    warn!(%left_out, message, "the machine was reset because the guest crashed");
                }
                self.publisher.crash_reset(message.clone());
            }
        }
    }

    fn failed_reset(&mut self, operation: &str, failure: Failure, cause: &ResetCause) -> Next {
        let message = format!("{operation}: {}", failure.message);
        if let Some(token) = cause.asker() {
            self.pending.retain(|pending| *pending != token);
            self.publisher.reply(token, Err(failure));
        }
        Next::End(exit_record(ExitKind::VmmError, message), None)
    }
}

/// A notice that the guest caused, which has no meaning after a reset.
pub(super) fn is_of_the_guest(input: &Input) -> bool {
    matches!(
        input,
        Input::Notice(
            Notice::PowerOff
                | Notice::Reset
                | Notice::GuestPanicked(_)
                | Notice::PanicPrinted { .. }
                | Notice::WatchdogExpired
                | Notice::TripleFault(_)
                | Notice::GuestCrashed(_)
        )
    )
}
