use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use super::puppet::{ask, puppet, puppet_at_work};
use crate::{
    component::{Component, ComponentError},
    virtio::{
        fault::DeviceEvent,
        testing::{Area, PATIENCE},
    },
};

const EVENT_IDX: u64 = 1 << 29;

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

#[test]
fn a_pause_that_can_not_drain_fails_and_all_workers_go_on() {
    let (mut driver, [first, second], _) = puppet();
    driver.start(EVENT_IDX);
    second.hold.store(true, Ordering::SeqCst);
    driver.request(0, &ask());
    driver.submit(1, &ask());
    second.wait_for_taken(1);
    for _ in 0..3 {
        let result = driver.rig.device.pause(soon());
        assert!(matches!(result, Err(ComponentError::DrainTimeout)), "{result:?}");
        driver.request(0, &ask());
    }
    assert!(
        first.starts.load(Ordering::SeqCst) > 1,
        "the worker that could stop was started again"
    );
    second.let_go();
    driver.wait_used(1);
    driver.request(1, &ask());
    driver.rig.pause();
    driver.rig.device.resume().unwrap();
    driver.request(0, &ask());
    driver.request(1, &ask());
    assert_eq!(second.resets.load(Ordering::SeqCst), 0, "a pause is no reset");
}

#[test]
fn a_reset_is_not_acknowledged_before_requests_under_way_have_ended() {
    let (mut driver, [first, second], _) = puppet_at_work();
    let start = Instant::now();
    driver.rig.write(Area::Common, 0x14, 1, 0);
    assert!(start.elapsed() < Duration::from_secs(2), "the vCPU was held");
    for _ in 0..3 {
        assert_eq!(driver.rig.status(), 0xf);
        // Writes have no effect meanwhile.
        driver.rig.write(Area::Common, 0x14, 1, 1);
        driver.rig.write(Area::Common, 0x16, 2, 1);
    }
    first.let_go();
    driver.rig.reset_device();
    assert_eq!(driver.rig.read(Area::Common, 0x16, 2), 0);
    assert_eq!(
        (
            first.resets.load(Ordering::SeqCst),
            second.resets.load(Ordering::SeqCst)
        ),
        (1, 1)
    );
    driver.start(0);
    driver.request(0, &ask());
}

#[test]
fn a_panic_fails_the_vm_and_leaves_a_device_that_is_safe_to_touch() {
    let (mut driver, [first, _], _) = puppet();
    driver.start(0);
    first.panic.store(true, Ordering::SeqCst);
    driver.submit(0, &ask());
    let DeviceEvent::Failed(why) = driver.rig.sink.wait() else {
        panic!("{:?}", driver.rig.sink.events())
    };
    assert!(why.contains("the string was pulled"), "{why}");
    driver.wait_needs_reset();
    let result = driver.rig.device.pause(Instant::now() + PATIENCE);
    assert!(matches!(result, Err(ComponentError::WorkerGone)), "{result:?}");
    // The other queue's worker continues.
    driver.request(1, &ask());
    driver.rig.write(Area::Common, 0x14, 1, 0);
    assert!(matches!(
        driver.rig.device.reset(),
        Err(ComponentError::WorkerGone)
    ));
    assert_ne!(driver.rig.status(), 0, "a dead device is never reset");
}

#[test]
fn a_flood_of_work_does_not_keep_a_worker_from_its_commands() {
    let (mut driver, [first, _], _) = puppet();
    driver.start(0);
    first.endless.store(true, Ordering::SeqCst);
    driver.kick(0);
    for _ in 0..10 {
        driver.rig.pause();
        driver.rig.device.resume().unwrap();
    }
    driver.rig.reset_device();
    first.endless.store(false, Ordering::SeqCst);
    driver.start(0);
    driver.request(0, &ask());
}

#[test]
fn a_backend_that_can_not_start_makes_the_device_ask_for_a_reset() {
    let (mut driver, [first, _], _) = puppet();
    first.refuse_start.store(true, Ordering::SeqCst);
    driver.negotiate(0);
    driver.set_up_queues();
    driver.driver_ok();
    driver.wait_needs_reset();
    assert!(matches!(driver.rig.sink.wait(), DeviceEvent::NeedsReset(_)));
    first.refuse_start.store(false, Ordering::SeqCst);
    driver.start(0);
    driver.request(0, &ask());
}

