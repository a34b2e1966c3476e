//! State that a balloon's front, its worker and the machine's control share.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::config::{Config, PAGE, PAGE_SHIFT};
use crate::{
    state::{StateError, message, narrow},
    virtio::signals::Signals,
};

/// Memory statistics from the guest's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestStats {
    /// By tag (virtio 1.3, 5.5.6.3).
    pub values: BTreeMap<u16, u64>,
    /// When it said so.
    pub time: SystemTime,
}

/// State of a balloon. All fields except `guest` are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BalloonStats {
    /// Target size.
    pub target: u64,
    /// What it holds: pages given by the driver and not taken back.
    pub held: u64,
    /// Size according to the driver, for display only.
    pub claimed: u64,
    /// Given back through free page reports, since the machine was built.
    pub reported: u64,
    /// `None` when the driver never said anything.
    pub guest: Option<GuestStats>,
}

/// State of a balloon that more than one thread looks at.
pub(super) struct Shared {
    /// In pages, as the next two.
    target: AtomicU32,
    actual: AtomicU32,
    held: AtomicU64,
    poison: AtomicU32,
    /// In bytes.
    reported: AtomicU64,
    guest: Mutex<Guest>,
    /// The driver said something, or is no longer there.
    answered: Condvar,
    /// There once the device is in a machine.
    connection: OnceLock<Connection>,
}

struct Connection {
    signals: Arc<Signals>,
    /// Wakes the worker, which then asks the driver for statistics.
    wake: Arc<EventFd>,
}

#[derive(Default)]
struct Guest {
    /// The driver runs and has given its buffer for statistics.
    speaks: bool,
    /// How often it said something.
    answers: u64,
    stats: Option<GuestStats>,
}

impl Shared {
    pub(super) fn new(target: u64) -> Self {
        Self {
            target: AtomicU32::new(pages(target)),
            actual: AtomicU32::new(0),
            held: AtomicU64::new(0),
            poison: AtomicU32::new(0),
            reported: AtomicU64::new(0),
            guest: Mutex::default(),
            answered: Condvar::new(),
            connection: OnceLock::new(),
        }
    }

    /// Connects the balloon to the machine. Returns the event that wakes the worker. Fails on a
    /// second call.
    pub(super) fn connect(&self, signals: &Arc<Signals>) -> io::Result<Arc<EventFd>> {
        let wake = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        let connection = Connection {
            signals: Arc::clone(signals),
            wake: Arc::clone(&wake),
        };
        self.connection
            .set(connection)
            .map_err(|_| io::Error::from(io::ErrorKind::AlreadyExists))?;
        Ok(wake)
    }

    pub(super) fn config(&self) -> Config {
        Config {
            num_pages: self.target.load(Ordering::SeqCst).into(),
            actual: self.actual.load(Ordering::SeqCst).into(),
            free_page_hint_cmd_id: 0.into(),
            poison_val: self.poison.load(Ordering::SeqCst).into(),
        }
    }

    pub(super) fn set_actual(&self, pages: u32) {
        self.actual.store(pages, Ordering::SeqCst);
    }

    pub(super) fn set_poison(&self, value: u32) {
        self.poison.store(value, Ordering::SeqCst);
    }

    pub(super) fn poison(&self) -> u32 {
        self.poison.load(Ordering::SeqCst)
    }

    pub(super) fn set_held(&self, pages: u64) {
        self.held.store(pages, Ordering::SeqCst);
    }

    pub(super) fn add_reported(&self, bytes: u64) {
        self.reported.fetch_add(bytes, Ordering::SeqCst);
    }

    /// From now on the driver can be asked, or not any more.
    pub(super) fn set_speaks(&self, speaks: bool) {
        self.guest().speaks = speaks;
        self.answered.notify_all();
    }

    /// The driver said something.
    pub(super) fn said(&self, values: BTreeMap<u16, u64>) {
        let mut guest = self.guest();
        guest.answers = guest.answers.wrapping_add(1);
        guest.stats = Some(GuestStats {
            values,
            time: SystemTime::now(),
        });
        self.answered.notify_all();
    }

