//! State that a disk's front, its workers and the machine's control share: the capacity, the statistics, and the marks of
//! changes while the disk is copied.
//!
//! Each queue has its own counters in its own memory. Each counter has one writer, so counting is a
//! load and a store. A reader adds up the queues. The sums are only approximately from the same
//! moment.

use std::{
    fmt, io,
    ops::Range,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use block::{Changes, Content, Extent, Image};
use vmm_sys_util::eventfd::EventFd;

use crate::virtio::{
    queue::Backlog,
    rate::{Limiter, LimiterCell},
    signals::{Connection, Signals},
};

/// Number of latency buckets.
pub const BUCKETS: usize = 24;

/// One lock for one use: making the image larger.
pub(crate) type SharedImage = Mutex<Box<dyn Image>>;

/// State of a disk that more than one thread looks at.
pub(crate) struct Shared {
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

impl Shared {
    pub(crate) fn new(capacity: u64, block: u32, queues: u16, limiter: Option<Arc<Limiter>>) -> Self {
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
    pub(crate) fn connect(&self, signals: &Arc<Signals>) -> io::Result<()> {
        let connection = Connection::new(signals, self.queues.len())?;
        self.connection
            .set(connection)
            .map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Returns the event that wakes a queue's worker after a change of this state.
    pub(crate) fn wake_of(&self, queue: u16) -> Option<&Arc<EventFd>> {
        self.connection.get()?.wakes.get(usize::from(queue))
    }

    pub(crate) fn counters(&self, queue: u16) -> Option<&QueueCounters> {
        self.queues.get(usize::from(queue))
    }

    /// Whether a flush may be carried out and completed: nothing that a driver wrote is kept back.
    pub(crate) fn is_settled(&self) -> bool {
        self.unsettled.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn add_unsettled(&self) {
        self.unsettled.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes one unsettled request. After the last one, flushes may continue.
    pub(crate) fn remove_unsettled(&self) {
        if self.unsettled.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        if let Some(connection) = self.connection.get() {
            connection.wake_all();
        }
    }
}

/// A handle on a disk for everybody but its driver. It can be used while the disk is in use and after it is gone, and
/// does not keep the image open.
#[derive(Clone)]
pub struct BlkControl {
    shared: Arc<Shared>,
    image: Weak<SharedImage>,
}

impl fmt::Debug for BlkControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlkControl")
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl BlkControl {
    pub(crate) fn new(shared: &Arc<Shared>, image: &Arc<SharedImage>) -> Self {
        Self {
            shared: Arc::clone(shared),
            image: Arc::downgrade(image),
        }
    }

    /// Calls `action` with the image, which no other call uses meanwhile.
    fn with_image<T>(&self, action: impl FnOnce(&dyn Image) -> io::Result<T>) -> io::Result<T> {
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        action(&**image)
    }

    /// Returns the disk's statistics.
    pub fn stats(&self) -> BlkStats {
        sum(self.shared.queues.iter())
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
        self.with_image(|image| {
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
            Ok(())
        })
    }

    /// Writes the cached state of completed requests to the image's files. Returns `NotConnected`
    /// if the disk is gone.
    pub fn commit(&self) -> io::Result<()> {
        self.with_image(|image| image.commit())
    }

    /// Gives up the image's lock; see [`Image::unlock`]. The disk is paused.
    pub fn unlock(&self) -> io::Result<()> {
        self.with_image(|image| image.unlock())
    }

    /// Takes the image's lock again; false when somebody else has it.
    pub fn lock(&self) -> io::Result<bool> {
        self.with_image(|image| image.lock())
    }

    /// Replaces the disk's limiter, or removes it. The workers check waiting requests again.
    pub fn set_limiter(&self, limiter: Option<Arc<Limiter>>) {
        self.shared.limiter.set(limiter);
        self.shared.wake_all();
    }

    /// Begins to copy the disk. One at a time; `NotConnected` when the disk is gone.
    pub fn mirror(&self) -> io::Result<Mirror> {
        self.with_image(|image| {
            let capacity = image.capacity();
            let content = Content::new(image.access()?, capacity)?;
            let changes = self.shared.tracking.begin(capacity)?;
            Ok(Mirror {
                content,
                changes,
                shared: Arc::clone(&self.shared),
                image: Weak::clone(&self.image),
            })
        })
    }
}

/// Change tracking of the workers: on or off, and the target of the marks. While no copy runs, a
/// mark costs one load of a flag.
#[derive(Debug, Default)]
pub(crate) struct Tracking {
    is_on: AtomicBool,
    changes: RwLock<Option<Arc<Changes>>>,
}

impl Tracking {
    /// A range of the disk was changed, and its driver has not been told.
    pub(crate) fn mark(&self, offset: u64, length: u64) {
        // A worker that reads the flag too early has its change on the disk by now: the copy begins after the flag was set.
        if !self.is_on.load(Ordering::SeqCst) {
            return;
        }
        let changes = self.changes.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(changes) = &*changes {
            changes.mark(offset, length);
        }
    }

    fn begin(&self, capacity: u64) -> io::Result<Arc<Changes>> {
        let mut changes = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        if changes.is_some() {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the disk is being copied already",
            ));
        }
        let begun = Arc::new(Changes::new(capacity));
        *changes = Some(Arc::clone(&begun));
        self.is_on.store(true, Ordering::SeqCst);
        Ok(begun)
    }

    fn end(&self) {
        self.is_on.store(false, Ordering::SeqCst);
        *self.changes.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A disk that is being copied: its content, and which blocks of it the guest has changed since this was made. Its image stays open as long as
/// this lives.
pub struct Mirror {
    content: Content,
    changes: Arc<Changes>,
    shared: Arc<Shared>,
    /// Dead when the guest has given the disk back.
    image: Weak<SharedImage>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror")
            .field("content", &self.content)
            .finish_non_exhaustive()
    }
}

impl Mirror {
    /// Size of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.content.capacity()
    }

    /// Returns the change map. Writers other than the disk's driver must mark their changes there.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    /// Bytes in blocks that were changed and not [taken](Self::take) since.
    pub fn changed(&self) -> u64 {
        self.changes.bytes()
    }

    /// See [`Content::extent`].
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.is_there()?;
        self.content.extent(offset)
    }

    /// Changed blocks at `offset` or behind it, which count as unchanged from now on; see [`Changes::take`].
    pub fn take(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.is_there()?;
        self.changes.take(offset)
    }

    /// See [`Content::read`].
    pub fn read(&mut self, range: &Range<u64>, data: &mut Vec<u8>) -> io::Result<()> {
        self.content.read(range, data)
    }

    fn is_there(&self) -> io::Result<()> {
        match self.image.strong_count() {
            0 => Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "the disk was taken away while it was copied",
            )),
            _ => Ok(()),
        }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.shared.tracking.end();
    }
}

/// Kinds of requests that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    /// Discards and write-zeroes.
    Discard,
}

