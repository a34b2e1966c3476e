//! Requests of a queue that wait for the rate limit, and the timer for the next attempt.
//!
//! While a request waits, the worker takes no others from the ring. The others wait in guest
//! memory, and their driver has no reason to notify. Requests behind a waiting request also wait,
//! even if they are not limited themselves.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    fault::Fault,
    session::{EventSet, Session},
};
use crate::rate::{Cost, Limiter, Tenant};

/// The limiter of a device, which can be exchanged while workers use it.
#[derive(Debug, Default)]
pub(super) struct LimiterCell {
    limiter: Mutex<Option<Arc<Limiter>>>,
    /// Changes with `limiter`.
    version: AtomicU32,
}

impl LimiterCell {
    pub(super) fn new(limiter: Option<Arc<Limiter>>) -> Self {
        Self {
            limiter: Mutex::new(limiter),
            version: AtomicU32::new(0),
        }
    }

    /// Takes effect when the workers look next; the caller wakes them.
    pub(super) fn set(&self, limiter: Option<Arc<Limiter>>) {
        *self.limiter.lock().unwrap_or_else(PoisonError::into_inner) = limiter;
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    fn get(&self) -> Option<Arc<Limiter>> {
        self.limiter
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// A worker's side of a limiter. `W` names what waits.
#[derive(Debug)]
pub(super) struct Throttle<W> {
    tenant: Option<Tenant>,
    /// Version of the limiter that `tenant` belongs to.
    version: Option<u32>,
    /// Made when it is needed first.
    timer: Option<OwnedFd>,
    /// The session watches the timer.
    watched: bool,
    /// What waits.
    pub waiting: Option<W>,
}

impl<W> Default for Throttle<W> {
    fn default() -> Self {
        Self {
            tenant: None,
            version: None,
            timer: None,
            watched: false,
            waiting: None,
        }
    }
}

impl<W> Throttle<W> {
    /// Prepares for a new session, in which the timer is not watched yet.
    pub(super) fn start(&mut self) {
        self.watched = false;
    }

    /// Switches to the cell's current limiter. The limiter signals `wake` after a change of the
    /// limits.
    pub(super) fn refresh(&mut self, cell: &LimiterCell, wake: Option<&Arc<EventFd>>) {
        let version = cell.version.load(Ordering::Acquire);
        if self.version == Some(version) {
            return;
        }
        self.version = Some(version);
        self.tenant = cell
            .get()
            .zip(wake)
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

    /// Cancels the wait and returns the waiting request.
    pub(super) fn give_up(&mut self) -> Option<W> {
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