#[test]
fn requests_that_come_while_the_machine_is_paused_are_answered_after_it() {
    let (mut driver, _, _) = puppet();
    driver.start(EVENT_IDX);
    driver.request(1, &ask());
    driver.rig.pause();
    for _ in 0..8 {
        driver.offer(1, &ask());
    }
    driver.rig.device.resume().unwrap();
    for _ in 0..8 {
        driver.wait_used(1);
    }
}

#[test]
fn a_machine_that_is_reset_while_paused_forgets_its_requests() {
    let (mut driver, [first, _], _) = puppet();
    driver.start(0);
    driver.request(0, &ask());
    driver.rig.pause();
    driver.offer(0, &ask());
    driver.rig.reset_machine();
    assert_eq!(first.resets.load(Ordering::SeqCst), 1);
    driver.rig.device.resume().unwrap();
    assert_eq!(driver.rig.status(), 0);
    driver.start(0);
    driver.request(0, &ask());
    assert_eq!(first.taken.load(Ordering::SeqCst), 2);
}

#[test]
fn a_batch_of_answers_gives_one_interrupt() {
    let (mut driver, [_, second], _) = puppet();
    driver.start(EVENT_IDX);
    driver.request(1, &ask());
    // An answer is in the ring before its interrupt comes.
    driver.rig.msi.wait_for(2, 1);
    let before = driver.rig.msi.count(2);
    second.hold.store(true, Ordering::SeqCst);
    let taken = second.taken.load(Ordering::SeqCst);
    for _ in 0..100 {
        driver.offer(1, &ask());
    }
    driver.kick(1);
    second.wait_for_taken(taken + 100);
    driver.rig.pause_is_late();
    second.let_go();
    for _ in 0..100 {
        driver.wait_used(1);
    }
    driver.rig.msi.wait_for(2, before + 1);
    let interrupts = driver.rig.msi.count(2) - before;
    assert!(
        (1..=3).contains(&interrupts),
        "{interrupts} interrupts for 100 answers at once"
    );
}

#[test]
fn interrupts_that_the_driver_does_not_want_are_not_sent() {
    let (mut driver, [_, second], _) = puppet();
    driver.start(0);
    driver.request(1, &ask());
    // An answer is in the ring before its interrupt comes.
    driver.rig.msi.wait_for(2, 1);
    let before = driver.rig.msi.count(2);
    driver.suppress_interrupts(1, true);
    second.hold.store(true, Ordering::SeqCst);
    let taken = second.taken.load(Ordering::SeqCst);
    driver.submit(1, &ask());
    second.wait_for_taken(taken + 1);
    driver.rig.pause_is_late();
    second.let_go();
    driver.rig.pause();
    assert!(driver.try_used(1).is_some(), "answered");
    assert_eq!(driver.rig.msi.count(2), before);
    driver.rig.device.resume().unwrap();
    driver.suppress_interrupts(1, false);
    driver.request(1, &ask());
    driver.rig.msi.wait_for(2, before + 1);
    assert_eq!(driver.rig.msi.count(2), before + 1);
}

#[test]
fn a_change_of_the_configuration_raises_its_generation_and_its_interrupt() {
    let (mut driver, _, config) = puppet();
    driver.start(0);
    let generation = driver.rig.read(Area::Common, 0x15, 1);
    *config.lock().unwrap() = [9; 6];
    driver.rig.device.signals().config_changed();
    driver.rig.msi.wait_for(0, 1);
    assert_ne!(driver.rig.read(Area::Common, 0x15, 1), generation);
    assert_eq!(driver.rig.read(Area::Device, 0, 4), 0x0909_0909);
    driver.rig.reset_device();
    driver.rig.device.signals().config_changed();
    assert_eq!(driver.rig.msi.count(0), 1, "there is no driver to be told");
}

#[test]
fn dropping_the_machine_ends_all_threads_and_frees_all_vectors() {
    for running in [false, true] {
        let (mut driver, strings, _) = puppet();
        if running {
            driver.start(0);
            driver.request(0, &ask());
        }
        let msi = driver.rig.msi.clone();
        assert_eq!(msi.allocated(), 3);
        drop(driver);
        assert_eq!(msi.allocated(), 0);
        // The handlers, which the threads own, are gone.
        assert!(
            strings
                .iter()
                .all(|strings| std::sync::Arc::strong_count(strings) == 1)
        );
    }
}
