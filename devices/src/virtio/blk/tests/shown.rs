//! Tests of when completions become visible to the driver, and of the order of the worker's steps.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};

use super::{
    FLUSH, GET_ID, IN, options,
    rings::{Ask, Rings},
};
use crate::{
    rate::{Limiter, Limits},
    virtio::blk::{
        BlkOptions,
        harness::{Harness, USED, host},
    },
};

/// Reads in flight at once.
const READS: u16 = 20;
/// VERSION_1.
const FEATURES: u64 = 1 << 32;

fn read() -> Ask {
    Ask {
        kind: IN,
        sector: 0,
        outgoing: Vec::new(),
        incoming: 512,
        cuts: Default::default(),
        short: 0,
    }
}

/// Puts all reads in flight. From then on, the host records the driver's view whenever the worker
/// asks for a completion.
fn reading() -> Rings {
    reading_with(options())
}

/// All reads under way are done at once, and the driver sees that.
fn finish(rings: &mut Rings) {
    while rings.harness.host.lock().unwrap().finish(0) {}
    rings.harness.event();
    assert!(!rings.answers().is_empty());
}

/// The driver adds so many reads, and then notifies.
fn offer(rings: &mut Rings, reads: u16) {
    for _ in 0..reads {
        rings.offer(&read()).expect("room in the ring");
    }
    rings.harness.kick();
}

fn reading_with(options: BlkOptions) -> Rings {
    let mut storage = host(1 << 20, false, 512);
    storage.depth = usize::from(READS);
    let mut rings = Rings::new(Harness::new(storage, options, FEATURES));
    offer(&mut rings, READS);
    {
        let mut host = rings.harness.host.lock().unwrap();
        assert_eq!(host.waiting.len(), usize::from(READS));
        host.watched = Some(rings.harness.memory.clone());
    }
    rings
}

#[test]
fn a_driver_that_looks_sees_the_first_of_many_answers_before_the_last() {
    let mut rings = reading();
    while rings.harness.host.lock().unwrap().finish(0) {}
    rings.harness.event();
    // Eight at a time: a driver that refills the ring meanwhile need not wait for the rest.
    let shown: Vec<u16> = (0..=READS).map(|answered| answered / 8 * 8).collect();
    let seen: Vec<u16> = rings.seen().into_iter().map(|(index, _)| index).collect();
    assert_eq!(seen[..shown.len()], shown);
    assert_eq!(rings.answers().len(), usize::from(READS));
}

#[test]
fn the_drivers_next_request_goes_before_the_host_is_asked_for_more() {
    let mut rings = reading();
    rings.harness.host.lock().unwrap().shy = true;
    for _ in 0..3 {
        rings.harness.host.lock().unwrap().finish(0);
    }
    for _ in 0..2 {
        rings.offer(&read()).expect("room in the ring");
    }
    rings.harness.event();
    let left = usize::from(READS) - 3;
    let waiting: Vec<usize> = rings.seen().into_iter().map(|(_, waiting)| waiting).collect();
    // The first answer leaves room for one request. Then the second request follows. After that,
    // the ring is empty.
    assert_eq!(waiting[..4], [left, left + 1, left + 2, left + 2], "{waiting:?}");
    assert_eq!(rings.answers().len(), 3);
    rings.harness.finish_all();
    assert_eq!(rings.answers().len(), left + 2);
}

#[test]
fn an_interrupt_is_raised_before_the_next_requests_are_handed_over() {
    let mut rings = reading();
    {
        let mut host = rings.harness.host.lock().unwrap();
        (0..3).for_each(|_| assert!(host.finish(0)));
        host.told = Some(rings.harness.counters.clone());
    }
    for _ in 0..2 {
        rings.offer(&read()).expect("room in the ring");
    }
    rings.harness.event();
    let commits = std::mem::take(&mut rings.harness.host.lock().unwrap().commits);
    assert_eq!(commits.first(), Some(&1), "{commits:?}");
    assert_eq!(rings.answers().len(), 3);
}

#[test]
fn completions_are_not_held_for_what_a_rate_limit_leaves_in_the_ring() {
    let limits = Limits {
        operations_per_second: 1,
        burst_operations: u64::from(READS),
        ..Limits::default()
    };
    let mut rings = reading_with(BlkOptions {
        limiter: Some(Limiter::new(limits)),
        ..options()
    });
    finish(&mut rings);
    // One waits for the limit, and two are in the ring behind it.
    offer(&mut rings, 4);
    let before = rings.harness.counters.interrupts.load(Ordering::Relaxed);
    let in_flight = rings.harness.host.lock().unwrap().waiting.len();
    assert!(in_flight >= 1);
    rings.harness.host.lock().unwrap().finish(0);
    rings.seen();
    rings.harness.event();
    let looks = rings.seen().len();
    assert!(looks <= 3, "it has looked for completions {looks} times");
    assert_eq!(
        rings.harness.counters.interrupts.load(Ordering::Relaxed),
        before + 1
    );
}

#[test]
fn the_used_length_is_what_was_written_from_the_beginning() {
    let length = |ask: &Ask, fails: bool| {
        let mut rings = Rings::new(Harness::new(host(1 << 20, false, 512), options(), FEATURES));
        rings.harness.host.lock().unwrap().failures = usize::from(fails);
        rings.offer(ask).expect("room in the ring");
        rings.harness.kick();
        rings.harness.finish_all();
        rings
            .harness
            .memory
            .read_obj::<u32>(GuestAddress(USED + 8))
            .unwrap()
    };
    let ask = |kind, incoming| Ask {
        kind,
        incoming,
        ..read()
    };
    assert_eq!(length(&read(), false), 513);
    assert_eq!(length(&read(), true), 0, "nothing is known of a failed read");
    assert_eq!(length(&ask(GET_ID, 20), false), 21);
    assert_eq!(
        length(&ask(GET_ID, 100), false),
        20,
        "the status is behind what was not written"
    );
    assert_eq!(length(&ask(GET_ID, 3), false), 4);
    assert_eq!(length(&ask(FLUSH, 0), false), 1);
    assert_eq!(length(&ask(99, 8), false), 0);
}
