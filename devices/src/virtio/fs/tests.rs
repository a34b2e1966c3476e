#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::atomic::Ordering;

use super::*;
use crate::{
    component::Component as _,
    virtio::{
        fault::DeviceEvent,
        testing::{
            Area, Buffer, Driver, Rig,
            back_end::{BackEnd, nobody},
            suite::DeviceUnderTest,
        },
    },
};

const REQUESTS: u16 = 1;
const INIT: u32 = 26;
const GETATTR: u32 = 3;
const ENOTCONN: [u8; 4] = [0x95, 0xff, 0xff, 0xff];

struct FsTest {
    _back_end: BackEnd,
}

fn request(opcode: u32) -> Vec<Buffer> {
    let mut head = vec![0; 40];
    head[4..8].copy_from_slice(&opcode.to_le_bytes());
    head[8..16].copy_from_slice(&7_u64.to_le_bytes());
    vec![Buffer::Readable(head), Buffer::Writable(16), Buffer::Writable(64)]
}

/// The error in the answer; 0 after a success.
fn ask(driver: &mut Driver, queue: u16, opcode: u32) -> [u8; 4] {
    let (used, answer) = driver.request(queue, &request(opcode));
    assert_eq!((used.written, &answer[8..16]), (16, &7_u64.to_le_bytes()[..]));
    answer[4..8].try_into().unwrap()
}

impl DeviceUnderTest for FsTest {
    const FEATURES: u64 = 0;
    const EAGER_QUEUES: &'static [u16] = &[0, 1];

    fn build() -> (Self, Box<dyn VirtioDevice>) {
        let (back_end, socket) = BackEnd::start();
        let device = Box::new(Fs::new("data", "data", socket).unwrap());
        (Self { _back_end: back_end }, device)
    }

    fn probe(&mut self, driver: &mut Driver) {
        assert_eq!(ask(driver, REQUESTS, INIT), [0; 4]);
        assert_eq!(ask(driver, 0, GETATTR), [0; 4]);
    }

    fn request(&self) -> (u16, Vec<Buffer>) {
        (REQUESTS, request(GETATTR))
    }
}

crate::virtio_device_tests!(FsTest);
crate::virtio_saved_device_tests!(FsTest, "virtio-fs");

fn served() -> (BackEnd, FsControl, Driver) {
    let (back_end, socket) = BackEnd::start();
    let device = Fs::new("data", "my data", socket).unwrap();
    let control = device.control();
    let mut driver = Driver::new(Rig::new(Box::new(device)));
    driver.start(1 << 29);
    assert_eq!(ask(&mut driver, REQUESTS, INIT), [0; 4]);
    (back_end, control, driver)
}

#[test]
fn the_configuration_has_the_tag_padded_with_zeroes_and_one_queue_for_requests() {
    let (_back_end, _control, driver) = served();
    let read = |at| u8::try_from(driver.rig.read(Area::Device, at, 1)).unwrap();
    let config: Vec<u8> = (0..40).map(read).collect();
    assert_eq!(&config[..8], b"my data\0");
    assert!(config[8..36].iter().all(|byte| *byte == 0));
    assert_eq!(config[36..], [1, 0, 0, 0]);
    for tag in ["", "x".repeat(37).as_str()] {
        assert!(Fs::new("data", tag, nobody()).is_err());
    }
}

#[test]
fn the_back_end_serves_the_rings_and_this_process_is_not_asked() {
    let (back_end, _control, mut driver) = served();
    let kicks = || driver.rig.device.counters().kicks.load(Ordering::Relaxed);
    let before = kicks();
    for _ in 0..50 {
        assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
    }
    assert_eq!(back_end.mood.served.load(Ordering::SeqCst), 51);
    let after = driver.rig.device.counters().kicks.load(Ordering::Relaxed);
    assert_eq!(after, before);
}

