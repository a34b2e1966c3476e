//! When the driver can see answers, how long the worker waits for more of them, and what it does first.

use std::time::Duration;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, GuestAddress};

use super::{
    FLUSH, GET_ID, IN, options,
    rings::{Ask, Rings},
};
use crate::{
    rate::{Limiter, Limits},
    virtio::{
        blk::{
            BlkOptions,
            harness::{AVAIL, Harness, USED, host},
        },
        testing::MockMsi,
    },
};

/// Reads under way at once.
const READS: u16 = 20;
/// After so many reads that often the worker knows how far apart they are, and what an interrupt takes.
const ROUNDS: u16 = 30;
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

/// All reads are under way, and from now on it is noted what the driver sees each time that the worker looks for a
/// completion.
fn reading() -> Rings {
    reading_with(FEATURES)
}

fn reading_with(features: u64) -> Rings {
    reading_as(features, options(), &MockMsi::default())
}

/// An interrupt takes so long that it is worth it to let answers wait for others.
fn reading_slowly(options: BlkOptions) -> Rings {
    let msi = MockMsi::slow(Duration::from_micros(100));
    let mut rings = reading_as(FEATURES | 1 << VIRTIO_RING_F_EVENT_IDX, options, &msi);
    for _ in 0..ROUNDS {
        others(&mut rings);
    }
    rings
}

