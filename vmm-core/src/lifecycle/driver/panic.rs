//! Panics of the guest's kernel: said by pvpanic, which is certain, or seen on the serial port, which is checked.
//!
//! Before its driver for pvpanic is loaded, a guest says nothing. Then the last line of a panic on the serial port raises a suspicion.
//! It holds when nothing is printed after it, and no vCPU is found idle or in a program, several times in a row: a guest that only
//! shows such a line, of a log for instance, does one of both at once.

use std::time::{Duration, Instant};

use tracing::warn;

use super::Driver;
use crate::lifecycle::{Builder, Failure, admission::State, publisher::Audience};

/// When a suspicion is checked first, and then again.
const FIRST: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1000 });
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 250 });
/// How often it has to hold.
const CHECKS: u32 = 5;

/// The serial port's last line is that of a panic.
pub(super) struct Suspicion {
    /// Bytes that the serial port had printed by then.
    printed: u64,
    /// Checks that are left, and when the next one is due.
    left: u32,
    next: Instant,
}

impl Suspicion {
    pub(super) fn due(&self) -> Instant {
        self.next
    }
}

fn after(delay: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(delay).unwrap_or(now)
}

impl<A: Audience, B: Builder> Driver<A, B> {
    /// The guest's kernel panicked, with parameters by Hyper-V's interface.
    pub(super) fn guest_panicked(&mut self, parameters: &[u64]) {
        self.suspicion = None;
        if !self.panicked {
            if self.log_limit.allow().is_some() {
                warn!(?parameters, "the guest's kernel panicked");
            }
            self.panicked = true;
            self.publisher.guest_panicked(parameters.to_vec());
        }
    }

    /// It may have.
    pub(super) fn suspect_panic(&mut self, printed: u64) {
        if !self.panicked {
            self.suspicion = Some(Suspicion {
                printed,
                left: CHECKS,
                next: after(FIRST),
            });
        }
    }

    /// Checks a suspicion if that is due. An error ends the machine.
    pub(super) fn check_panic(&mut self) -> Result<(), Failure> {
        let due = self.suspicion.take_if(|it| Instant::now() >= it.next);
        let Some(mut suspicion) = due else {
            return Ok(());
        };
        if self.publisher.state() == State::Running && !self.is_resetting() {
            if !self.machine()?.may_have_panicked(suspicion.printed)? {
                return Ok(());
            }
            suspicion.left = suspicion.left.saturating_sub(1);
            if suspicion.left == 0 {
                self.guest_panicked(&[]);
                return Ok(());
            }
            suspicion.next = after(AGAIN);
        } else {
            // A machine that is paused changes nothing, and says nothing.
            suspicion.next = after(FIRST);
        }
        self.suspicion = Some(suspicion);
        Ok(())
    }
}