#[test]
fn requests_of_a_back_end_that_died_fail_at_once_and_a_new_mount_goes_to_the_next_one() {
    let (mut back_end, control, mut driver) = served();
    // The device answers the requests that the back end may have taken but has not answered.
    back_end.mood.stuck.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        driver.submit(REQUESTS, &request(GETATTR));
    }
    back_end.kill();
    for _ in 0..3 {
        assert_eq!(driver.wait_used(REQUESTS).0.written, 16);
    }
    assert!(matches!(driver.rig.sink.wait(), DeviceEvent::BackendError(_)));
    assert_eq!(ask(&mut driver, 0, GETATTR), ENOTCONN);
    assert_eq!(ask(&mut driver, REQUESTS, INIT), ENOTCONN, "there is none yet");

    let (next, socket) = BackEnd::start();
    control.set_backend(socket).unwrap();
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), ENOTCONN, "of the old mount");
    let mounted = (0..1000).any(|_| ask(&mut driver, REQUESTS, INIT) == [0; 4]);
    assert!(mounted);
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
    assert!(next.mood.served.load(Ordering::SeqCst) >= 2);
}

#[test]
fn requests_left_open_out_of_order_are_not_guessed() {
    let (mut back_end, _control, mut driver) = served();
    back_end.mood.keeps_one.store(true, Ordering::SeqCst);
    driver.submit(REQUESTS, &request(GETATTR));
    // The one behind it has its answer.
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
    back_end.kill();
    let event = driver.rig.sink.wait();
    let DeviceEvent::NeedsReset(why) = &event else {
        unreachable!("the device continues after {event:?}");
    };
    assert!(why.contains("out of order"), "{why}");
    assert!(driver.try_used(REQUESTS).is_none(), "no answer twice");
}

#[test]
fn a_request_without_room_for_an_answer_is_completed_when_nobody_serves() {
    let (mut back_end, _control, mut driver) = served();
    back_end.kill();
    driver.rig.sink.wait();
    let (used, _) = driver.request(0, &[Buffer::Readable(vec![0; 48])]);
    assert_eq!(used.written, 0);
    let (used, _) = driver.request(0, &[Buffer::Readable(vec![1; 3]), Buffer::Writable(16)]);
    assert_eq!(used.written, 16);
}

#[test]
fn a_driver_that_starts_without_a_back_end_is_refused_and_served_when_one_has_come() {
    let device = Fs::new("data", "data", nobody()).unwrap();
    let control = device.control();
    let mut driver = Driver::new(Rig::new(Box::new(device)));
    driver.start(0);
    assert_eq!(ask(&mut driver, REQUESTS, INIT), ENOTCONN);
    let (_next, socket) = BackEnd::start();
    control.set_backend(socket).unwrap();
    assert!((0..1000).any(|_| ask(&mut driver, REQUESTS, INIT) == [0; 4]));
}

#[test]
fn a_share_is_paused_and_goes_on_also_when_its_back_end_is_gone() {
    let (back_end, _control, mut driver) = served();
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
    drop(back_end);
    driver.rig.sink.wait();
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), ENOTCONN);
}

#[test]
fn a_queue_that_gets_another_vector_interrupts_by_that_one() {
    let (_back_end, _control, mut driver) = served();
    driver.rig.write(Area::Common, 0x16, 2, REQUESTS.into());
    driver.rig.write(Area::Common, 0x1a, 2, 0);
    let before = driver.rig.msi.count(0);
    driver.submit(REQUESTS, &request(GETATTR));
    driver.rig.msi.wait_for(0, before + 1);
}

