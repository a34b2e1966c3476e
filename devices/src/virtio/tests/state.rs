//! Saved states of a device that the transport must not take over.

use std::fs::File;

use super::puppet::until;
use crate::{
    component::Component,
    state::{Section, message, refuses},
    virtio::{
        rng::Rng,
        testing::{Area, Buffer, Driver, Rig},
    },
};

fn rng() -> Box<Rng> {
    Box::new(Rng::new(File::open("/dev/urandom").unwrap()))
}

fn transport(saved: &mut message::VirtioPci) -> &mut message::VirtioTransport {
    saved.transport.as_mut().unwrap()
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn each_field_that_no_such_device_can_have_is_refused_by_name() {
    let mut driver = Driver::new(Rig::new(rng()));
    driver.start(u64::MAX);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let good: message::VirtioPci = section.open().unwrap();
    type Change = fn(&mut message::VirtioPci);
    let changes: [(&str, Change); 36] = [
        ("pci", |saved| saved.pci = None),
        ("msix", |saved| saved.msix = None),
        ("transport", |saved| saved.transport = None),
        ("device", |saved| saved.device = None),
        ("workers", |saved| saved.workers.clear()),
        ("workers", |saved| saved.workers.push(saved.workers[0].clone())),
        ("pci.bytes", |saved| saved.pci.as_mut().unwrap().bytes[0] ^= 1),
        ("pci.bytes", |saved| saved.pci.as_mut().unwrap().bytes[6] ^= 1),
        ("pci.bytes", |saved| saved.pci.as_mut().unwrap().bytes.push(0)),
        ("msix.entries", |saved| {
            saved.msix.as_mut().unwrap().entries.clear();
        }),
        ("device_id", |saved| transport(saved).device_id = 1),
        ("status", |saved| transport(saved).status = 0x10f),
        ("status", |saved| transport(saved).status |= 0x40),
        ("status", |saved| transport(saved).status = 7),
        ("running", |saved| transport(saved).status = 0xb),
        ("workers", |saved| {
            transport(saved).running = false;
            transport(saved).queues[0].progress = None;
        }),
        ("offered", |saved| transport(saved).offered |= 1),
        ("accepted", |saved| transport(saved).accepted |= 1),
        ("accepted", |saved| transport(saved).accepted &= !(1 << 32)),
        ("accepted", |saved| transport(saved).accepted_beyond = true),
        ("queue_select", |saved| transport(saved).queue_select = 1 << 16),
        ("config_vector", |saved| transport(saved).config_vector = 1 << 16),
        ("isr", |saved| transport(saved).isr = 4),
        ("generation", |saved| transport(saved).generation = 256),
        ("config", |saved| transport(saved).config.push(0)),
        ("queues", |saved| transport(saved).queues.clear()),
        ("queues", |saved| {
            let queue = transport(saved).queues[0];
            transport(saved).queues.push(queue);
        }),
        ("queues.size", |saved| transport(saved).queues[0].size = 0),
        ("queues.size", |saved| transport(saved).queues[0].size = 48),
        ("queues.size", |saved| transport(saved).queues[0].size = 128),
        ("queues.size", |saved| transport(saved).queues[0].size = 1 << 16),
        ("queues.vector", |saved| {
            transport(saved).queues[0].vector = 1 << 16;
        }),
        ("queues.progress", |saved| {
            transport(saved).queues[0].enabled = false;
        }),
        ("queues.progress", |saved| {
            saved.workers.clear();
            transport(saved).running = false;
        }),
        ("queues.progress.next_avail", |saved| {
            let progress = transport(saved).queues[0].progress.as_mut().unwrap();
            progress.next_avail = 1 << 16;
        }),
        ("queues.progress.next_used", |saved| {
            let progress = transport(saved).queues[0].progress.as_mut().unwrap();
            progress.next_used = 1 << 16;
        }),
    ];
    refuses(&good, &changes, |saved| {
        let section = Section::new("test", saved);
        driver.rig.restored(rng(), &section).map(|_| ())
    });
    assert!(driver.rig.restored(rng(), &section).is_ok());
}

#[test]
fn an_interrupt_that_was_pending_and_the_isr_come_after_a_restore_and_not_before_the_resume() {
    let mut driver = Driver::new(Rig::new(rng()));
    driver.start(0);
    // Function mask.
    let control = (0x40..0x100)
        .step_by(4)
        .find(|at| driver.rig.read(Area::Config, *at, 1) == 0x11)
        .unwrap()
        + 2;
    driver.rig.write(Area::Config, control, 2, 0xc000);
    driver.submit(0, &[Buffer::Writable(16)]);
    // The masked interrupt does not arrive.
    until(|| driver.rings[0].has_used(&driver.rig.memory));
    driver.rig.pause();
    let count = |driver: &Driver| (0..2).map(|vector| driver.rig.msi.count(vector)).sum::<u64>();
    assert_eq!(count(&driver), 0);
    let section = driver.rig.device.save().unwrap();
    let mut saved: message::VirtioPci = section.open().unwrap();
    assert!(
        saved
            .msix
            .as_ref()
            .unwrap()
            .entries
            .iter()
            .any(|entry| entry.pending)
    );
    // As if the driver had opened it at the time of the save.
    saved.pci.as_mut().unwrap().bytes[usize::try_from(control).unwrap() + 1] = 0x80;
    transport(&mut saved).isr = 1;
    driver.rig = driver.rig.restored(rng(), &Section::new("test", &saved)).unwrap();
    assert_eq!(count(&driver), 0);
    driver.rig.device.resume().unwrap();
    assert_eq!(count(&driver), 1);
    assert_eq!(driver.rig.read(Area::Isr, 0, 1), 1);
    assert_eq!(driver.rig.read(Area::Isr, 0, 1), 0);
}

#[test]
fn a_queue_whose_progress_makes_no_sense_asks_for_a_reset_and_touches_nothing_else() {
    let mut driver = Driver::new(Rig::new(rng()));
    driver.start(0);
    driver.rig.pause();
    let section = driver.rig.device.save().unwrap();
    let mut saved: message::VirtioPci = section.open().unwrap();
    let progress = transport(&mut saved).queues[0].progress.as_mut().unwrap();
    progress.next_avail = 0x1234;
    driver.rig = driver.rig.restored(rng(), &Section::new("test", &saved)).unwrap();
    driver.rig.device.resume().unwrap();
    driver.wait_needs_reset();
    driver.rig.reset_device();
    driver.start(0);
    let (used, bytes) = driver.request(0, &[Buffer::Writable(16)]);
    assert_eq!((used.written, bytes.len()), (16, 16));
}
