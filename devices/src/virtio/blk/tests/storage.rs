//! A host whose storage fills up, stalls, and keeps a journal.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use block::{Access, Completion, Engine, Extent, Geometry, Image, Operation, Request};
use vmm_base::sys::Iovecs;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::options;
use crate::{
    component::Component as _,
    virtio::{
        blk::{Blk, BlkControl, BlkOptions, OnError},
        testing::{Driver, Rig},
    },
};

pub const CAPACITY: u64 = 1 << 20;

/// State that the test controls.
pub struct Storage {
    /// Writes, discards and zeroings fail.
    pub full: AtomicBool,
    /// Everything fails with that.
    pub refusal: Mutex<Option<io::ErrorKind>>,
    /// Nothing completes.
    pub stalled: AtomicBool,
    /// Submitted operations.
    pub asked: Mutex<Vec<Operation>>,
    /// What succeeded.
    pub done: Mutex<Vec<Operation>>,
    /// Events of the engines, to signal that requests may complete.
    events: Mutex<Vec<Arc<EventFd>>>,
}

impl Storage {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            full: AtomicBool::new(false),
            refusal: Mutex::default(),
            stalled: AtomicBool::new(false),
            asked: Mutex::default(),
            done: Mutex::default(),
            events: Mutex::default(),
        })
    }

    /// A running disk of that storage.
    pub fn disk(self: &Arc<Self>, queues: u16, on_error: OnError) -> (Driver, BlkControl) {
        self.disk_with(BlkOptions {
            queues,
            on_error,
            ..options()
        })
    }

    pub fn disk_with(self: &Arc<Self>, options: BlkOptions) -> (Driver, BlkControl) {
        let front = Blk::new(Box::new(StorageImage(self.clone())), options);
        let control = front.control();
        let mut driver = Driver::new(Rig::new(Box::new(front)));
        driver.start(super::ALL);
        (driver, control)
    }

    /// Replaces the driver's disk with another disk on the same storage, restored from the old
    /// disk's state and paused.
    pub fn restored(self: &Arc<Self>, driver: &mut Driver, options: BlkOptions) -> BlkControl {
        let section = driver.rig.device.save().unwrap();
        let front = Blk::new(Box::new(StorageImage(self.clone())), options);
        let control = front.control();
        driver.rig = driver.rig.restored(Box::new(front), &section).unwrap();
        assert_eq!(driver.rig.device.save().unwrap(), section);
        control
    }

    pub fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::SeqCst);
    }

    pub fn refuse(&self, kind: io::ErrorKind) {
        *self.refusal.lock().unwrap() = Some(kind);
    }

    pub fn stall(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::SeqCst);
        for event in self.events.lock().unwrap().iter() {
            event.write(1).unwrap();
        }
    }

    pub fn asked(&self) -> Vec<Operation> {
        self.asked.lock().unwrap().clone()
    }

    pub fn done(&self) -> Vec<Operation> {
        self.done.lock().unwrap().clone()
    }
}

struct StorageImage(Arc<Storage>);

impl Image for StorageImage {
    fn capacity(&self) -> u64 {
        CAPACITY
    }
    fn read_only(&self) -> bool {
        false
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            physical_block: 4096,
            optimal_io: 0,
            discard_granularity: Some(4096),
        }
    }
    fn engine(&self) -> io::Result<Box<dyn Engine>> {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        self.0.events.lock().unwrap().push(event.clone());
        Ok(Box::new(StorageEngine {
            storage: self.0.clone(),
            waiting: VecDeque::new(),
            event,
        }))
    }
    fn access(&self) -> io::Result<Box<dyn Access>> {
        Ok(Box::new(Nothing))
    }
    fn grow(&self, _capacity: Option<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn commit(&self) -> io::Result<()> {
        Ok(())
    }
}

/// It has no content.
struct Nothing;

impl Access for Nothing {
    fn execute(&mut self, _operation: Operation, _buffers: &mut Iovecs) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn extent(&self, offset: u64) -> io::Result<Extent> {
        Ok(Extent {
            length: CAPACITY - offset,
            is_hole: true,
        })
    }
}

struct StorageEngine {
    storage: Arc<Storage>,
    waiting: VecDeque<Request>,
    event: Arc<EventFd>,
}

impl Engine for StorageEngine {
    fn submit(&mut self, request: Request) {
        self.storage.asked.lock().unwrap().push(request.operation);
        self.waiting.push_back(request);
    }
    fn commit(&mut self) -> io::Result<()> {
        self.event.write(1)
    }
    fn completed(&mut self) -> Option<Completion> {
        if self.storage.stalled.load(Ordering::SeqCst) {
            return None;
        }
        let Request {
            token,
            operation,
            buffers,
        } = self.waiting.pop_front()?;
        let reading = matches!(operation, Operation::Read { .. } | Operation::Flush);
        let refusal = *self.storage.refusal.lock().unwrap();
        let result = if let Some(kind) = refusal {
            Err(kind.into())
        } else if self.storage.full.load(Ordering::SeqCst) && !reading {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            self.storage.done.lock().unwrap().push(operation);
            Ok(())
        };
        Some(Completion {
            token,
            result,
            buffers,
        })
    }
    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
    fn depth(&self) -> usize {
        4
    }
    fn event(&self) -> Option<&EventFd> {
        Some(&self.event)
    }
    fn wait(&mut self, _deadline: Instant) -> io::Result<()> {
        std::thread::yield_now();
        Ok(())
    }
}