/// Statistics of a disk since its creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlkStats {
    /// Reads.
    pub read: OperationStats,
    /// Writes.
    pub write: OperationStats,
    /// Flushes.
    pub flush: OperationStats,
    /// Discards and write-zeroes.
    pub discard: OperationStats,
    /// Requests taken from the guest that have not completed yet.
    pub in_flight: u64,
    /// Requests that wait because of a rate limit at this moment.
    pub throttled: u64,
    /// Requests that failed and are kept to be tried again, and flushes that wait for them.
    pub held: u64,
    /// Requests that the driver made available and no worker has taken.
    pub waiting: u64,
}

/// Statistics of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperationStats {
    /// Answered requests, including errors. Invalid requests do not count.
    pub requests: u64,
    /// Bytes read, written, discarded or zeroed by requests that succeeded.
    pub bytes: u64,
    /// Answered with an error that the host caused.
    pub errors: u64,
    /// Sum of the times from taking a request to its completion.
    pub total_ns: u64,
    /// Bucket i counts requests that took less than 2^i microseconds and not less than 2^(i-1); the last one takes
    /// everything longer.
    pub latency_us_log2: [u64; BUCKETS],
}

impl OperationStats {
    fn add(&mut self, counters: &OperationCounters) {
        let add = |to: &mut u64, from: &AtomicU64| *to = to.saturating_add(from.load(Ordering::Relaxed));
        add(&mut self.requests, &counters.requests);
        add(&mut self.bytes, &counters.bytes);
        add(&mut self.errors, &counters.errors);
        add(&mut self.total_ns, &counters.total_ns);
        for (to, from) in self.latency_us_log2.iter_mut().zip(&counters.latency_us_log2) {
            add(to, from);
        }
    }
}

