//! When the driver can see answers, and how long the worker waits for more of them.

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

/// All reads are under way, and from now on it is noted what the driver sees each time that the worker looks for a
/// completion.
fn reading() -> Rings {
    let mut storage = host(1 << 20, false, 512);
    storage.depth = usize::from(READS);
    let mut rings = Rings::new(Harness::new(storage, options(), FEATURES));
    let read = Ask {
        kind: IN,
        sector: 0,
        outgoing: Vec::new(),
        incoming: 512,
        cuts: Default::default(),
        short: 0,
    };
    for _ in 0..READS {
        rings.offer(&read).expect("room in the ring");
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
    assert_eq!(rings.harness.host.lock().unwrap().seen[..shown.len()], shown);
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
        looks.push(std::mem::take(&mut rings.harness.host.lock().unwrap().seen).len());
    }
    // There is a completion; there is none; there is still none, and it sleeps.
    assert_eq!(looks[usize::from(READS / 2) - 1], 3, "{looks:?}");
}
