//! Requests that the host can't carry out, on a disk that keeps them.

use vm_memory::{Bytes, GuestAddress};

use super::{
    storage::{CAPACITY, Storage},
    *,
};
use crate::component::Component as _;

fn out(sector: u64) -> Vec<Buffer> {
    vec![
        Buffer::Readable([header(OUT, sector), vec![7; 512]].concat()),
        Buffer::Writable(1),
    ]
}

fn flush() -> Vec<Buffer> {
    vec![Buffer::Readable(header(FLUSH, 0)), Buffer::Writable(1)]
}

fn written(sector: u64) -> Operation {
    Operation::Write {
        offset: sector * 512,
        stable: false,
    }
}

fn resume(driver: &mut Driver) {
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
}

/// A disk of a full host that keeps requests.
fn full(queues: u16) -> (Arc<Storage>, Driver, BlkControl) {
    let storage = Storage::new();
    let (driver, control) = storage.disk(queues, OnError::Hold);
    storage.set_full(true);
    (storage, driver, control)
}

fn held(driver: &Driver) -> usize {
    let held = |event: &&DeviceEvent| matches!(event, DeviceEvent::Held(_));
    driver.rig.sink.events().iter().filter(held).count()
}

fn answers(driver: &mut Driver, queue: u16, count: usize) {
    for _ in 0..count {
        assert_eq!(driver.wait_used(queue).1.pop(), Some(OK));
    }
}

#[test]
fn failed_requests_are_kept_and_done_again_in_order_after_a_pause() {
    let (storage, mut driver, control) = full(1);
    for sector in 1..=6 {
        driver.submit(0, &out(sector));
    }
    until(|| control.stats().held == 6);
    let DeviceEvent::Held(message) = driver.rig.sink.wait() else {
        panic!("{:?}", driver.rig.sink.events());
    };
    assert!(message.starts_with("write to the image: "), "{message}");
    // Others go on.
    driver.submit(0, &[Buffer::Readable(header(IN, 0)), Buffer::Writable(513)]);
    answers(&mut driver, 0, 1);
    until(|| control.stats().in_flight == 6);
    assert_eq!((held(&driver), driver.under_way(0)), (1, 6));

    // Still full: all are kept again, which is said again.
    resume(&mut driver);
    until(|| storage.asked().len() == 13 && control.stats().held == 6);
    until(|| held(&driver) == 2);
    assert_eq!(driver.under_way(0), 6);

    driver.rig.pause();
    assert_eq!(control.stats().held, 6);
    storage.set_full(false);
    driver.submit(0, &out(7));
    driver.rig.device.resume().unwrap();
    answers(&mut driver, 0, 7);
    assert!(driver.try_used(0).is_none());
    let expected: Vec<_> = (1..=7).map(written).collect();
    assert_eq!(storage.done()[1..], expected);
    until(|| control.stats().in_flight == 0);
    let stats = control.stats();
    assert_eq!((stats.held, stats.write.requests, stats.write.errors), (0, 7, 0));
    assert_eq!(stats.write.bytes, 7 * 512);
    assert_eq!(driver.rig.status(), 0xf);
}

#[test]
fn errors_of_the_host_become_io_errors_a_counter_and_an_event() {
    let storage = Storage::new();
    storage.refuse(io::ErrorKind::StorageFull);
    let (mut driver, control) = storage.disk(1, OnError::Report);
    for _ in 0..20 {
        assert_eq!(write(&mut driver, 0, &[0; 512]), IOERR);
        assert_eq!(read(&mut driver, 0, 512).1, IOERR);
        assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, IOERR);
    }
    let event = driver.rig.sink.wait();
    let expected = |message: &str| message.starts_with("write to the image: ");
    assert!(
        matches!(&event, DeviceEvent::BackendError(message) if expected(message)),
        "{event:?}"
    );
    // The last answer may be seen before its fault is counted.
    let faults = &driver.rig.device.counters().backend_faults;
    assert!(faults.load(Ordering::Relaxed) >= 59);
    assert!(driver.rig.sink.events().len() <= 5);
    until(|| control.stats().in_flight == 0);
    let stats = control.stats();
    for stats in [&stats.write, &stats.read, &stats.flush] {
        assert_eq!((stats.requests, stats.errors, stats.bytes), (20, 20, 0));
    }
    assert_eq!(stats.held, 0);
}

