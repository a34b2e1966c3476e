//! In-memory mock of a machine's services for devices.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use vmm_sys_util::eventfd::EventFd;

use super::PATIENCE;
use crate::{
    interrupt::{MsiController, MsiMessage, MsiVector, NotifyAddress, NotifyRegistry},
    virtio::fault::{DeviceEvent, EventSink},
};

#[derive(Default)]
struct Delivered {
    /// By message data.
    counts: Mutex<HashMap<u32, u64>>,
    changed: Condvar,
}

/// Interrupts that a test can wait for. The guest's view: messages, by their data.
#[derive(Default)]
pub struct MockMsi {
    delivered: Arc<Delivered>,
    /// Vectors in use.
    allocated: Arc<AtomicU64>,
}

impl MockMsi {
    /// How many messages with that data were delivered.
    pub fn count(&self, data: u32) -> u64 {
        self.delivered
            .counts
            .lock()
            .unwrap()
            .get(&data)
            .copied()
            .unwrap_or(0)
    }

    /// Waits until `done`, looking again after each message. False when [`PATIENCE`] ran out.
    pub fn wait_until(&self, mut done: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let mut counts = self.delivered.counts.lock().unwrap();
        while !done() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            counts = self.delivered.changed.wait_timeout(counts, left).unwrap().0;
        }
        true
    }

    /// Waits until at least `count` messages with that data were delivered.
    pub fn wait_for(&self, data: u32, count: u64) {
        let deadline = Instant::now() + PATIENCE;
        let mut counts = self.delivered.counts.lock().unwrap();
        while counts.get(&data).copied().unwrap_or(0) < count {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no interrupt {data}: {counts:?}");
            counts = self.delivered.changed.wait_timeout(counts, left).unwrap().0;
        }
    }

    /// How many vectors devices hold.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::SeqCst)
    }
}

struct MockVector {
    message: Mutex<Option<MsiMessage>>,
    delivered: Arc<Delivered>,
    allocated: Arc<AtomicU64>,
}

impl MsiController for MockMsi {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        self.allocated.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(MockVector {
            message: Mutex::new(None),
            delivered: Arc::clone(&self.delivered),
            allocated: Arc::clone(&self.allocated),
        }))
    }
}

impl MsiVector for MockVector {
    fn connect(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *self.message.lock().unwrap() = message;
        Ok(())
    }

    fn trigger(&self) {
        if let Some(message) = *self.message.lock().unwrap() {
            *self
                .delivered
                .counts
                .lock()
                .unwrap()
                .entry(message.data)
                .or_default() += 1;
            self.delivered.changed.notify_all();
        }
    }

    fn event(&self) -> Option<&EventFd> {
        None
    }
}

impl Drop for MockVector {
    fn drop(&mut self) {
        self.allocated.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Notifications as KVM's ioeventfd would give them.
#[derive(Default)]
pub struct MockNotify {
    events: Mutex<HashMap<NotifyAddress, EventFd>>,
}

impl MockNotify {
    /// Simulates a guest's write. Returns false if no event is registered at the address.
    pub fn signal(&self, address: NotifyAddress) -> bool {
        self.events
            .lock()
            .unwrap()
            .get(&address)
            .is_some_and(|event| event.write(1).is_ok())
    }

    /// Where notifications are listened for.
    pub fn addresses(&self) -> Vec<NotifyAddress> {
        self.events.lock().unwrap().keys().copied().collect()
    }
}

impl NotifyRegistry for MockNotify {
    fn register(&self, address: NotifyAddress, event: &EventFd) -> io::Result<()> {
        let previous = self.events.lock().unwrap().insert(address, event.try_clone()?);
        previous.map_or(Ok(()), |_| Err(io::ErrorKind::AlreadyExists.into()))
    }

    fn unregister(&self, address: NotifyAddress, _event: &EventFd) -> io::Result<()> {
        let previous = self.events.lock().unwrap().remove(&address);
        previous.map(|_| ()).ok_or(io::ErrorKind::NotFound.into())
    }
}

/// Keeps what devices report.
#[derive(Default)]
pub struct MockSink {
    events: Mutex<Vec<DeviceEvent>>,
    changed: Condvar,
}

impl MockSink {
    /// Waits for the first report.
    pub fn wait(&self) -> DeviceEvent {
        let events = self.events.lock().unwrap();
        let (events, _) = self
            .changed
            .wait_timeout_while(events, PATIENCE, |events| events.is_empty())
            .unwrap();
        events.first().expect("nothing was reported").clone()
    }

    /// All reports so far.
    pub fn events(&self) -> Vec<DeviceEvent> {
        self.events.lock().unwrap().clone()
    }
}

impl EventSink for MockSink {
    fn report(&self, _device: &str, event: DeviceEvent) {
        self.events.lock().unwrap().push(event);
        self.changed.notify_all();
    }
}
