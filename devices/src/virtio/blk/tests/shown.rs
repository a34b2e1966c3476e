//! When the driver can see answers, how long the worker waits for more of them, and what it does first.

use vm_memory::{Bytes, GuestAddress};

use super::{
    IN, options,
    rings::{Ask, Rings},
};
use crate::virtio::blk::harness::{AVAIL, Harness, host};

/// Reads under way at once.
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

/// All reads are under way, and from now on it is noted what the driver sees each time that the worker looks for a
/// completion.
fn reading() -> Rings {
    let mut storage = host(1 << 20, false, 512);
    storage.depth = usize::from(READS);
    let mut rings = Rings::new(Harness::new(storage, options(), FEATURES));
    for _ in 0..READS {
        rings.offer(&read()).expect("room in the ring");
    }
    rings.harness.kick();
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
