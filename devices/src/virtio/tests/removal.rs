//! A device that is taken out of a running machine.

use std::{
    sync::{Arc, atomic::Ordering, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use super::puppet::{ask, puppet, puppet_at_work};
use crate::{
    component::{Component, ComponentError},
    pci::SharedFunction,
    virtio::{
        fault::DeviceEvent,
        testing::{Area, Driver, PATIENCE, Rig},
        tests::puppet::until,
    },
};

/// Where the rig has its device.
const SLOT: u8 = 3;

#[test]
fn a_running_device_answers_what_it_took_then_ends_its_threads_and_frees_what_it_held() {
    let (mut driver, strings, config) = puppet();
    driver.start(0);
    driver.request(1, &ask());
    let taken = strings[1].taken.load(Ordering::SeqCst);
    strings[1].hold.store(true, Ordering::SeqCst);
    driver.submit(1, &ask());
    strings[1].wait_for_taken(taken + 1);
    assert!(!driver.rig.notify.addresses().is_empty());

    // Off the bus: nothing reaches it, and nothing is listened for.
    assert!(driver.rig.root.remove(SLOT, &driver.rig.mmio));
    assert_eq!(driver.rig.notify.addresses(), []);
    assert_eq!(driver.rig.read(Area::Common, 0x14, 1), 0xff);
    assert_eq!(driver.rig.read(Area::Config, 0, 2), 0xffff);
    driver.rig.ioeventfd = false;
    driver.rig.write(Area::Common, 0x14, 1, 0);
    driver.rig.write(Area::Notify, 0, 2, 0);

    let msi = driver.rig.msi.clone();
    let before = msi.count(2);
    let Driver { rig, .. } = driver;
    let Rig { device, .. } = rig;
    let late: SharedFunction = device.function();
    let (done, ended) = channel();
    let ending = thread::spawn(move || {
        device.end().unwrap();
        done.send(()).unwrap();
    });
    assert!(
        ended.recv_timeout(Duration::from_millis(50)).is_err(),
        "it waits for the request under way"
    );
    strings[1].let_go();
    ending.join().unwrap();
    // Even while a vCPU that came before still holds on to the function.
    assert!(strings.iter().all(|strings| Arc::strong_count(strings) == 1));
    assert_eq!(Arc::strong_count(&config), 1, "the front is gone");
    assert_eq!(
        msi.count(2),
        before,
        "a guest without the device is not interrupted"
    );
    drop(late);
    assert_eq!(msi.allocated(), 0);
}

#[test]
fn an_idle_and_a_paused_device_end_at_once() {
    for paused in [false, true] {
        let (mut driver, strings, _) = puppet();
        if paused {
            driver.start(0);
            driver.rig.pause();
        }
        assert!(driver.rig.root.remove(SLOT, &driver.rig.mmio));
        let Driver { rig, .. } = driver;
        rig.device.end().unwrap();
        assert!(strings.iter().all(|strings| Arc::strong_count(strings) == 1));
    }
}

/// Removes the device while its driver's reset is in progress.
fn end_in_the_middle_of_a_reset(before_end: impl FnOnce(&mut Rig)) {
    let (mut driver, strings, _) = puppet_at_work();
    let [first, _] = &strings;
    driver.rig.write(Area::Common, 0x14, 1, 0);
    first.wait_for_drains(1);

    before_end(&mut driver.rig);
    driver.rig.root.remove_by_force(SLOT, &driver.rig.mmio);
    let Driver { rig, .. } = driver;
    let Rig { device, .. } = rig;
    let (done, ended) = channel();
    let ending = thread::spawn(move || {
        let result = device.end();
        done.send(()).unwrap();
        result
    });
    // The second stop joins the first: the handler is drained on and on.
    for _ in 0..20 {
        first.wait_for_drains(1);
        assert!(
            ended.try_recv().is_err(),
            "told as ended with a request under way"
        );
    }
    assert!(!first.abandoned.load(Ordering::SeqCst));
    first.let_go();
    ending.join().unwrap().unwrap();
    assert!(!first.abandoned.load(Ordering::SeqCst));
    assert!(strings.iter().all(|strings| Arc::strong_count(strings) == 1));
}

#[test]
fn a_device_that_is_removed_in_the_middle_of_a_reset_ends_only_when_its_requests_have() {
    end_in_the_middle_of_a_reset(|_| {});
}

#[test]
fn a_device_whose_pause_was_late_in_the_middle_of_a_reset_ends_only_when_its_requests_have() {
    end_in_the_middle_of_a_reset(|rig| {
        let result = rig.device.pause(Instant::now() + Duration::from_millis(20));
        assert!(matches!(result, Err(ComponentError::DrainTimeout)), "{result:?}");
    });
}

#[test]
fn a_machine_reset_is_late_until_the_requests_have_ended() {
    let (mut driver, [first, _], _) = puppet_at_work();
    // It joins the driver's own.
    driver.rig.write(Area::Common, 0x14, 1, 0);
    for _ in 0..2 {
        let result = driver.rig.device.reset();
        assert!(matches!(result, Err(ComponentError::DrainTimeout)), "{result:?}");
    }
    assert_eq!(first.resets.load(Ordering::SeqCst), 0);
    first.let_go();
    let start = Instant::now();
    while let Err(error) = driver.rig.device.reset() {
        assert!(matches!(error, ComponentError::DrainTimeout), "{error}");
        assert!(start.elapsed() < PATIENCE);
    }
    assert_eq!(first.resets.load(Ordering::SeqCst), 1);
    assert_eq!(driver.rig.status(), 0);
}

#[test]
fn a_device_that_is_dropped_while_the_hosts_storage_hangs_keeps_what_its_requests_need() {
    // In the middle of a reset, while it serves, and after a fault of its ring.
    for how in ["resetting", "serving", "broken"] {
        let (mut driver, strings, _) = puppet_at_work();
        let [first, _] = &strings;
        match how {
            "resetting" => {
                driver.rig.write(Area::Common, 0x14, 1, 0);
                first.wait_for_drains(1);
            }
            "broken" => {
                driver.rings[0].set_avail_index(&driver.rig.memory, 1000);
                driver.kick(0);
                driver.wait_needs_reset();
            }
            _ => {}
        }
        drop(driver);
        assert_eq!(Arc::strong_count(first), 2, "{how}: the handler was let go");
        first.wait_for_drains(2);
        first.let_go();
        until(|| Arc::strong_count(first) == 1);
        assert!(!first.abandoned.load(Ordering::SeqCst), "{how}");
    }
}

#[test]
fn a_device_with_a_dead_worker_is_never_told_as_ended() {
    let (mut driver, [first, second], _) = puppet();
    driver.start(0);
    first.panic.store(true, Ordering::SeqCst);
    driver.submit(0, &ask());
    assert!(matches!(driver.rig.sink.wait(), DeviceEvent::Failed(_)));
    let Driver { rig, .. } = driver;
    let result = rig.device.end();
    assert!(matches!(result, Err(ComponentError::WorkerGone)), "{result:?}");
    assert_eq!(Arc::strong_count(&first), 2, "what it holds is kept");
    assert_eq!(Arc::strong_count(&second), 1, "the others have ended");
}
