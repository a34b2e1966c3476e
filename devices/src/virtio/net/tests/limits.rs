//! Rate limits. How exact they are is tested where they are counted (`rate`); here that each direction keeps its own, that none
//! of the packets is lost, and that limits can be changed while packets wait.

use std::time::{Duration, Instant};

use super::*;
use crate::{component::Component, virtio::rate::Limits};

fn packets_per_second(rate: u64) -> Option<Arc<Limiter>> {
    Some(Limiter::new(Limits {
        operations_per_second: rate,
        burst_operations: 10,
        ..Limits::default()
    }))
}

fn limited(receive: Option<Arc<Limiter>>, transmit: Option<Arc<Limiter>>) -> (Peer, NetControl, Driver) {
    let options = NetOptions {
        receive_limit: receive,
        transmit_limit: transmit,
        ..NetOptions::new("eth0", MAC, 1500)
    };
    let (mut peer, front) = Peer::with(1, options);
    peer.drain();
    let control = front.control();
    let mut driver = Driver::new(Rig::new(front));
    driver.start(ALL);
    (peer, control, driver)
}

#[test]
fn what_the_guest_sends_is_limited_and_none_of_it_is_lost() {
    let (peer, _, mut driver) = limited(None, packets_per_second(400));
    let begin = Instant::now();
    for number in 0..100 {
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 60))]);
    }
    driver.kick(TRANSMIT);
    peer.wait_for(0, &packet(99, 60));
    // 10 packets at once and 90 packets at 400 per second, minus the limiter's debt.
    assert!(
        begin.elapsed() >= Duration::from_millis(200),
        "{:?}",
        begin.elapsed()
    );
    while driver.under_way(TRANSMIT) > 0 {
        driver.wait_used(TRANSMIT);
    }
}

#[test]
fn what_the_guest_receives_is_limited_and_none_of_it_is_lost() {
    let (peer, control, mut driver) = limited(packets_per_second(400), None);
    for _ in 0..100 {
        driver.offer(RECEIVE, &[Buffer::Writable(2000)]);
    }
    driver.kick(RECEIVE);
    let begin = Instant::now();
    for number in 0..100 {
        peer.send(&packet(number, 60));
    }
    for number in 0..100_u64 {
        assert_eq!(driver.wait_used(RECEIVE).1[12..20], number.to_le_bytes());
    }
    assert!(
        begin.elapsed() >= Duration::from_millis(200),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(
        (control.stats().received, control.stats().receive_dropped),
        (100, 0)
    );
}

#[test]
fn a_limit_is_taken_off_while_packets_wait_for_it() {
    let (peer, control, mut driver) = limited(packets_per_second(1), packets_per_second(1));
    for number in 0..50 {
        driver.offer(RECEIVE, &[Buffer::Writable(2000)]);
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 60))]);
        peer.send(&packet(number, 60));
    }
    driver.kick(RECEIVE);
    driver.kick(TRANSMIT);
    driver.wait_used(RECEIVE);
    driver.wait_used(TRANSMIT);
    assert!(peer.arrived(0) < 50 && driver.under_way(RECEIVE) > 0);
    control.set_receive_limit(None);
    control.set_transmit_limit(None);
    peer.wait_for(0, &packet(49, 60));
    while driver.under_way(RECEIVE) > 0 {
        driver.wait_used(RECEIVE);
    }
}

#[test]
fn a_pause_while_packets_wait_loses_none() {
    let (peer, _, mut driver) = limited(None, packets_per_second(200));
    for number in 0..40 {
        driver.offer(TRANSMIT, &[Buffer::Readable(packet(number, 60))]);
    }
    driver.kick(TRANSMIT);
    driver.wait_used(TRANSMIT);
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    peer.wait_for(0, &packet(39, 60));
    while driver.under_way(TRANSMIT) > 0 {
        driver.wait_used(TRANSMIT);
    }
}
