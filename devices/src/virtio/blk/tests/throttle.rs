//! Tests of rate limits in the worker. The tests in [`rate`](crate::virtio::rate) cover the limits'
//! arithmetic without a clock.

use super::{storage::Storage, *};
use crate::{
    component::Component as _,
    virtio::rate::{Limiter, Limits},
};

/// One request passes, and then no more for a day.
fn stingy() -> Arc<Limiter> {
    Limiter::new(Limits {
        bytes_per_second: 1,
        burst_bytes: 1,
        ..Limits::default()
    })
}

fn unlimited() -> Limits {
    Limits::default()
}

fn limited(limiter: &Arc<Limiter>) -> (Arc<Storage>, Driver, BlkControl) {
    let storage = Storage::new();
    let (mut driver, control) = storage.disk_with(BlkOptions {
        limiter: Some(limiter.clone()),
        queues: 2,
        ..options()
    });
    // A day's worth of debt.
    assert_eq!(read(&mut driver, 0, 128 * 1024).1, OK);
    (storage, driver, control)
}

fn submit_reads(driver: &mut Driver, queue: u16, count: u64) {
    for sector in 0..count {
        driver.offer(
            queue,
            &[Buffer::Readable(header(IN, sector)), Buffer::Writable(513)],
        );
    }
    driver.kick(queue);
}

fn answers(driver: &mut Driver, queue: u16) {
    while driver.under_way(queue) > 0 {
        assert_eq!(driver.wait_used(queue).1.pop(), Some(OK));
    }
}

#[test]
fn requests_over_the_limit_wait_until_it_is_lifted_and_the_worker_serves_on() {
    let limiter = stingy();
    let (storage, mut driver, control) = limited(&limiter);
    for queue in 0..2 {
        submit_reads(&mut driver, queue, 5);
    }
    // Waiting requests stay in the ring. Each worker has taken only the first request of its queue.
    until(|| control.stats().in_flight == 2);
    assert!(control.stats().throttled >= 2);
    until(|| control.stats().waiting == 8);
    // A pause does not wait for them, and they wait on after it.
    driver.rig.pause();
    let stats = control.stats();
    assert_eq!((stats.in_flight, stats.throttled, stats.waiting), (0, 0, 0));
    driver.rig.device.resume().unwrap();
    until(|| control.stats().throttled == 10);
    until(|| control.stats().waiting == 8);
    assert_eq!(storage.asked().len(), 1);
    limiter.set(unlimited());
    answers(&mut driver, 0);
    answers(&mut driver, 1);
    until(|| control.stats().throttled == 0);
    until(|| control.stats().waiting == 0);
    assert_eq!(storage.done().len(), 11);
}

#[test]
fn another_limiter_holds_at_once() {
    let (_storage, mut driver, control) = limited(&stingy());
    submit_reads(&mut driver, 0, 3);
    until(|| control.stats().throttled > 0);
    control.set_limiter(None);
    answers(&mut driver, 0);
    let other = stingy();
    control.set_limiter(Some(other.clone()));
    submit_reads(&mut driver, 1, 3);
    until(|| control.stats().throttled == 2);
    control.set_limiter(Some(Limiter::new(unlimited())));
    answers(&mut driver, 1);
}

#[test]
fn a_limit_that_lets_some_through_lets_all_through_in_time() {
    let limits = Limits {
        operations_per_second: 2000,
        burst_operations: 1,
        ..Limits::default()
    };
    let storage = Storage::new();
    let (mut driver, control) = storage.disk_with(BlkOptions {
        limiter: Some(Limiter::new(limits)),
        ..options()
    });
    let begin = Instant::now();
    submit_reads(&mut driver, 0, 100);
    answers(&mut driver, 0);
    // The limit sets this minimum, independent of the machine's speed.
    assert!(begin.elapsed().as_millis() >= 45, "{:?}", begin.elapsed());
    until(|| control.stats().in_flight == 0);
    assert_eq!(control.stats().throttled, 0);
}

#[test]
fn a_flush_is_not_limited_but_waits_behind_what_is() {
    let limiter = stingy();
    let (storage, mut driver, control) = limited(&limiter);
    assert_eq!(request(&mut driver, header(FLUSH, 0), 0).1, OK);
    assert_eq!(request(&mut driver, header(GET_ID, 0), 20).1, OK);
    submit_reads(&mut driver, 0, 1);
    until(|| control.stats().throttled == 1);
    driver.submit(0, &[Buffer::Readable(header(FLUSH, 0)), Buffer::Writable(1)]);
    // The other queue is not held up.
    driver.submit(1, &[Buffer::Readable(header(FLUSH, 0)), Buffer::Writable(1)]);
    answers(&mut driver, 1);
    assert_eq!(driver.under_way(0), 2);
    limiter.set(unlimited());
    answers(&mut driver, 0);
    assert_eq!(storage.done().last(), Some(&Operation::Flush));
}

#[test]
fn a_reset_while_a_request_waits_forgets_it() {
    let limiter = stingy();
    let (storage, mut driver, control) = limited(&limiter);
    submit_reads(&mut driver, 0, 3);
    until(|| control.stats().throttled > 0);
    driver.start(ALL);
    assert_eq!((control.stats().throttled, control.stats().in_flight), (0, 0));
    limiter.set(unlimited());
    assert_eq!(read(&mut driver, 3, 512).1, OK);
    assert_eq!(storage.done().len(), 2);
}

#[test]
fn disks_share_a_limiter() {
    let limiter = stingy();
    let (_first, mut one, control) = limited(&limiter);
    let storage = Storage::new();
    let (mut two, other) = storage.disk_with(BlkOptions {
        limiter: Some(limiter.clone()),
        ..options()
    });
    submit_reads(&mut two, 0, 1);
    until(|| other.stats().throttled == 1);
    assert_eq!(control.stats().throttled, 0);
    limiter.set(unlimited());
    answers(&mut two, 0);
    answers(&mut one, 0);
}

#[test]
fn zeroes_cost_as_many_bytes_as_if_they_were_written_and_a_discard_none() {
    use crate::virtio::blk::plan::{Plan, Range};
    let range = Range {
        offset: 0,
        length: 64 << 20,
        unmap: false,
    };
    let cost = |plan: Plan| {
        let cost = plan.cost(&[range; 32]);
        (cost.bytes, cost.operations)
    };
    assert_eq!(cost(Plan::WriteZeroes { ranges: 512 }), (2 << 30, 1));
    assert_eq!(cost(Plan::Discard { ranges: 512 }), (0, 1));
    assert_eq!(cost(Plan::Flush), (0, 0));
}
