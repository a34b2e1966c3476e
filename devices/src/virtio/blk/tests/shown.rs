//! Tests of when completions become visible to the driver, and of the order of the worker's steps.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};

use block::Operation;
use rstest::rstest;

use super::{
    DISCARD, F_FLUSH, FLUSH, GET_ID, IN, OUT, WRITE_ZEROES, options,
    rings::{Ask, Rings},
};
use crate::{
    virtio::blk::{
        BlkOptions,
        harness::{Harness, USED, host},
    },
    virtio::rate::{Limiter, Limits},
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

#[test]
fn requests_beyond_the_engines_depth_wait_and_end_in_any_order() {
    let mut storage = host(1 << 20, false, 512);
    storage.depth = 4;
    let mut rings = Rings::new(Harness::new(storage, options(), FEATURES));
    offer(&mut rings, 10);
    for (submitted, shy) in [(4, false), (4, true), (2, false)] {
        let host = rings.harness.host.clone();
        host.lock().unwrap().shy = shy;
        assert_eq!(host.lock().unwrap().waiting.len(), submitted);
        // The last one first.
        (0..submitted)
            .rev()
            .for_each(|at| assert!(host.lock().unwrap().finish(at)));
        rings.harness.event();
        assert_eq!(rings.answers().len(), submitted);
    }
}

/// The operations that the host gets for one request, one after the other; the driver is answered after the last one.
fn operations(ask: &Ask, features: u64) -> Vec<Operation> {
    let mut rings = Rings::new(Harness::new(host(1 << 20, false, 512), options(), features));
    rings.offer(ask).expect("room in the ring");
    rings.harness.kick();
    let mut operations = Vec::new();
    loop {
        let waiting = rings
            .harness
            .host
            .lock()
            .unwrap()
            .waiting
            .first()
            .map(|request| request.operation);
        let Some(operation) = waiting else { break };
        assert!(rings.answers().is_empty(), "{operations:?}");
        operations.push(operation);
        assert!(rings.harness.host.lock().unwrap().finish(0));
        rings.harness.event();
    }
    assert_eq!(rings.answers().len(), 1);
    operations
}

/// DISCARD and WRITE_ZEROES.
const RANGES: u64 = FEATURES | 3 << 13;

#[rstest]
#[case(RANGES | F_FLUSH, false)]
#[case(RANGES, true)]
fn changes_are_stable_when_answered_if_the_driver_has_no_flush(#[case] features: u64, #[case] stable: bool) {
    let write = Ask {
        kind: OUT,
        sector: 1,
        outgoing: vec![0; 512],
        incoming: 0,
        ..read()
    };
    let offset = 512;
    assert_eq!(
        operations(&write, features),
        [Operation::Write { offset, stable }]
    );
    let range = |sector: u64| [&sector.to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
    for kind in [DISCARD, WRITE_ZEROES] {
        let ranges = Ask {
            kind,
            outgoing: [range(0), range(16)].concat(),
            ..write.clone()
        };
        let operations = operations(&ranges, features);
        assert_eq!(operations.len(), 2 + usize::from(stable), "{operations:?}");
        let flushes = operations
            .iter()
            .filter(|operation| **operation == Operation::Flush);
        assert_eq!(flushes.count(), usize::from(stable));
    }
}
