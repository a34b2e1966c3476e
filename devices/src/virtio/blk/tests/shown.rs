//! When the driver can see answers.

use super::{
    IN, options,
    rings::{Ask, Rings},
};
use crate::virtio::blk::harness::{Harness, host};

/// Reads under way at once.
const READS: u16 = 20;
/// VERSION_1.
const FEATURES: u64 = 1 << 32;

#[test]
fn a_driver_that_looks_sees_the_first_of_many_answers_before_the_last() {
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
        while host.finish(0) {}
        host.watched = Some(rings.harness.memory.clone());
    }
    rings.harness.event();
    // Eight at a time: a driver that refills the ring meanwhile need not wait for the rest.
    let shown: Vec<u16> = (0..=READS).map(|answered| answered / 8 * 8).collect();
    assert_eq!(rings.harness.host.lock().unwrap().seen[..shown.len()], shown);
    assert_eq!(rings.answers().len(), usize::from(READS));
}
