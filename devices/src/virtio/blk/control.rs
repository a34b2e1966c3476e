//! State that a disk's front, its workers and the machine's control share.

use std::{
    fmt, io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use block::Image;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{
    mirror::Tracking,
    stats::{self, BlkStats, QueueCounters},
};
use crate::{
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
    /// One event per queue. Wakes the worker after a change of the limiter, or when flushes may
    /// continue.
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

    /// Returns the event that wakes a queue's worker after a change of this state.
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

    /// Removes one unsettled request. After the last one, flushes may continue.
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
    /// Returns the disk's statistics.
    pub fn stats(&self) -> BlkStats {
        stats::sum(self.shared.queues.iter())
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.shared.capacity.load(Ordering::SeqCst)
    }

    /// Grows the image to `capacity` bytes, or adopts the current size of a block device (`None`),
    /// and notifies the driver. The current size is not an error. Returns the image's errors, and
    /// `NotConnected` if the disk is gone.
    ///
    /// The call may wait for the host's file system, but not for requests of the guest.
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
        // The image's lock serializes changes of the capacity.
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

    /// Writes the cached state of completed requests to the image's files. Returns `NotConnected`
    /// if the disk is gone.
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

    /// Replaces the disk's limiter, or removes it. The workers check waiting requests again.
    pub fn set_limiter(&self, limiter: Option<Arc<Limiter>>) {
        self.shared.limiter.set(limiter);
        self.shared.wake_all();
    }
}
