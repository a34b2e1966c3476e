//! The one request of a queue that waits for its rate limit, and the timer that says when to look again.
//!
//! While it waits nothing more is taken from the ring: what is there waits in guest memory, and its driver has no reason
//! to notify. So a flush waits behind it, but is not limited itself.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::control::Shared;
use crate::{
    rate::{Cost, Tenant},
    virtio::{
        fault::Fault,
        session::{EventSet, Session},
    },
};

/// A worker's side of the limiter.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    tenant: Option<Tenant>,
    /// Of the limiter that it is a tenant of.
    version: Option<u32>,
    /// Made when it is needed first.
    timer: Option<OwnedFd>,
    /// The session watches the timer.
    watched: bool,
    /// Slot of the request that waits.
    pub waiting: Option<u32>,
}

impl Throttle {
    /// Nothing is watched any more: a session begins.
    pub(super) fn start(&mut self) {
        self.watched = false;
    }

    /// Goes over to another limiter if there is one now.
    pub(super) fn refresh(&mut self, shared: &Shared, queue: u16) {
        let version = shared.limiter_version.load(Ordering::Acquire);
        if self.version == Some(version) {
            return;
        }
        self.version = Some(version);
        self.tenant = shared
            .limiter()
            .zip(shared.wake_of(queue))
            .map(|(limiter, wake)| limiter.join(Arc::clone(wake)));
    }

    /// Whether there is a limit.
    pub(super) fn limits(&self) -> bool {
        self.tenant.is_some()
    }

    /// How long a request of that cost has to wait; it is paid for when there is nothing to wait for.
    pub(super) fn wait_for(&self, cost: Cost, now: impl FnOnce() -> Instant) -> Option<Duration> {
        let tenant = self.tenant.as_ref()?;
        if cost == Cost::default() {
            return None;
        }
        tenant.pass(cost, now()).err()
    }

    /// Nobody waits any more.
    pub(super) fn give_up(&mut self) -> Option<u32> {
        if let Some(tenant) = &self.tenant {
            tenant.give_up();
        }
        self.waiting.take()
    }

    /// Has the handler called with `token` after that time.
    pub(super) fn arm(&mut self, session: &Session, token: u32, wait: Duration) -> Result<(), Fault> {
        self.try_arm(wait)
            .map_err(|error| Fault::Backend("set a timer", error))?;
        if let Some(timer) = self.timer.as_ref().filter(|_| !self.watched) {
            session.watch(timer, token, EventSet::IN | EventSet::EDGE_TRIGGERED)?;
            self.watched = true;
        }
        Ok(())
    }

    fn try_arm(&mut self, wait: Duration) -> io::Result<()> {
        let timer = match &mut self.timer {
            Some(timer) => timer,
            empty => {
                let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
                empty.insert(timerfd_create(TimerfdClockId::Monotonic, flags)?)
            }
        };
        let zero = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // A timer of 0 is none.
        let wait = wait.max(Duration::from_nanos(1));
        let it_value = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        };
        let spec = Itimerspec {
            it_interval: zero,
            it_value,
        };
        timerfd_settime(timer, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }
}