#[test]
fn a_pause_that_is_late_fails_and_the_disk_continues() {
    let storage = Storage::new();
    let (mut driver, _) = storage.disk(1, OnError::Report);
    storage.stall(true);
    driver.submit(0, &out(1));
    until(|| storage.asked().len() == 1);
    assert!(driver.rig.device.pause(Instant::now()).is_err());
    storage.stall(false);
    answers(&mut driver, 0, 1);
    driver.submit(0, &out(2));
    until(|| storage.asked().len() == 2);
    driver.rig.pause();
    assert_eq!(driver.try_used(0).unwrap().1.pop(), Some(OK));
}

#[test]
fn a_flush_of_any_queue_waits_until_no_write_is_kept() {
    let (storage, mut driver, control) = full(2);
    driver.submit(0, &out(1));
    until(|| control.stats().held == 1);
    driver.submit(1, &flush());
    driver.submit(0, &flush());
    until(|| control.stats().held == 3);
    assert!(!storage.asked().contains(&Operation::Flush));
    resume(&mut driver);
    until(|| storage.asked().len() == 2 && control.stats().held == 3);
    assert_eq!(driver.under_way(0) + driver.under_way(1), 3);

    storage.set_full(false);
    resume(&mut driver);
    answers(&mut driver, 0, 2);
    answers(&mut driver, 1, 1);
    assert_eq!(storage.done(), [written(1), Operation::Flush, Operation::Flush]);
}

#[test]
fn a_flush_under_way_when_a_write_is_kept_is_not_answered_but_done_again() {
    let (storage, mut driver, control) = full(1);
    storage.stall(true);
    driver.submit(0, &out(1));
    driver.submit(0, &flush());
    until(|| storage.asked().len() == 2);
    storage.stall(false);
    until(|| control.stats().held == 2);
    assert_eq!(driver.under_way(0), 2);
    storage.set_full(false);
    resume(&mut driver);
    answers(&mut driver, 0, 2);
    assert_eq!(storage.done(), [Operation::Flush, written(1), Operation::Flush]);
}

#[test]
fn a_reset_forgets_what_is_kept_and_flushes_flow_again() {
    let (storage, mut driver, control) = full(2);
    for sector in 0..5 {
        driver.submit(0, &out(sector));
    }
    until(|| control.stats().held == 5);
    driver.submit(1, &flush());
    until(|| control.stats().held == 6);
    // Some more are under way while it is reset.
    storage.stall(true);
    driver.submit(0, &out(9));
    until(|| storage.asked().len() == 6);
    driver.rig.write(Area::Common, 0x14, 1, 0);
    storage.stall(false);
    driver.relocate();
    driver.start(ALL);
    until(|| control.stats().in_flight == 0);
    assert_eq!(control.stats().held, 0);
    storage.set_full(false);
    assert_eq!(driver.request(1, &flush()).1, [OK]);
    assert_eq!(driver.request(0, &out(8)).1, [OK]);
    resume(&mut driver);
    assert_eq!(driver.request(0, &flush()).1, [OK]);
    assert_eq!(storage.done(), [Operation::Flush, written(8), Operation::Flush]);
}

#[test]
fn a_pause_of_the_whole_queue_in_mid_flight_loses_nothing_whether_it_fails_or_not() {
    let storage = Storage::new();
    let (mut driver, control) = storage.disk(2, OnError::Hold);
    for round in 0..60_u64 {
        storage.set_full(round % 3 == 1);
        for at in 0..10 {
            for queue in 0..2 {
                driver.submit(queue, &out((round * 10 + at) % (CAPACITY / 512)));
            }
        }
        resume(&mut driver);
        storage.set_full(false);
        resume(&mut driver);
        answers(&mut driver, 0, 10);
        answers(&mut driver, 1, 10);
    }
    until(|| control.stats().in_flight == 0);
    let stats = control.stats();
    assert_eq!((stats.write.requests, stats.write.errors), (60 * 20, 0));
    assert_eq!(storage.done().len(), 60 * 20);
}

#[test]
fn a_discard_that_the_host_can_not_do_at_all_is_not_kept() {
    let storage = Storage::new();
    storage.refuse(io::ErrorKind::Unsupported);
    let (mut driver, _) = storage.disk(1, OnError::Hold);
    let range = [&[0; 8][..], &8_u32.to_le_bytes(), &[0; 4]].concat();
    let zeroes = [header(WRITE_ZEROES, 0), range].concat();
    assert_eq!(request(&mut driver, zeroes, 0).1, UNSUPP);
    assert_eq!(held(&driver), 0);
}

