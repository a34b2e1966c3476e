//! Model of the order in which driver and device see each other's writes. Loom explores all
//! interleavings and all values that weak memory permits, with the functions of the real queue.
//!
//! The driver's part follows Linux (2.7.6, 2.7.7, 2.7.10). Each synchronizing operation is omitted
//! once. In that case the model must find an endless wait of the driver or the device, or a
//! concurrent read and write of a buffer.

use std::convert::Infallible;

use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering, fence},
    },
    thread,
};

use crate::virtio::queue::{Field, Fields, ask_to_notify, available, publish, wants_interrupt};

/// Omitted operation of the device's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    Fence,
    Release,
    Acquire,
}

/// A queue with one buffer in either direction.
struct Ring {
    fields: [AtomicU16; 6],
    /// Entries that the available index and the used index publish. Their content is irrelevant.
    avail: UnsafeCell<()>,
    used: UnsafeCell<()>,
    interrupted: AtomicBool,
    notified: AtomicBool,
    without: Without,
}

impl Ring {
    fn new(without: Without) -> Self {
        Self {
            fields: std::array::from_fn(|_| AtomicU16::new(0)),
            avail: UnsafeCell::new(()),
            used: UnsafeCell::new(()),
            interrupted: AtomicBool::new(false),
            notified: AtomicBool::new(false),
            without,
        }
    }

    fn field(&self, field: Field) -> &AtomicU16 {
        &self.fields[field as usize]
    }

    /// Loom fails the test when somebody may write the entry meanwhile.
    fn read(entry: &UnsafeCell<()>) {
        entry.with(|_| ());
    }

    /// Loom fails the test when somebody may use the entry meanwhile.
    fn write(entry: &UnsafeCell<()>) {
        entry.with_mut(|_| ());
    }
}

impl Fields for Ring {
    type Error = Infallible;

    fn load(&self, field: Field, order: Ordering) -> Result<u16, Infallible> {
        let order = if self.without == Without::Acquire {
            Ordering::Relaxed
        } else {
            order
        };
        Ok(self.field(field).load(order))
    }

    fn store(&self, field: Field, value: u16, order: Ordering) -> Result<(), Infallible> {
        let order = if self.without == Without::Release {
            Ordering::Relaxed
        } else {
            order
        };
        self.field(field).store(value, order);
        Ok(())
    }

    fn fence(&self) {
        if self.without != Without::Fence {
            fence(Ordering::SeqCst);
        }
    }
}

/// Runs the driver and the device concurrently in all interleavings, and checks the result.
/// Initially, neither side requests notifications.
fn model(
    without: Without,
    driver: impl Fn(&Ring) + Copy + Send + Sync + 'static,
    device: impl Fn(&Ring) + Send + Sync + 'static,
    check: impl Fn(&Ring) + Send + Sync + 'static,
) {
    Builder::new().check(move || {
        let ring = Arc::new(Ring::new(without));
        for (wish, value) in [
            (Field::UsedEvent, 0x8000),
            (Field::AvailFlags, 1),
            (Field::AvailEvent, u16::MAX),
            (Field::UsedFlags, 1),
        ] {
            ring.field(wish).store(value, Ordering::Relaxed);
        }
        let other = Arc::clone(&ring);
        let guest = thread::spawn(move || driver(&other));
        device(&ring);
        guest.join().unwrap();
        check(&ring);
    });
}

/// Whether a notification is due, as the driver finds out (2.7.10.1).
fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The driver waits for the device's answer: it asks for an interrupt, and sleeps if there is none yet.
fn interrupts(without: Without, event_idx: bool) {
    let wish = if event_idx {
        Field::UsedEvent
    } else {
        Field::AvailFlags
    };
    let driver = move |ring: &Ring| {
        ring.field(wish).store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if ring.field(Field::UsedIndex).load(Ordering::Acquire) == 1 {
            Ring::read(&ring.used);
            // It is awake anyway.
            ring.interrupted.store(true, Ordering::Relaxed);
        }
    };
    let device = move |ring: &Ring| {
        Ring::write(&ring.used);
        publish(ring, 1).unwrap();
        if wants_interrupt(ring, event_idx, 0, 1).unwrap() {
            ring.interrupted.store(true, Ordering::Relaxed);
        }
    };
    model(without, driver, device, |ring| {
        let awake = ring.interrupted.load(Ordering::Relaxed);
        assert!(awake, "the driver waits for ever");
    });
}

/// The device waits for the driver's buffer: it asks for a notification, and sleeps if there is none yet.
fn notifications(without: Without, event_idx: bool) {
    let driver = move |ring: &Ring| {
        Ring::write(&ring.avail);
        ring.field(Field::AvailIndex).store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        let wanted = if event_idx {
            passes(ring.field(Field::AvailEvent).load(Ordering::Relaxed), 0, 1)
        } else {
            ring.field(Field::UsedFlags).load(Ordering::Relaxed) == 0
        };
        if wanted {
            ring.notified.store(true, Ordering::Relaxed);
        }
    };
    let device = move |ring: &Ring| {
        if ask_to_notify(ring, event_idx, 0).unwrap() {
            assert_eq!(available(ring).unwrap(), 1);
            Ring::read(&ring.avail);
            ring.notified.store(true, Ordering::Relaxed);
        }
    };
    model(without, driver, device, |ring| {
        let awake = ring.notified.load(Ordering::Relaxed);
        assert!(awake, "the device waits for ever");
    });
}

/// A buffer goes to the device and comes back.
fn there_and_back(without: Without) {
    let driver = |ring: &Ring| {
        Ring::write(&ring.avail);
        ring.field(Field::AvailIndex).store(1, Ordering::Release);
        if ring.field(Field::UsedIndex).load(Ordering::Acquire) == 1 {
            Ring::read(&ring.used);
        }
    };
    let device = |ring: &Ring| {
        if available(ring).unwrap() == 1 {
            Ring::read(&ring.avail);
            Ring::write(&ring.used);
            publish(ring, 1).unwrap();
        }
    };
    model(without, driver, device, |_| ());
}

#[test]
fn no_interrupt_is_lost() {
    interrupts(Without::Nothing, true);
    interrupts(Without::Nothing, false);
}

#[test]
fn no_notification_is_lost() {
    notifications(Without::Nothing, true);
    notifications(Without::Nothing, false);
}

#[test]
fn what_an_index_publishes_is_seen_with_it() {
    there_and_back(Without::Nothing);
}

#[test]
#[should_panic(expected = "the driver waits for ever")]
fn without_the_devices_fence_the_model_loses_an_interrupt() {
    interrupts(Without::Fence, true);
}

#[test]
#[should_panic(expected = "the driver waits for ever")]
fn without_the_devices_fence_the_model_loses_an_interrupt_by_flag() {
    interrupts(Without::Fence, false);
}

#[test]
#[should_panic(expected = "the device waits for ever")]
fn without_the_devices_fence_the_model_loses_a_notification() {
    notifications(Without::Fence, true);
}

#[test]
#[should_panic(expected = "the device waits for ever")]
fn without_the_devices_fence_the_model_loses_a_notification_by_flag() {
    notifications(Without::Fence, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_release_the_model_reads_a_used_entry_while_it_is_written() {
    there_and_back(Without::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_acquire_the_model_reads_an_available_entry_while_it_is_written() {
    there_and_back(Without::Acquire);
}
