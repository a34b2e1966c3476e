//! Link state and announcements.

use std::sync::atomic::Ordering;

use super::*;
use crate::{component::Component, virtio::testing::Area};

const LINK_UP: u64 = 1;
const ANNOUNCE: u64 = 2;

fn status(driver: &Driver) -> u64 {
    driver.rig.read(Area::Device, 6, 2)
}

fn with_control(features: u64) -> (Peer, NetControl, Driver) {
    let (mut peer, control, driver) = controlled(features);
    peer.drain();
    (peer, control, driver)
}

#[test]
fn a_link_that_goes_down_loses_packets_and_carries_the_next_ones_when_it_is_up_again() {
    let (mut peer, control, mut driver) = with_control(ALL);
    exchange(&mut peer, &mut driver, 0);
    let generation = driver.rig.read(Area::Common, 0x15, 1);
    control.set_link(false);
    assert_eq!(status(&driver), 0);
    assert_ne!(driver.rig.read(Area::Common, 0x15, 1), generation);
    for number in 100..110 {
        driver.request(TRANSMIT, &[Buffer::Readable(packet(number, 60))]);
        peer.send(&packet(number, 60));
    }
    driver.submit(RECEIVE, &[Buffer::Writable(2000)]);
    // The driver gets no notification of lost packets.
    let deadline = std::time::Instant::now() + crate::virtio::testing::PATIENCE;
    while control.stats().receive_dropped < 10 {
        assert!(std::time::Instant::now() < deadline, "{:?}", control.stats());
        std::thread::yield_now();
    }
    control.set_link(true);
    assert_eq!(status(&driver), LINK_UP);
    peer.send(&packet(7, 60));
    assert_eq!(driver.wait_used(RECEIVE).1[12..20], 7_u64.to_le_bytes());
    exchange(&mut peer, &mut driver, 0);
    let stats = control.stats();
    assert_eq!((stats.send_dropped, stats.send_invalid), (10, 0));
    assert_eq!(
        driver.rig.device.counters().guest_faults.load(Ordering::Relaxed),
        0
    );
}

#[test]
fn an_interface_can_begin_without_a_link() {
    let options = NetOptions {
        link_up: false,
        ..NetOptions::new("eth0", MAC, 1500)
    };
    let (_peer, front) = Peer::with(1, options);
    let driver = Driver::new(Rig::new(front));
    assert_eq!(status(&driver), 0);
}

#[test]
fn a_driver_is_asked_to_announce_itself_until_it_does() {
    let (_peer, control, mut driver) = with_control(ALL);
    // An answer says that the worker runs.
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
    control.announce();
    assert_eq!(status(&driver), LINK_UP | ANNOUNCE);
    assert!(command(&mut driver, CONTROL, 3, 0, &[]));
    assert_eq!(status(&driver), LINK_UP);
    // Nobody would.
    driver.start(CTRL_VQ);
    assert!(!command(&mut driver, CONTROL, 3, 0, &[]));
    control.announce();
    assert_eq!(status(&driver), LINK_UP);
}

#[test]
fn a_driver_announces_itself_after_its_device_was_restored() {
    let (_peer, _, mut driver) = with_control(ALL);
    assert!(command(&mut driver, CONTROL, 0, 1, &[1]));
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let (peer, front) = Peer::new();
    driver.rig = driver.rig.restored(front, &section).unwrap();
    assert_eq!(status(&driver), LINK_UP);
    driver.rig.device.resume().unwrap();
    // Several times: a frame may be lost.
    for _ in 0..5 {
        let rig = &driver.rig;
        assert!(rig.msi.wait_until(|| status_of(rig) & ANNOUNCE != 0));
        assert!(command(&mut driver, CONTROL, 3, 0, &[]));
    }
    assert_eq!(status(&driver), LINK_UP);
    drop(peer);
}

#[test]
fn a_device_announces_a_driver_that_does_not_after_it_was_restored() {
    let (_peer, _, mut driver) = with_control(CTRL_VQ);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let (peer, front) = Peer::new();
    driver.rig = driver.rig.restored(front, &section).unwrap();
    driver.rig.device.resume().unwrap();
    let packet = peer.receive();
    let (header, frame) = packet.split_at(12);
    assert_eq!(header, [0; 12]);
    assert_eq!(frame.len(), 60);
    assert_eq!((&frame[..6], &frame[6..12]), (&[0xff; 6][..], &MAC[..]));
    assert_eq!(
        frame[12..22],
        [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3],
        "reverse ARP for Ethernet and IPv4"
    );
    assert_eq!((&frame[22..28], &frame[32..38]), (&MAC[..], &MAC[..]));
    assert_eq!(status(&driver), LINK_UP, "it is not asked for more");
    // A frame may be lost: the others come while the guest says nothing.
    for _ in 1..5 {
        assert!(peer.receive() == packet);
    }
}

fn status_of(rig: &Rig) -> u64 {
    rig.read(Area::Device, 6, 2)
}
