//! Limits on bytes and operations per second, for one disk or shared by several.
//!
//! A [`Limiter`] has two token buckets, one for bytes and one for operations. A request passes if
//! neither bucket is in debt, and then pays its cost, if necessary into debt: a request larger than
//! the burst is delayed no longer than a small one, but the next request waits for the debt. The
//! rates are exact on average, and the buckets are exact at any instant: there is no periodic
//! refill, the content follows from the time.
//!
//! Each thread that sends requests is a [`Tenant`] of the limiter. Waiting tenants are served
//! fairly: none may be ahead of a waiting one by more than [`AHEAD`] of the limiter's whole
//! capacity, regardless of queue depths and request sizes. A tenant has no later claim on an unused
//! share.
//!
//! A worker uses the limiter through a `Throttle`. While a request waits there, the worker takes no
//! others from the ring. The others wait in guest memory, and their driver has no reason to notify.
//! Requests behind a waiting request also wait, even if they are not limited themselves.
//!
//! The caller passes the time, so that tests need no clock.

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests;

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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

/// Minimum wait of a delayed tenant, so that high rates cost few wake-ups. It bounds the smoothness
/// of the flow.
pub const TICK: Duration = Duration::from_millis(2);

/// How far one tenant may be ahead of another that waits: what flows through the limiter in that time.
pub const AHEAD: Duration = Duration::from_millis(10);

/// A tenant that waits and does not come back so long after its time has no claim any more.
const PATIENCE: Duration = Duration::from_millis(10);

/// Burst for a configured burst of 0: the inflow in that many nanoseconds.
const DEFAULT_BURST: u64 = 100_000_000;

const SECOND: u128 = 1_000_000_000;

/// A limiter's rates. 0 is no limit; a burst of 0 is what flows in 100 ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes read and written.
    pub bytes_per_second: u64,
    /// Requests.
    pub operations_per_second: u64,
    /// Bytes that may pass at once after a pause.
    pub burst_bytes: u64,
    /// Requests that may pass at once after a pause.
    pub burst_operations: u64,
}

/// Cost of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes moved.
    pub bytes: u64,
    /// Operations, 1 for a request.
    pub operations: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
    /// Time is counted from here.
    epoch: Instant,
}

#[derive(Debug)]
struct State {
    bytes: Bucket,
    operations: Bucket,
    /// Start tag of the last passed request: the initial tag of new tenants.
    virtual_time: u64,
    tenants: Vec<Option<Account>>,
}

/// State of a tenant. Times and tags are in nanoseconds.
#[derive(Debug)]
struct Account {
    /// Service received, as the time that it takes at the limiter's whole capacity.
    tag: u64,
    /// It waits, and is expected back at this time.
    waits_until: Option<u64>,
    wake: Arc<EventFd>,
}

impl Limiter {
    /// With full buckets.
    pub fn new(limits: Limits) -> Arc<Self> {
        Self::new_at(limits, Instant::now())
    }

    /// As if made at `now`.
    pub fn new_at(limits: Limits, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                bytes: Bucket::new(limits.bytes_per_second, limits.burst_bytes),
                operations: Bucket::new(limits.operations_per_second, limits.burst_operations),
                virtual_time: 0,
                tenants: Vec::new(),
            }),
            // Buckets fill from before the first request on.
            epoch: now,
        })
    }

    /// Changes the limits, also for waiting tenants. Debts keep their value in bytes and
    /// operations, and are paid off at the new rates.
    pub fn set(&self, limits: Limits) {
        self.set_at(limits, Instant::now());
    }

    /// [`set`](Self::set) as if at `now`.
    pub fn set_at(&self, limits: Limits, now: Instant) {
        let now = self.nanos(now);
        let mut state = self.lock();
        state.bytes.set(limits.bytes_per_second, limits.burst_bytes, now);
        state
            .operations
            .set(limits.operations_per_second, limits.burst_operations, now);
        let wakes: Vec<_> = state
            .tenants
            .iter()
            .flatten()
            .map(|tenant| Arc::clone(&tenant.wake))
            .collect();
        drop(state);
        for wake in wakes {
            // Full only if it was not looked at for ages; then it is readable anyway.
            let _full = wake.write(1);
        }
    }

    /// Adds a tenant. `wake` is signalled when limits change, so that a waiting tenant can ask
    /// again.
    pub fn join(self: &Arc<Self>, wake: Arc<EventFd>) -> Tenant {
        let mut state = self.lock();
        let account = Account {
            tag: state.virtual_time,
            waits_until: None,
            wake,
        };
        let free = state.tenants.iter().position(Option::is_none);
        let index = free.unwrap_or(state.tenants.len());
        match state.tenants.get_mut(index) {
            Some(place) => *place = Some(account),
            None => state.tenants.push(Some(account)),
        }
        drop(state);
        Tenant {
            limiter: Arc::clone(self),
            index,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nanos(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.epoch)).saturating_add(EPOCH)
    }
}