#[derive(Debug, Default)]
struct OperationCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    total_ns: AtomicU64,
    latency_us_log2: [AtomicU64; BUCKETS],
}

/// One queue's counters, written by its worker only. Apart from other queues' in memory.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct QueueCounters {
    read: OperationCounters,
    write: OperationCounters,
    flush: OperationCounters,
    discard: OperationCounters,
    in_flight: AtomicU64,
    throttled: AtomicU64,
    held: AtomicU64,
    /// Backlog of the ring, while the queue is served.
    ring: Mutex<Option<Arc<Backlog>>>,
}

impl QueueCounters {
    /// A request completed.
    pub(crate) fn completed(&self, kind: Kind, bytes: u64, took_ns: u64, ok: bool) {
        let counters = match kind {
            Kind::Read => &self.read,
            Kind::Write => &self.write,
            Kind::Flush => &self.flush,
            Kind::Discard => &self.discard,
        };
        add(&counters.requests, 1);
        if ok {
            add(&counters.bytes, bytes);
        } else {
            add(&counters.errors, 1);
        }
        add(&counters.total_ns, took_ns);
        if let Some(bucket) = counters.latency_us_log2.get(bucket(took_ns)) {
            add(bucket, 1);
        }
    }

    pub(crate) fn set_in_flight(&self, count: usize) {
        set(&self.in_flight, count);
    }

    pub(crate) fn set_throttled(&self, count: usize) {
        set(&self.throttled, count);
    }

    pub(crate) fn set_held(&self, count: usize) {
        set(&self.held, count);
    }

    /// The queue is served from now on, or no longer.
    pub(crate) fn set_ring(&self, backlog: Option<Arc<Backlog>>) {
        *self.ring.lock().unwrap_or_else(PoisonError::into_inner) = backlog;
    }

    fn waiting(&self) -> u64 {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.as_ref().map_or(0, |ring| ring.waiting().into())
    }
}

/// The sum over queues.
fn sum<'a>(queues: impl Iterator<Item = &'a QueueCounters>) -> BlkStats {
    let mut stats = BlkStats::default();
    for queue in queues {
        stats.read.add(&queue.read);
        stats.write.add(&queue.write);
        stats.flush.add(&queue.flush);
        stats.discard.add(&queue.discard);
        for (to, from) in [
            (&mut stats.in_flight, &queue.in_flight),
            (&mut stats.throttled, &queue.throttled),
            (&mut stats.held, &queue.held),
        ] {
            *to = to.saturating_add(from.load(Ordering::Relaxed));
        }
        stats.waiting = stats.waiting.saturating_add(queue.waiting());
    }
    stats
}

/// There is no other writer.
fn add(counter: &AtomicU64, value: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(value);
    counter.store(sum, Ordering::Relaxed);
}

fn set(figure: &AtomicU64, value: usize) {
    figure.store(u64::try_from(value).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn bucket(took_ns: u64) -> usize {
    let bits = u64::BITS.saturating_sub(took_ns.wrapping_div(1000).leading_zeros());
    usize::try_from(bits)
        .unwrap_or(usize::MAX)
        .min(BUCKETS.saturating_sub(1))
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_falls_into_the_bucket_of_its_power_of_two() {
        for (micros, index) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (1000, 10),
            (1 << 22, 23),
            (u64::MAX, 23),
        ] {
            assert_eq!(bucket(u64::saturating_mul(micros, 1000)), index, "{micros}");
        }
        assert_eq!(bucket(999), 0);
    }

    #[test]
    fn queues_are_added_up() {
        let queues = [QueueCounters::default(), QueueCounters::default()];
        for queue in &queues {
            queue.completed(Kind::Write, 512, 5000, true);
            queue.completed(Kind::Write, 512, 6000, false);
            queue.set_held(3);
        }
        let stats = sum(queues.iter());
        assert_eq!(
            (stats.write.requests, stats.write.bytes, stats.write.errors),
            (4, 1024, 2)
        );
        assert_eq!(
            (stats.write.total_ns, stats.held, stats.in_flight),
            (22_000, 6, 0)
        );
        assert_eq!(stats.write.latency_us_log2[3], 4);
        assert_eq!(stats.read, OperationStats::default());
    }
}
