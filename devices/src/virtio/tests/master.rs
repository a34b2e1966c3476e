//! Bus-master enable (PCI 3.0, 6.2.2): without it a device touches no guest memory and sends no interrupt.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use super::puppet::{ask, puppet, puppet_at_work, until};
use crate::{
    component::{Component, ComponentError},
    virtio::testing::{Area, PATIENCE, Rig},
};

const COMMAND: u64 = 4;
const MEMORY: u64 = 1 << 1;
const MASTER: u64 = 1 << 2;
const EVENT_IDX: u64 = 1 << 29;

fn set_master(rig: &Rig, on: bool) {
    rig.write(
        Area::Config,
        COMMAND,
        2,
        if on { MEMORY | MASTER } else { MEMORY },
    );
}

/// Waits long enough to detect a device that ignores bus-master enable.
fn wait_in_vain() {
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn a_device_that_is_no_bus_master_takes_no_requests_and_looks_at_its_queues_when_it_is_one() {
    for features in [0, EVENT_IDX] {
        let (mut driver, [first, second], _) = puppet();
        driver.start(features);
        driver.request(0, &ask());
        set_master(&driver.rig, false);
        for queue in 0..2 {
            driver.offer(queue, &ask());
            driver.kick(queue);
        }
        wait_in_vain();
        assert_eq!(first.taken.load(Ordering::SeqCst), 1);
        assert_eq!(second.taken.load(Ordering::SeqCst), 0);
        assert!(driver.try_used(0).is_none());
        set_master(&driver.rig, true);
        driver.wait_used(0);
        driver.wait_used(1);
        driver.request(0, &ask());
    }
}

#[test]
fn a_device_that_was_never_a_bus_master_does_not_start() {
    let (mut driver, [first, _], _) = puppet();
    set_master(&driver.rig, false);
    driver.start(0);
    driver.offer(0, &ask());
    driver.kick(0);
    wait_in_vain();
    assert_eq!(first.starts.load(Ordering::SeqCst), 0);
    // Pause, reset and start work as usual.
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    driver.start(0);
    driver.offer(0, &ask());
    wait_in_vain();
    assert_eq!(first.starts.load(Ordering::SeqCst), 0);
    set_master(&driver.rig, true);
    driver.wait_used(0);
    assert_eq!(first.starts.load(Ordering::SeqCst), 1);
}

#[test]
fn requests_under_way_when_bus_mastering_ends_are_answered_and_none_are_taken_after() {
    let (mut driver, [first, _], _) = puppet_at_work();
    // The wait of this write is bounded: the vCPU continues while the request is in progress.
    set_master(&driver.rig, false);
    assert!(driver.try_used(0).is_none());
    driver.offer(0, &ask());
    driver.kick(0);
    first.let_go();
    until(|| driver.rings[0].has_used(&driver.rig.memory));
    assert!(driver.try_used(0).is_some());
    wait_in_vain();
    assert_eq!(first.taken.load(Ordering::SeqCst), 1, "one more was taken");
    assert_eq!(driver.rig.msi.count(1), 0, "an interrupt is a write to memory");
    set_master(&driver.rig, true);
    driver.rig.msi.wait_for(1, 1);
    driver.wait_used(0);
}

#[test]
fn bus_mastering_that_comes_back_before_the_requests_have_ended_goes_on_with_them() {
    let (mut driver, [first, _], _) = puppet_at_work();
    for _ in 0..3 {
        set_master(&driver.rig, false);
        first.wait_for_drains(1);
        set_master(&driver.rig, true);
    }
    driver.submit(0, &ask());
    first.wait_for_taken(2);
    assert_eq!(first.starts.load(Ordering::SeqCst), 1, "the session went on");
    first.let_go();
    driver.wait_used(0);
    driver.wait_used(0);
}

#[test]
fn a_pause_a_reset_and_a_late_pause_hold_while_bus_mastering_ends() {
    let (mut driver, [first, _], _) = puppet_at_work();
    set_master(&driver.rig, false);
    let result = driver
        .rig
        .device
        .pause(Instant::now() + Duration::from_millis(20));
    assert!(matches!(result, Err(ComponentError::DrainTimeout)), "{result:?}");
    first.let_go();
    driver.rig.device.pause(Instant::now() + PATIENCE).unwrap();
    assert!(driver.try_used(0).is_some());
    driver.offer(0, &ask());
    driver.rig.device.resume().unwrap();
    wait_in_vain();
    assert_eq!(
        first.taken.load(Ordering::SeqCst),
        1,
        "a pause does not make it a bus master"
    );
    driver.rig.reset_device();
    assert_eq!(first.resets.load(Ordering::SeqCst), 1);
    set_master(&driver.rig, true);
    driver.start(0);
    driver.request(0, &ask());
}

#[test]
fn a_change_of_the_configuration_is_told_when_the_device_is_a_bus_master_again() {
    let (mut driver, _, _) = puppet();
    driver.start(0);
    set_master(&driver.rig, false);
    driver.rig.device.signals().config_changed();
    assert_eq!(driver.rig.msi.count(0), 0);
    set_master(&driver.rig, true);
    driver.rig.msi.wait_for(0, 1);
}

#[test]
fn a_machine_reset_ends_bus_mastering() {
    let (mut driver, [first, _], _) = puppet();
    driver.start(0);
    driver.request(0, &ask());
    driver.rig.device.reset().unwrap();
    driver.rig.root.reset(&driver.rig.mmio);
    assert_eq!(driver.rig.read(Area::Config, COMMAND, 2) & MASTER, 0);
    set_master(&driver.rig, false);
    // Decoding is on again, mastering is not.
    driver.start(0);
    driver.offer(0, &ask());
    driver.kick(0);
    wait_in_vain();
    assert_eq!(first.starts.load(Ordering::SeqCst), 1);
}