/// Where a limiter's time begins: late enough that buckets can have filled before.
const EPOCH: u64 = 1 << 60;

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A sender of requests through a limiter; dropping it leaves the limiter.
#[derive(Debug)]
pub struct Tenant {
    limiter: Arc<Limiter>,
    index: usize,
}

impl Tenant {
    /// Lets a request pass and charges it, or returns the time to wait before the next try. A
    /// delayed tenant must either try again or [give up](Self::give_up).
    pub fn pass(&self, cost: Cost, now: Instant) -> Result<(), Duration> {
        let now = self.limiter.nanos(now);
        self.limiter.lock().pass(self.index, cost, now)
    }

    /// Waits no more for the request that was held up.
    pub fn give_up(&self) {
        let mut state = self.limiter.lock();
        if let Some(Some(account)) = state.tenants.get_mut(self.index) {
            account.waits_until = None;
        }
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let mut state = self.limiter.lock();
        if let Some(place) = state.tenants.get_mut(self.index) {
            *place = None;
        }
    }
}

impl State {
    /// Start-time fair queueing over the buckets' shared capacity.
    fn pass(&mut self, index: usize, cost: Cost, now: u64) -> Result<(), Duration> {
        let price = self
            .bytes
            .price(cost.bytes)
            .max(self.operations.price(cost.operations));
        if price == 0 {
            if let Some(Some(account)) = self.tenants.get_mut(index) {
                account.waits_until = None;
            }
            return Ok(());
        }
        let (virtual_time, ready) = (self.virtual_time, self.ready_at(cost));
        let Some(Some(account)) = self.tenants.get_mut(index) else {
            return Ok(());
        };
        if account.waits_until.is_none() {
            // A tenant stays busy between two requests of a burst; its older unused share expires.
            account.tag = account.tag.max(virtual_time.saturating_sub(nanos(AHEAD)));
        }
        let tag = account.tag;
        let wait = if ready > now {
            ready.saturating_sub(now).max(nanos(TICK))
        } else if self.another_is_due(index, tag, now) {
            nanos(TICK)
        } else {
            self.bytes.pay(cost.bytes, now);
            self.operations.pay(cost.operations, now);
            self.virtual_time = virtual_time.max(tag);
            if let Some(Some(account)) = self.tenants.get_mut(index) {
                account.tag = tag.saturating_add(price);
                account.waits_until = None;
            }
            return Ok(());
        };
        if let Some(Some(account)) = self.tenants.get_mut(index) {
            account.waits_until = Some(now.saturating_add(wait));
        }
        Err(Duration::from_nanos(wait))
    }

    fn ready_at(&self, cost: Cost) -> u64 {
        let bytes = if cost.bytes > 0 { self.bytes.empty_at() } else { 0 };
        let operations = if cost.operations > 0 {
            self.operations.empty_at()
        } else {
            0
        };
        bytes.max(operations)
    }

    /// Returns whether another waiting tenant is too far behind `tag`.
    fn another_is_due(&self, index: usize, tag: u64, now: u64) -> bool {
        self.tenants.iter().enumerate().any(|(at, other)| {
            at != index
                && other.as_ref().is_some_and(|other| {
                    let expected = |until: u64| until.saturating_add(nanos(PATIENCE)) > now;
                    other.waits_until.is_some_and(expected) && other.tag.saturating_add(nanos(AHEAD)) < tag
                })
        })
    }
}