#[test]
fn what_a_back_end_completed_and_did_not_signal_before_it_died_is_signalled() {
    let (mut back_end, _control, mut driver) = served();
    driver.rig.write(Area::Common, 0x16, 2, REQUESTS.into());
    driver.rig.write(Area::Common, 0x1a, 2, 0);
    // The change of the vector raises one interrupt itself.
    driver.rig.msi.wait_for(0, 1);
    back_end.mood.silent.store(true, Ordering::SeqCst);
    let served = back_end.mood.served.load(Ordering::SeqCst);
    driver.submit(REQUESTS, &request(GETATTR));
    while back_end.mood.served.load(Ordering::SeqCst) == served {
        std::thread::yield_now();
    }
    // A late signal from an earlier request would satisfy the wait below and weaken the test.
    let before = driver.rig.msi.count(0);
    back_end.kill();
    driver.rig.msi.wait_for(0, before + 1);
    assert_eq!(driver.wait_used(REQUESTS).0.written, 16);
}

#[test]
fn a_process_that_takes_the_place_of_another_during_a_pause_gets_nothing_of_the_old_mount() {
    let (mut back_end, control, mut driver) = served();
    driver.rig.pause();
    back_end.kill();
    let (next, socket) = BackEnd::start();
    control.set_backend(socket).unwrap();
    driver.rig.device.resume().unwrap();
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), ENOTCONN, "of the old mount");
    assert_eq!(next.mood.served.load(Ordering::SeqCst), 0);
    assert_eq!(ask(&mut driver, REQUESTS, INIT), [0; 4]);
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
}

/// Restores the driver's device with a new process. The new process receives the saved state of the
/// old process.
fn restored(driver: &mut Driver, refuses: bool) -> (BackEnd, FsControl) {
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let (next, socket) = BackEnd::start();
    next.mood.has_no_state.store(refuses, Ordering::SeqCst);
    let device = Fs::new("data", "my data", socket).unwrap();
    let control = device.control();
    driver.rig = driver.rig.restored(Box::new(device), &section).unwrap();
    driver.rig.device.resume().unwrap();
    (next, control)
}

#[test]
fn what_a_driver_has_open_goes_with_a_restored_device_to_its_process() {
    let (back_end, _control, mut driver) = served();
    // Longer than the capacity of a pipe, and not a multiple of it.
    let state: Vec<u8> = (0..=250).cycle().take(50_001).collect();
    back_end.mood.state.lock().unwrap().clone_from(&state);
    let (next, _control) = restored(&mut driver, false);
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4], "of the old mount");
    assert!(*next.mood.state.lock().unwrap() == state);
    // And on to one more.
    let (last, _control) = restored(&mut driver, false);
    assert_eq!(ask(&mut driver, 0, GETATTR), [0; 4]);
    assert!(*last.mood.state.lock().unwrap() == state);
}

#[test]
fn a_process_that_can_not_go_on_with_what_a_driver_has_open_is_let_go_and_the_next_mount_is_served() {
    let (_back_end, _control, mut driver) = served();
    let (refusing, control) = restored(&mut driver, true);
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), ENOTCONN);
    assert_eq!(ask(&mut driver, REQUESTS, INIT), ENOTCONN);
    assert_eq!(refusing.mood.served.load(Ordering::SeqCst), 0);
    let (_next, socket) = BackEnd::start();
    control.set_backend(socket).unwrap();
    assert!((0..1000).any(|_| ask(&mut driver, REQUESTS, INIT) == [0; 4]));
}

#[test]
fn a_device_whose_process_is_gone_or_gives_no_state_away_is_saved_with_that_or_not_at_all() {
    let (back_end, _control, mut driver) = served();
    back_end.mood.has_no_state.store(true, Ordering::SeqCst);
    driver.rig.pause();
    assert!(driver.rig.device.save().is_err());
    driver.rig.device.resume().unwrap();
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), [0; 4]);
    drop(back_end);
    driver.rig.sink.wait();
    let (_next, _control) = restored(&mut driver, false);
    assert_eq!(ask(&mut driver, REQUESTS, GETATTR), ENOTCONN, "of the old mount");
    assert_eq!(ask(&mut driver, REQUESTS, INIT), [0; 4]);
}
