//! Several pairs of queues.

use super::*;
use crate::{component::Component, virtio::testing::Area};

fn four() -> (Peer, Driver) {
    let (mut peer, front) = Peer::with(4, NetOptions::new("eth0", MAC, 1500));
    peer.drain();
    (peer, Driver::new(Rig::new(front)))
}

#[test]
fn the_driver_is_told_of_the_pairs_and_of_the_queues() {
    let (_peer, driver) = four();
    assert_eq!(driver.rig.read(Area::Device, 8, 2), 4);
    assert_eq!(driver.rig.read(Area::Common, 0x12, 2), 9);
    assert_ne!(driver.offered() & MQ, 0);
    let (_peer, single) = running(ALL);
    assert_eq!(single.offered() & MQ, 0);
}

#[test]
fn the_host_hands_packets_to_the_pairs_in_use_only() {
    let (mut peer, mut driver) = four();
    assert_eq!(peer.told.attached(), [true, false, false, false]);
    driver.start(ALL);
    assert!(command(&mut driver, 8, 4, 0, &[3, 0]));
    peer.told.wait_attached(&[true, true, true, false]);
    for pair in 0..3 {
        exchange(&mut peer, &mut driver, pair);
    }
    assert!(command(&mut driver, 8, 4, 0, &[2, 0]));
    peer.told.wait_attached(&[true, true, false, false]);
    assert!(!command(&mut driver, 8, 4, 0, &[5, 0]) && !command(&mut driver, 8, 4, 0, &[0, 0]));
    exchange(&mut peer, &mut driver, 1);
    // A pause keeps them, a reset does not.
    driver.rig.pause();
    assert_eq!(peer.told.attached(), [true, true, false, false]);
    driver.rig.device.resume().unwrap();
    exchange(&mut peer, &mut driver, 1);
    driver.rig.reset_device();
    assert_eq!(peer.told.attached(), [true, false, false, false]);
    driver.start(ALL);
    exchange(&mut peer, &mut driver, 0);
}

#[test]
fn a_driver_that_knows_no_pairs_has_its_control_queue_behind_the_first_one() {
    let (mut peer, mut driver) = four();
    driver.start(ALL & !MQ);
    assert!(command(&mut driver, 2, 0, 1, &[1]));
    assert!(!command(&mut driver, 2, 4, 0, &[2, 0]), "there are no pairs");
    exchange(&mut peer, &mut driver, 0);
    assert_eq!(peer.told.attached(), [true, false, false, false]);
    driver.start(ALL);
    assert!(command(&mut driver, 8, 4, 0, &[4, 0]));
    exchange(&mut peer, &mut driver, 3);
}

#[test]
fn all_pairs_carry_packets_at_once_and_are_counted_together() {
    const PACKETS: u64 = 400;
    let (mut peer, front) = Peer::with(4, NetOptions::new("eth0", MAC, 1500));
    let control = front.control();
    let mut driver = Driver::new(Rig::new(front));
    peer.drain();
    driver.start(ALL);
    assert!(command(&mut driver, 8, 4, 0, &[4, 0]));
    for number in 0..PACKETS {
        for pair in 0..4 {
            let transmit = pair * 2 + 1;
            if driver.under_way(transmit) > 100 {
                driver.wait_used(transmit);
            }
            driver.submit(transmit, &[Buffer::Readable(packet(number, 300))]);
        }
    }
    for pair in 0..4 {
        peer.wait_for(pair, &packet(PACKETS - 1, 300));
        while driver.under_way(pair * 2 + 1) > 0 {
            driver.wait_used(pair * 2 + 1);
        }
    }
    let stats = control.stats();
    assert_eq!((stats.sent, stats.sent_bytes), (4 * PACKETS, 4 * PACKETS * 300));
}

#[test]
fn an_interface_without_a_queue_of_the_host_can_not_be_built() {
    let mut front = Net::new(Vec::new(), NetOptions::new("eth0", MAC, 1500));
    let msix = crate::pci::msix::Msix::new(&crate::virtio::testing::MockMsi::default(), 1).unwrap();
    let signals = Arc::new(Signals::new(Arc::clone(msix.vectors()), 1));
    assert!(front.workers(&signals).is_err());
}