/// A token bucket as a point in time.
///
/// Holds tokens that flow in at a rate, up to a burst, and may be in debt. How many it holds follows from when it is (or
/// was) empty, so there is nothing to refill: at time `t` it has `(t - empty_at) · rate` tokens, negative before.
/// Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Tokens per second; 0 is no limit.
    rate: u64,
    /// Time in which a full bucket fills.
    span: u64,
    empty_at: u64,
}

impl Bucket {
    /// A full one.
    fn new(rate: u64, burst: u64) -> Self {
        let span = if burst == 0 {
            DEFAULT_BURST
        } else {
            time(burst, rate)
        };
        Self {
            rate,
            span,
            empty_at: 0,
        }
    }

    /// Changes rate and burst; the tokens that are there, or missing, stay.
    fn set(&mut self, rate: u64, burst: u64, now: u64) {
        let old = *self;
        *self = Self::new(rate, burst);
        if old.rate == 0 {
            return;
        }
        let convert = |span: u64| {
            let tokens = u128::from(span).saturating_mul(u128::from(old.rate));
            let span = tokens.checked_div(u128::from(rate)).unwrap_or(0);
            u64::try_from(span).unwrap_or(u64::MAX)
        };
        self.empty_at = if old.empty_at > now {
            now.saturating_add(convert(old.empty_at.saturating_sub(now)))
        } else {
            let filled = now.saturating_sub(old.empty_at).min(old.span);
            now.saturating_sub(convert(filled))
        };
    }

    /// From when on it is not in debt.
    fn empty_at(&self) -> u64 {
        if self.rate == 0 { 0 } else { self.empty_at }
    }

    /// The time in which that many tokens flow in; 0 without a limit.
    fn price(&self, tokens: u64) -> u64 {
        time(tokens, self.rate)
    }

    /// Takes tokens out, whether they are there or not.
    fn pay(&mut self, tokens: u64, now: u64) {
        // More than the burst it does not hold.
        let from = self.empty_at.max(now.saturating_sub(self.span));
        self.empty_at = from.saturating_add(self.price(tokens));
    }
}

fn time(tokens: u64, rate: u64) -> u64 {
    let nanos = u128::from(tokens)
        .saturating_mul(SECOND)
        .checked_div(u128::from(rate))
        .unwrap_or(0);
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// The limiter of a device, which can be exchanged while workers use it.
#[derive(Debug, Default)]
pub(crate) struct LimiterCell {
    limiter: Mutex<Option<Arc<Limiter>>>,
    /// Changes with `limiter`.
    version: AtomicU32,
}

impl LimiterCell {
    pub(crate) fn new(limiter: Option<Arc<Limiter>>) -> Self {
        Self {
            limiter: Mutex::new(limiter),
            version: AtomicU32::new(0),
        }
    }

    /// Takes effect when the workers look next; the caller wakes them.
    pub(crate) fn set(&self, limiter: Option<Arc<Limiter>>) {
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
pub(crate) struct Throttle<W> {
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
    pub(crate) fn start(&mut self) {
        self.watched = false;
    }

    /// Switches to the cell's current limiter. The limiter signals `wake` after a change of the
    /// limits.
    pub(crate) fn refresh(&mut self, cell: &LimiterCell, wake: Option<&Arc<EventFd>>) {
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
    pub(crate) fn limits(&self) -> bool {
        self.tenant.is_some()
    }

    /// How long a request of that cost has to wait; it is paid for when there is nothing to wait for.
    pub(crate) fn wait_for(&self, cost: Cost, now: impl FnOnce() -> Instant) -> Option<Duration> {
        let tenant = self.tenant.as_ref()?;
        if cost == Cost::default() {
            return None;
        }
        tenant.pass(cost, now()).err()
    }

    /// Cancels the wait and returns the waiting request.
    pub(crate) fn give_up(&mut self) -> Option<W> {
        if let Some(tenant) = &self.tenant {
            tenant.give_up();
        }
        self.waiting.take()
    }

    /// Has the handler called with `token` after that time.
    pub(crate) fn arm(&mut self, session: &Session, token: u32, wait: Duration) -> Result<(), Fault> {
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
