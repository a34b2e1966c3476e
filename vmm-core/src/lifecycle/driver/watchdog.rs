//! The guest's watchdog has expired: the event, and the action of the spec.

use tracing::warn;
use vmm_protocol::vmm::{ExitKind, PauseReason, WatchdogAction};

use super::{Driver, Next, exit_record, reset::ResetCause};
use crate::lifecycle::{Builder, Machine, admission::State, publisher::Audience};

impl<A: Audience, B: Builder> Driver<A, B> {
    /// The guest did not restart its watchdog in time. A machine that was paused meanwhile stays paused.
    pub(super) fn watchdog_expired(&mut self) -> Next {
        if self.log_limit.allow().is_some() {
            warn!(
                action = self.watchdog.as_str_name(),
                "the guest did not restart its watchdog in time"
            );
        }
        self.publisher.watchdog_expired();
        match self.watchdog {
            WatchdogAction::Unspecified | WatchdogAction::Reset => self.reset(ResetCause::Guest),
            WatchdogAction::Poweroff => {
                let message = "the guest did not restart its watchdog in time";
                Next::End(exit_record(ExitKind::GuestCrash, message), None)
            }
            WatchdogAction::Pause => {
                self.pause_for_watchdog();
                Next::GoOn
            }
            WatchdogAction::None => Next::GoOn,
        }
    }

    fn pause_for_watchdog(&mut self) {
        if self.publisher.state() != State::Running {
            return;
        }
        match self.machine().and_then(Machine::pause) {
            Ok(()) => self.publisher.paused_for(PauseReason::Watchdog),
            Err(failure) => {
                let message = format!("the machine cannot be paused: {}", failure.message);
                self.publisher.device_error("watchdog".to_owned(), message);
            }
        }
    }
}
