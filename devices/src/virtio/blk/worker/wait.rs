//! What a worker does when there is nothing to do: telling the driver of answers, now or later, looking again, sleeping.

use std::time::Duration;

use super::{BlkHandler, answer};
use crate::virtio::{
    blk::pace::{self, Look, Pile},
    fault::Fault,
    session::Session,
};

/// Where requests are done within the call that hands them over, the driver is told of answers at the latest when the first
/// of them has waited that long.
const MAX_WAIT: Duration = Duration::from_micros(250);

impl BlkHandler {
    /// Whether to hand what was just taken to the host and sleep in one go: when nothing else is to be expected.
    pub(super) fn sleeps_on(&self, taken: usize) -> bool {
        let under_way = self.engine.in_flight();
        taken > 0 && !self.engine.is_prompt() && !pace::is_many(under_way) && !self.pace.may_look()
    }

    /// Whether the driver is told later; waits a moment for more to tell it.
    pub(super) fn piles_up(&mut self, session: &mut Session) -> Result<bool, Fault> {
        let under_way = self.engine.in_flight();
        if self.called || !self.pace.may_pile_up(self.untold, under_way) {
            return Ok(false);
        }
        let now = self.clock.now();
        let since = self.untold_since.unwrap_or(now);
        let waited = now.saturating_duration_since(since);
        let (more, limit) = match self.pace.pile_up(self.untold, under_way, waited) {
            Pile::No => return Ok(false),
            Pile::Look => {
                std::hint::spin_loop();
                return Ok(true);
            }
            Pile::Sleep(more, limit) => (more, limit),
        };
        let mut requests = more;
        let mut other = None;
        if under_way < more && !self.waits() {
            let unnotified = u16::try_from(more.saturating_sub(1)).unwrap_or(u16::MAX);
            if session.is_left_after_asking(self.queue, unnotified)? {
                session.suppress_kicks(self.queue)?;
                return Ok(true);
            }
            other = Some(session.events());
            requests = under_way.max(1);
        }
        let slept = self
            .engine
            .sleep_for(requests, other, limit)
            .map_err(|error| Fault::Backend("wait for requests", error))?;
        if other.is_some() {
            session.suppress_kicks(self.queue)?;
        }
        Ok(slept)
    }

    /// Whether requests are expected so soon that the worker stays awake; gives others its processor if they want it.
    pub(super) fn looks_again(&mut self) -> bool {
        if self.waits() {
            return false;
        }
        if !self.pace.may_look() {
            return false;
        }
        match self.pace.look_again(self.clock.now()) {
            Look::No => return false,
            Look::Now => std::hint::spin_loop(),
            Look::Yield => std::thread::yield_now(),
        }
        true
    }

    /// Whether requests in the ring are left there: completions or the timer make the worker go on.
    pub(super) fn waits(&self) -> bool {
        self.is_full() || self.throttle.waiting.is_some()
    }

    /// Asks to be notified, and sleeps as long as requests are under way. False when the framework is to sleep, or
    /// something else called. With `fresh`, requests were taken that the host was not handed yet.
    pub(super) fn sleep(&mut self, session: &mut Session, fresh: bool) -> Result<bool, Fault> {
        let under_way = self.engine.in_flight();
        if !self.waits() {
            let unnotified = pace::unnotified(under_way);
            if session.is_left_after_asking(self.queue, unnotified)? {
                session.suppress_kicks(self.queue)?;
                self.commit()?;
                return Ok(true);
            }
        }
        if under_way == 0 {
            self.engine.forget_other();
            return Ok(false);
        }
        self.publish(session);
        let slept = !self.called
            && self
                .engine
                .commit_and_sleep(session.events())
                .map_err(|error| Fault::Backend("wait for requests", error))?;
        if slept {
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        if fresh {
            // What completes after this is noticed only when it was looked for.
            self.commit()?;
            return Ok(true);
        }
        self.called = false;
        Ok(false)
    }

    /// Something that the session listens to called while the worker slept: most likely the driver.
    pub(super) fn notice_call(&mut self) {
        if self.engine.other_called() {
            self.called = true;
            self.own_kick = true;
            self.pace.notified(self.clock.now());
        }
    }

    pub(super) fn untold_too_long(&mut self) -> bool {
        let now = self.clock.now();
        self.untold_since
            .is_some_and(|since| now.saturating_duration_since(since) >= MAX_WAIT)
    }

    /// Tells the driver of answers, if it wants to be told.
    pub(super) fn tell(&mut self, session: &mut Session) -> Result<(), Fault> {
        let answers = std::mem::take(&mut self.untold);
        self.untold_since = None;
        if answers == 0 {
            return Ok(());
        }
        // A clock read before the answers were given says nothing of the time since.
        self.clock.next_round();
        let before = self.clock.now();
        let sent = session.flush_interrupts()?;
        self.clock.next_round();
        let now = self.clock.now();
        if sent {
            self.pace
                .interrupted(answer::nanos(now.saturating_duration_since(before)));
        }
        self.pace.told(answers, now);
        Ok(())
    }
}