fn holding(queues: u16) -> BlkOptions {
    BlkOptions {
        queues,
        on_error: OnError::Hold,
        ..options()
    }
}

#[test]
fn kept_requests_are_done_in_order_by_a_restored_disk_and_flushes_wait_for_those_of_all_queues() {
    let (storage, mut driver, control) = full(2);
    for sector in 1..=5 {
        driver.submit(1, &out(sector));
    }
    until(|| control.stats().held == 5);
    driver.submit(0, &flush());
    until(|| control.stats().held == 6);
    driver.rig.pause();
    // More than once, and once without a resume in between.
    for resumed in [false, true, false] {
        let control = storage.restored(&mut driver, holding(2));
        assert_eq!((control.stats().held, control.stats().in_flight), (6, 6));
        if resumed {
            let asked = storage.asked().len();
            driver.rig.device.resume().unwrap();
            until(|| storage.asked().len() == asked + 5 && control.stats().held == 6);
            driver.rig.pause();
        }
    }
    storage.set_full(false);
    driver.submit(1, &out(6));
    let control = storage.restored(&mut driver, holding(2));
    driver.rig.device.resume().unwrap();
    answers(&mut driver, 1, 6);
    answers(&mut driver, 0, 1);
    let done = storage.done();
    let writes: Vec<_> = done
        .iter()
        .filter(|done| **done != Operation::Flush)
        .copied()
        .collect();
    assert_eq!(writes, (1..=6).map(written).collect::<Vec<_>>());
    assert!(
        done.iter().position(|done| *done == Operation::Flush) >= Some(5),
        "{done:?}"
    );
    until(|| control.stats().in_flight == 0);
    assert_eq!(control.stats().held, 0);
    assert_eq!(driver.rig.status(), 0xf);
}

#[test]
fn a_reset_forgets_what_a_restored_disk_keeps_and_flushes_flow_again() {
    let (storage, mut driver, control) = full(2);
    driver.submit(1, &out(1));
    until(|| control.stats().held == 1);
    driver.rig.pause();
    let control = storage.restored(&mut driver, holding(2));
    driver.rig.reset_machine();
    driver.relocate();
    driver.start(ALL);
    assert_eq!(control.stats().held, 0);
    assert_eq!(driver.request(0, &flush()).1, [OK]);
}

#[test]
fn a_kept_request_whose_chain_is_broken_when_it_is_read_again_makes_the_device_ask_for_a_reset() {
    let (storage, mut driver, control) = full(1);
    driver.submit(0, &out(1));
    until(|| control.stats().held == 1);
    driver.rig.pause();
    let head = driver.rings[0].desc;
    let zeroes: [u8; 16 * 16] = [0; 16 * 16];
    driver
        .rig
        .memory
        .write_slice(&zeroes, GuestAddress(head))
        .unwrap();
    storage.restored(&mut driver, holding(1));
    driver.rig.device.resume().unwrap();
    driver.wait_needs_reset();
    storage.set_full(false);
    driver.relocate();
    driver.start(ALL);
    assert_eq!(driver.request(0, &flush()).1, [OK], "nothing is unsettled");
}

#[test]
fn a_request_that_is_made_available_again_and_again_is_kept_no_more_often_than_the_queue_has_descriptors() {
    let (storage, mut driver, control) = full(1);
    driver.submit(0, &out(1));
    until(|| control.stats().held == 1);
    // All other entries of the available ring name the same head.
    let (size, avail, memory) = (
        driver.rings[0].size,
        driver.rings[0].avail,
        driver.rig.memory.clone(),
    );
    let head: u16 = memory.read_obj(GuestAddress(avail + 4)).unwrap();
    for entry in 1..u64::from(size) {
        memory
            .write_obj(head, GuestAddress(avail + 4 + entry * 2))
            .unwrap();
    }
    driver.rings[0].set_avail_index(&memory, size);
    driver.kick(0);
    until(|| control.stats().held == u64::from(size));
    driver.rings[0].set_avail_index(&memory, size + 1);
    driver.kick(0);
    driver.wait_needs_reset();
    assert_eq!(control.stats().held, u64::from(size));
    storage.set_full(false);
    driver.relocate();
    driver.start(ALL);
    assert_eq!(driver.request(0, &out(2)).1, [OK]);
}
