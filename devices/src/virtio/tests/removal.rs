//! A device that is taken out of a running machine.

use std::{
    sync::{Arc, atomic::Ordering, mpsc::channel},
    thread,
    time::Duration,
};

use super::puppet::puppet;
use crate::{
    pci::SharedFunction,
    virtio::testing::{Area, Buffer, Driver, Rig},
};

/// Where the rig has its device.
const SLOT: u8 = 3;

fn ask() -> [Buffer; 2] {
    [Buffer::Readable(vec![1]), Buffer::Writable(8)]
}

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
        device.end();
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
        rig.device.end();
        assert!(strings.iter().all(|strings| Arc::strong_count(strings) == 1));
    }
}