/// All reads under way are done, and others are after a while: between two of them there is time for a sleep.
fn others(rings: &mut Rings) {
    finish(rings);
    std::thread::sleep(Duration::from_millis(2));
    offer(rings, READS);
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

fn reading_as(features: u64, options: BlkOptions, msi: &MockMsi) -> Rings {
    let mut storage = host(1 << 20, false, 512);
    storage.depth = usize::from(READS);
    let mut rings = Rings::new(Harness::with_interrupts(storage, options, features, msi));
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
fn answers_do_not_pile_up_for_a_driver_that_wants_no_interrupts() {
    let mut rings = reading();
    // VRING_AVAIL_F_NO_INTERRUPT
    rings
        .harness
        .memory
        .write_obj(1_u16, GuestAddress(AVAIL))
        .unwrap();
    let mut looks = Vec::new();
    for _ in 0..READS / 2 {
        rings.harness.host.lock().unwrap().finish(0);
        rings.harness.event();
        looks.push(rings.seen().len());
    }
    // There is a completion; there is none; there is still none, and it sleeps.
    assert_eq!(looks[usize::from(READS / 2) - 1], 3, "{looks:?}");
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
    // One is answered, which leaves room for one; then the next one; then nobody wants more.
    assert_eq!(waiting[..4], [left, left + 1, left + 2, left + 2], "{waiting:?}");
    assert_eq!(rings.answers().len(), 3);
    rings.harness.finish_all();
    assert_eq!(rings.answers().len(), left + 2);
}

#[test]
fn enough_answers_are_told_before_the_next_requests_are_handed_over() {
    // Of 20, three are an eighth.
    for (answers, told) in [(2, 0), (3, 1), (8, 1)] {
        let mut rings = reading();
        {
            let mut host = rings.harness.host.lock().unwrap();
            (0..answers).for_each(|_| assert!(host.finish(0)));
            host.told = Some(rings.harness.counters.clone());
        }
        for _ in 0..2 {
            rings.offer(&read()).expect("room in the ring");
        }
        rings.harness.event();
        let commits = std::mem::take(&mut rings.harness.host.lock().unwrap().commits);
        assert_eq!(commits.first(), Some(&told), "{answers} answers: {commits:?}");
        assert_eq!(rings.answers().len(), answers);
    }
}

/// Has the host do so many of the reads; gives whether each sleep after that had a limit, and of which buffer the
/// driver was to notify.
fn naps(rings: &mut Rings, finish: u16) -> Vec<(bool, u16)> {
    {
        let mut host = rings.harness.host.lock().unwrap();
        (0..finish).for_each(|_| assert!(host.finish(0)));
        host.naps = Some(Vec::new());
    }
    rings.harness.event();
    let naps = rings.harness.host.lock().unwrap().naps.take().unwrap();
    naps.into_iter()
        .map(|(limit, event)| (limit.is_some(), event))
        .collect()
}

/// Where the worker tries whether it pays that it is not notified; with the available index. All reads are under way.
fn dozing() -> (Rings, u16) {
    let mut rings = reading_with(FEATURES | 1 << VIRTIO_RING_F_EVENT_IDX);
    let mut dozes = false;
    // It tries the other way first, and again and again while this machine does nothing for milliseconds.
    for _ in 0..10_000 {
        dozes = naps(&mut rings, 3).iter().any(|(limit, _)| *limit);
        rings.harness.finish_all();
        assert_eq!(rings.answers().len(), usize::from(READS));
        offer(&mut rings, READS);
        if dozes {
            break;
        }
    }
    assert!(dozes, "it never tries");
    let index = rings.harness.memory.read_obj(GuestAddress(AVAIL + 2)).unwrap();
    (rings, index)
}

#[test]
fn with_requests_under_way_the_driver_notifies_of_fewer_for_a_while() {
    let (mut rings, index) = dozing();
    // It looks at the ring when one of those completes, or a while later; then it wants to hear of each.
    let but = |unnotified: u16| index.wrapping_add(unnotified);
    let left = READS - 3;
    assert_eq!(naps(&mut rings, 3), [(true, but(left)), (false, index)]);
    assert_eq!(naps(&mut rings, 0), [(false, index)], "nothing came of it");
    let some = naps(&mut rings, 4);
    assert_eq!(some, [(true, but(left - 4)), (false, index)], "something did");
    assert_eq!(rings.answers().len(), usize::from(READS - left) + 4);
}

#[test]
fn with_few_requests_under_way_the_driver_notifies_when_it_has_added_half_of_the_others() {
    for (finished, unnotified) in [(11, 5), (READS - 1, 9), (READS, 9)] {
        let (mut rings, index) = dozing();
        let naps = naps(&mut rings, finished);
        assert_eq!(naps[0], (true, index.wrapping_add(unnotified)), "{finished}");
        // It has added none in time: from now on it is to notify of each.
        assert_eq!(naps[1].1, index, "{finished}");
        assert_eq!(naps.len(), 2);
    }
}

#[test]
fn a_driver_that_notifies_has_not_waited() {
    let (mut rings, index) = dozing();
    assert_eq!(naps(&mut rings, READS).len(), 2);
    assert_eq!(rings.answers().len(), usize::from(READS));
    offer(&mut rings, READS);
    let index = index.wrapping_add(READS);
    assert_eq!(naps(&mut rings, 11)[0], (true, index.wrapping_add(5)));
}

#[test]
fn while_answers_wait_a_busy_driver_notifies_when_it_has_added_half() {
    let mut rings = reading_slowly(options());
    let mut seen = Vec::new();
    // This machine may do nothing for longer than answers wait.
    for _ in 0..100 {
        finish(&mut rings);
        // Told of 20, it adds one, which is answered.
        offer(&mut rings, 1);
        seen = naps(&mut rings, 1);
        let index: u16 = rings.harness.memory.read_obj(GuestAddress(AVAIL + 2)).unwrap();
        if seen.first() == Some(&(true, index.wrapping_add(9))) {
            return;
        }
        others(&mut rings);
    }
    panic!("{seen:?}");
}

#[test]
fn answers_do_not_wait_for_what_a_rate_limit_leaves_in_the_ring() {
    let limits = Limits {
        operations_per_second: 1,
        burst_operations: u64::from(READS * (ROUNDS + 1)),
        ..Limits::default()
    };
    let mut rings = reading_slowly(BlkOptions {
        limiter: Some(Limiter::new(limits)),
        ..options()
    });
    finish(&mut rings);
    // One is done, one has to wait for the limit, and one is in the ring behind it.
    offer(&mut rings, 3);
    assert_eq!(rings.harness.host.lock().unwrap().waiting.len(), 1);
    rings.seen();
    naps(&mut rings, 1);
    let looks = rings.seen().len();
    assert!(looks <= 4, "it has looked for completions {looks} times");
    assert_eq!(rings.answers().len(), 1);
}

#[test]
fn a_worker_that_let_requests_wait_has_the_driver_notify_of_each() {
    let (mut rings, index) = dozing();
    rings.offer(&read()).expect("room in the ring");
    // It comes while the worker sleeps, and nothing completes.
    let (available, late) = (GuestAddress(AVAIL + 2), index.wrapping_add(1));
    rings.harness.memory.write_obj(index, available).unwrap();
    rings.harness.host.lock().unwrap().comes_late = Some(late);
    let unnotified = index.wrapping_add(READS - 2);
    assert_eq!(naps(&mut rings, 2), [(true, unnotified), (false, late)]);
    for _ in 0..3 {
        assert_eq!(naps(&mut rings, 2), [(false, late)]);
    }
    rings.harness.finish_all();
    assert_eq!(rings.answers().len(), usize::from(READS) + 1);
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