    /// Forgets the driver and its statistics after a reset.
    pub(super) fn forget(&self) {
        self.set_held(0);
        let mut guest = self.guest();
        guest.speaks = false;
        guest.stats = None;
        self.answered.notify_all();
    }

    pub(super) fn save(&self) -> message::VirtioBalloon {
        let stats = self.guest().stats.clone();
        message::VirtioBalloon {
            target: self.target.load(Ordering::SeqCst),
            actual: self.actual.load(Ordering::SeqCst),
            poison: self.poison(),
            reported: self.reported.load(Ordering::SeqCst),
            statistics: stats.map(|stats| message::VirtioBalloonStatistics {
                time: nanos(stats.time),
                values: stats
                    .values
                    .iter()
                    .map(|(tag, value)| message::VirtioBalloonStatistic {
                        tag: (*tag).into(),
                        value: *value,
                    })
                    .collect(),
            }),
        }
    }

    pub(super) fn restore(&self, saved: &message::VirtioBalloon) -> Result<(), StateError> {
        let stats = saved.statistics.as_ref().map(guest_stats).transpose()?;
        self.target.store(saved.target, Ordering::SeqCst);
        self.set_actual(saved.actual);
        self.set_poison(saved.poison);
        self.reported.store(saved.reported, Ordering::SeqCst);
        self.guest().stats = stats;
        Ok(())
    }

    fn guest(&self) -> MutexGuard<'_, Guest> {
        self.guest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle on a balloon for everybody but its driver.
#[derive(Clone)]
pub struct BalloonControl {
    pub(super) shared: Arc<Shared>,
}

impl BalloonControl {
    /// Sets the target size in bytes, rounded down to a multiple of [`PAGE`], and notifies the
    /// driver.
    pub fn set_target(&self, bytes: u64) {
        self.shared.target.store(pages(bytes), Ordering::SeqCst);
        if let Some(connection) = self.shared.connection.get() {
            connection.signals.config_changed();
        }
    }

    /// Returns the current state.
    pub fn stats(&self) -> BalloonStats {
        let guest = self.shared.guest().stats.clone();
        self.with(guest)
    }

    /// Asks the driver for statistics and returns the state. Waits for the answer for at most
    /// `patience`. If the driver does not run or does not answer in time, the state contains the
    /// last statistics.
    pub fn ask(&self, patience: Duration) -> BalloonStats {
        let mut guest = self.shared.guest();
        if let Some(connection) = self.shared.connection.get().filter(|_| guest.speaks) {
            let before = guest.answers;
            // Full only when it is readable anyway.
            let _full = connection.wake.write(1);
            (guest, _) = self
                .shared
                .answered
                .wait_timeout_while(guest, patience, |guest| guest.speaks && guest.answers == before)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let stats = guest.stats.clone();
        drop(guest);
        self.with(stats)
    }

    fn with(&self, guest: Option<GuestStats>) -> BalloonStats {
        let shared = &self.shared;
        let bytes = |pages: &AtomicU32| u64::from(pages.load(Ordering::SeqCst)).saturating_mul(PAGE);
        BalloonStats {
            target: bytes(&shared.target),
            held: shared.held.load(Ordering::SeqCst).saturating_mul(PAGE),
            claimed: bytes(&shared.actual),
            reported: shared.reported.load(Ordering::SeqCst),
            guest,
        }
    }
}

/// Since the Unix epoch.
fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn guest_stats(saved: &message::VirtioBalloonStatistics) -> Result<GuestStats, StateError> {
    let values = saved.values.iter();
    let values = values.map(|each| Ok((narrow("statistics.values.tag", each.tag)?, each.value)));
    Ok(GuestStats {
        values: values.collect::<Result<_, StateError>>()?,
        time: UNIX_EPOCH
            .checked_add(Duration::from_nanos(saved.time))
            .ok_or_else(|| StateError::invalid("statistics.time", "too late"))?,
    })
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX)
}
