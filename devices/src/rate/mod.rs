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
//! The caller passes the time, so that tests need no clock.

mod bucket;
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
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::bucket::Bucket;

/// Minimum wait of a delayed tenant, so that high rates cost few wake-ups. It bounds the smoothness
/// of the flow.
pub const TICK: Duration = Duration::from_millis(2);

/// How far one tenant may be ahead of another that waits: what flows through the limiter in that time.
pub const AHEAD: Duration = Duration::from_millis(10);

/// A tenant that waits and does not come back so long after its time has no claim any more.
const PATIENCE: Duration = Duration::from_millis(10);

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

    /// An eventfd for [`join`](Self::join).
    pub fn waker() -> io::Result<Arc<EventFd>> {
        EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Arc::new)
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
