#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::fs::File;

use super::*;
use crate::virtio::testing::{Buffer, Driver, Rig, suite::DeviceUnderTest};

struct RngTest;

impl DeviceUnderTest for RngTest {
    const FEATURES: u64 = 0;
    const EAGER_QUEUES: &'static [u16] = &[0];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        (Self, Box::new(Rng::new(File::open("/dev/urandom").unwrap())))
    }

    fn probe(&mut self, driver: &mut Driver) {
        let (_, first) = driver.request(REQUESTS, &[Buffer::Writable(32), Buffer::Writable(32)]);
        let (_, second) = driver.request(REQUESTS, &[Buffer::Writable(64)]);
        assert_eq!((first.len(), second.len()), (64, 64));
        assert_ne!(first, second);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (REQUESTS, vec![Buffer::Writable(64)])
    }
}

crate::virtio_device_tests!(RngTest);
crate::virtio_saved_device_tests!(RngTest, "virtio-rng");

fn running(source: File) -> Driver {
    let mut driver = Driver::new(Rig::new(Box::new(Rng::new(source))));
    driver.start(0);
    driver
}

#[test]
fn a_request_gets_at_most_64_kib_however_much_it_asks_for() {
    let mut driver = running(File::open("/dev/urandom").unwrap());
    let (_, bytes) = driver.request(REQUESTS, &[Buffer::Writable(8 << 20), Buffer::Writable(8 << 20)]);
    assert_eq!(bytes.len(), 64 << 10);
    assert!(bytes.rchunks(64).next().unwrap().iter().any(|byte| *byte != 0));
}

#[test]
fn a_request_without_a_buffer_to_fill_comes_back_empty_and_is_counted() {
    let mut driver = running(File::open("/dev/urandom").unwrap());
    let (used, _) = driver.request(REQUESTS, &[Buffer::Readable(vec![0; 16])]);
    assert_eq!(used.written, 0);
    assert_eq!(
        driver
            .rig
            .device
            .counters()
            .guest_faults
            .load(std::sync::atomic::Ordering::Relaxed),
        1
    );
    let (used, _) = driver.request(REQUESTS, &[Buffer::Writable(16)]);
    assert_eq!(used.written, 16);
}

#[test]
fn a_source_that_fails_gives_empty_answers_and_a_report() {
    let mut driver = running(File::open("/dev/null").unwrap());
    for _ in 0..50 {
        let (used, _) = driver.request(REQUESTS, &[Buffer::Writable(16)]);
        assert_eq!(used.written, 0);
    }
    let events = driver.rig.sink.events();
    assert!(matches!(
        driver.rig.sink.wait(),
        crate::virtio::fault::DeviceEvent::BackendError(_)
    ));
    assert!(events.len() <= 5, "a guest can flood the log: {}", events.len());
}
