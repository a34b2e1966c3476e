//! What a disk's front, its workers and the machine's control share.

use std::{
    fmt, io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{
    mirror::Tracking,
    stats::{self, BlkStats, QueueCounters},
};
use crate::{
    block::Image,
    rate::Limiter,
    virtio::{signals::Signals, throttle::LimiterCell},
};

/// One lock for one use: making the image larger.
pub(super) type SharedImage = Mutex<Box<dyn Image>>;

/// State of a disk that more than one thread looks at.
pub(super) struct Shared {
    /// In bytes, a multiple of the logical block; only grows.
    pub capacity: AtomicU64,
    /// Bytes in a logical block.
    block: u32,
    pub queues: Vec<QueueCounters>,
    pub limiter: LimiterCell,
    pub tracking: Tracking,
    /// Writes, discards and zeroings that failed, are kept, and have not succeeded yet; over all queues.
    unsettled: AtomicUsize,
    /// There once the device is in a machine.
    connection: OnceLock<Connection>,
}

struct Connection {
    signals: Arc<Signals>,
    /// By queue. Tells the worker that the limiter changed, or that flushes can go on.
    wakes: Vec<Arc<EventFd>>,
}

impl Shared {
    pub(super) fn new(capacity: u64, block: u32, queues: u16, limiter: Option<Arc<Limiter>>) -> Self {
        Self {
            capacity: AtomicU64::new(capacity),
            block,
            queues: (0..queues).map(|_| QueueCounters::default()).collect(),
            limiter: LimiterCell::new(limiter),
            tracking: Tracking::default(),
            unsettled: AtomicUsize::new(0),
            connection: OnceLock::new(),
        }
    }

    /// Connects it to the machine, once.
    pub(super) fn connect(&self, signals: &Arc<Signals>) -> io::Result<()> {
        let connection = Connection {
            signals: Arc::clone(signals),
            wakes: self
                .queues
                .iter()
                .map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Arc::new))
                .collect::<io::Result<_>>()?,
        };
        self.connection
            .set(connection)
            .map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// What a queue's worker is told through that something here changed.
    pub(super) fn wake_of(&self, queue: u16) -> Option<&Arc<EventFd>> {
        self.connection.get()?.wakes.get(usize::from(queue))
    }

    pub(super) fn counters(&self, queue: u16) -> Option<&QueueCounters> {
        self.queues.get(usize::from(queue))
    }

    /// Whether a flush may be carried out and completed: nothing that a driver wrote is kept back.
    pub(super) fn is_settled(&self) -> bool {
        self.unsettled.load(Ordering::SeqCst) == 0
    }

    pub(super) fn add_unsettled(&self) {
        self.unsettled.fetch_add(1, Ordering::SeqCst);
    }

    /// One less; with the last one, flushes can go on.
    pub(super) fn remove_unsettled(&self) {
        if self.unsettled.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        for wake in self
            .connection
            .get()
            .iter()
            .flat_map(|connection| &connection.wakes)
        {
            // Full only when it is readable anyway.
            let _full = wake.write(1);
        }
    }
}

/// A handle on a disk for everybody but its driver. It can be used while the disk is in use and after it is gone, and
/// does not keep the image open.
#[derive(Clone)]
pub struct BlkControl {
    pub(super) shared: Arc<Shared>,
    pub(super) image: Weak<SharedImage>,
}

impl fmt::Debug for BlkControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlkControl")
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl BlkControl {
    /// What the disk did so far.
    pub fn stats(&self) -> BlkStats {
        stats::sum(self.shared.queues.iter())
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.shared.capacity.load(Ordering::SeqCst)
    }

    /// Makes the image larger, to `capacity` bytes, or takes over what a block device has by now (`None`), and tells the
    /// driver. What it has already is no error; errors are the image's, and `NotConnected` when the disk is gone.
    ///
    /// It may wait for the host's file system, not for requests of the guest.
    pub fn grow(&self, capacity: Option<u64>) -> io::Result<()> {
        let block = u64::from(self.shared.block);
        if capacity.is_some_and(|capacity| !capacity.is_multiple_of(block)) {
            let message = format!("not a multiple of the logical block of {block} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        image.grow(capacity)?;
        let size = image.capacity();
        let now = size.saturating_sub(size.checked_rem(block).unwrap_or(0));
        // Under the image's lock nobody else changes it.
        if now > self.capacity() {
            let store = || self.shared.capacity.store(now, Ordering::SeqCst);
            match self.shared.connection.get() {
                Some(connection) => connection.signals.change_config(store),
                None => store(),
            }
        }
        drop(image);
        Ok(())
    }

    /// Writes to the image's files what it holds back of requests that have completed. `NotConnected` when the disk is gone.
    pub fn commit(&self) -> io::Result<()> {
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        image.commit()
    }

    /// Gives up the image's lock; see [`Image::unlock`]. The disk is paused.
    pub fn unlock(&self) -> io::Result<()> {
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        image.unlock()
    }

    /// Takes the image's lock again; false when somebody else has it.
    pub fn lock(&self) -> io::Result<bool> {
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        image.lock()
    }

    /// Limits the disk by another limiter from now on, or not at all. Requests that wait are looked at anew.
    pub fn set_limiter(&self, limiter: Option<Arc<Limiter>>) {
        self.shared.limiter.set(limiter);
        self.shared.wake_all();
    }
}
