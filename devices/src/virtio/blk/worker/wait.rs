//! What a worker does when there is nothing to do: telling the driver of answers, now or later, looking again, sleeping.

use std::time::Duration;

use super::BlkHandler;
use crate::virtio::{
    blk::pace::{self, Doze, Look, Pile},
    fault::Fault,
    session::Session,
};

/// Where requests are done within the call that hands them over, the driver is told of answers at the latest when the first
/// of them has waited that long.
const MAX_WAIT: Duration = Duration::from_micros(250);

/// So long a worker without requests waits for the next one in the ring, which costs fewer system calls. The kernel counts
/// it as waiting for the disk (in_iowait, and so /proc/pressure/io), which an idle disk must not look like.
const STAY: Duration = Duration::from_millis(5);

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
        let at_most = self.untold.saturating_add(under_way);
        if self.waits() && !self.pace.is_enough(at_most, under_way) {
            // No answers come of what the driver adds: it is left in the ring.
            return Ok(false);
        }
        let now = self.clock.now();
        let since = self.untold_since.unwrap_or(now);
        let (more, limit, unnotified) = match self.pace.pile_up(self.untold, under_way, since, now) {
            Pile::No => return Ok(false),
            Pile::Look => {
                std::hint::spin_loop();
                return Ok(true);
            }
            Pile::Sleep {
                more,
                limit,
                unnotified,
            } => (more, limit, unnotified),
        };
        if let Some(unnotified) = unnotified
            && session.is_left_after_asking(self.queue, unnotified)?
        {
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        let requests = under_way.clamp(1, more);
        let slept = self.engine.sleep_for(requests, session.events(), limit);
        if unnotified.is_some() {
            session.suppress_kicks(self.queue)?;
        }
        slept.map_err(|error| Fault::Backend("wait for requests", error))
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

    /// Asks to be notified, and sleeps. False when the framework is to sleep, or something else called. With `fresh`,
    /// requests were taken that the host was not handed yet.
    pub(super) fn sleep(&mut self, session: &mut Session, fresh: bool) -> Result<bool, Fault> {
        if self.dozes(session)? {
            return Ok(true);
        }
        let under_way = self.engine.in_flight();
        if !self.waits() && session.is_left_after_asking(self.queue, 0)? {
            session.suppress_kicks(self.queue)?;
            self.commit()?;
            return Ok(true);
        }
        self.publish(session);
        if !self.called && self.sleeps_in_ring(session, under_way)? {
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        if fresh {
            // What completes after this is noticed only when it was looked for.
            self.commit()?;
            return Ok(true);
        }
        self.called = false;
        if under_way == 0 {
            self.engine.forget_other();
        }
        Ok(false)
    }

    /// Sleeps for a while as [`Pace::doze`](pace::Pace::doze) says. False when it did not sleep, or has just done so for
    /// nothing.
    fn dozes(&mut self, session: &mut Session) -> Result<bool, Fault> {
        if self.called || self.dozed || self.waits() {
            return Ok(false);
        }
        let under_way = self.engine.in_flight();
        let Some(Doze { unnotified, limit }) = self.pace.doze(under_way) else {
            return Ok(false);
        };
        if session.is_left_after_asking(self.queue, unnotified)? {
            session.suppress_kicks(self.queue)?;
            self.commit()?;
            return Ok(true);
        }
        self.publish(session);
        let slept = if under_way > 0 {
            self.engine.commit_and_sleep(session.events(), Some(limit))
        } else {
            self.engine.sleep_for(1, session.events(), limit)
        };
        if slept.map_err(|error| Fault::Backend("wait for requests", error))? {
            self.dozed = true;
            session.suppress_kicks(self.queue)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Sleeps where the engine can, without requests only for a while.
    fn sleeps_in_ring(&mut self, session: &Session, under_way: usize) -> Result<bool, Fault> {
        let slept = if under_way > 0 {
            self.engine.commit_and_sleep(session.events(), None)
        } else if std::mem::replace(&mut self.rested, true) {
            Ok(false)
        } else {
            self.engine.sleep_for(1, session.events(), STAY)
        };
        slept.map_err(|error| Fault::Backend("wait for requests", error))
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
            self.pace.interrupted(now.saturating_duration_since(before));
        } else {
            self.pace.unwanted();
        }
        self.pace.told(now);
        Ok(())
    }
}
