//! Media that are changed while a driver uses the drive.

use std::{
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
};

use block::Image;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    atapi::{READY, TRAY_OPEN, packet, refused},
    *,
};
use crate::{
    ahci::{MediumError, NoMedium},
    virtio::blk::harness::{Host, Mock},
};

const NO_MEDIUM: (u8, u8, u8) = (2, 0x3a, 1);
const CHANGED: (u8, u8, u8) = (6, 0x28, 0);
const BLOCK: u64 = 2048;

/// A host of a medium with this many blocks, each filled with `seed`.
fn medium(blocks: u64, seed: u8) -> Host {
    let mut host = host(blocks * BLOCK, true, 2048);
    host.eager = true;
    host.depth = 32;
    let content = vec![seed; usize::try_from(blocks * BLOCK).unwrap()];
    host.file.write_all_at(&content, 0).unwrap();
    host
}

fn image(host: Host) -> Box<dyn Image> {
    Box::new(Mock {
        host: Arc::new(Mutex::new(host)),
        event: EventFd::new(EFD_NONBLOCK).unwrap(),
    })
}

fn drive(host: Host) -> Harness {
    let mut harness = Harness::new(host, options(true, OnError::Report));
    harness.start();
    harness
}

fn change(harness: &mut Harness, image: Box<dyn Image>, force: bool) -> Result<(), MediumError> {
    let result = harness.tray.change(image, force);
    harness.settle();
    result
}

/// Event and status of GET EVENT STATUS NOTIFICATION.
fn event(harness: &mut Harness) -> (u8, u8) {
    let data = run(harness, &packet(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8], 8));
    (data[4], data[5])
}

fn blocks(harness: &mut Harness) -> u32 {
    let data = run(harness, &packet(&[0x25], 8));
    u32::from_be_bytes([data[0], data[1], data[2], data[3]]) + 1
}

fn first_byte(harness: &mut Harness) -> u8 {
    run(harness, &packet(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1], 2048))[0]
}

#[test]
fn empty_drive_takes_a_medium_and_loses_it() {
    let mut harness = Harness::of(Box::new(NoMedium), options(true, OnError::Report));
    harness.start();
    assert_eq!(refused(&mut harness, &READY, 0), NO_MEDIUM);
    assert_eq!(refused(&mut harness, &[0x25], 8), NO_MEDIUM);
    assert_eq!(
        refused(&mut harness, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1], 2048),
        NO_MEDIUM
    );
    assert_eq!(event(&mut harness), (0, 0));
    change(&mut harness, image(medium(3, 7)), false).unwrap();
    assert_eq!(refused(&mut harness, &READY, 0), CHANGED);
    run(&mut harness, &packet(&READY, 0));
    assert_eq!(event(&mut harness), (2, 2));
    assert_eq!(event(&mut harness), (0, 2), "it is reported once");
    assert_eq!((blocks(&mut harness), first_byte(&mut harness)), (3, 7));
    change(&mut harness, Box::new(NoMedium), false).unwrap();
    assert_eq!(event(&mut harness), (3, 0));
    assert_eq!(refused(&mut harness, &READY, 0), NO_MEDIUM);
}

#[test]
fn medium_is_replaced_by_another_of_another_size() {
    let mut harness = drive(medium(9, 1));
    assert_eq!((blocks(&mut harness), first_byte(&mut harness)), (9, 1));
    for (size, seed) in [(3, 2), (12, 3)] {
        change(&mut harness, image(medium(size, seed)), false).unwrap();
        assert_eq!(refused(&mut harness, &READY, 0), CHANGED);
        assert_eq!(u64::from(blocks(&mut harness)), size);
        assert_eq!(first_byte(&mut harness), seed);
    }
}

#[test]
fn prevented_removal_is_asked_for_and_can_be_forced() {
    let mut harness = drive(medium(3, 1));
    run(&mut harness, &packet(&[0x1e, 0, 0, 0, 1], 0));
    let refused_change = change(&mut harness, Box::new(NoMedium), false).unwrap_err();
    assert!(matches!(refused_change, MediumError::Prevented));
    assert_eq!(event(&mut harness), (1, 2), "an eject request");
    assert_eq!(first_byte(&mut harness), 1);
    // The driver allows the removal: the guest has unmounted the medium.
    run(&mut harness, &packet(&[0x1e], 0));
    change(&mut harness, Box::new(NoMedium), false).unwrap();
    assert_eq!(refused(&mut harness, &READY, 0), NO_MEDIUM);

    change(&mut harness, image(medium(3, 2)), false).unwrap();
    assert_eq!(refused(&mut harness, &READY, 0), CHANGED);
    run(&mut harness, &packet(&[0x1e, 0, 0, 0, 1], 0));
    change(&mut harness, Box::new(NoMedium), true).unwrap();
    assert_eq!(refused(&mut harness, &READY, 0), NO_MEDIUM);
}

#[test]
fn inserted_medium_closes_a_tray_that_the_guest_opened() {
    let mut harness = drive(medium(3, 1));
    run(&mut harness, &packet(&[0x1b, 0, 0, 0, 2], 0));
    assert_eq!(refused(&mut harness, &READY, 0), TRAY_OPEN);
    change(&mut harness, image(medium(3, 2)), false).unwrap();
    assert_eq!(refused(&mut harness, &READY, 0), CHANGED);
    assert_eq!(first_byte(&mut harness), 2);
}

#[test]
fn command_of_the_old_medium_completes_with_its_data() {
    let mut old = medium(3, 1);
    old.eager = false;
    let mut harness = drive(old);
    let read = packet(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1], 2048);
    issue(&mut harness, 0, &read);
    change(&mut harness, image(medium(3, 2)), false).unwrap();
    let again = Request {
        buffers: vec![(DATA + 4096, 2048)],
        ..read.clone()
    };
    issue(&mut harness, 1, &again);
    assert_eq!(
        harness.read(register::ISSUE),
        3,
        "the new medium waits for the old one"
    );
    harness.finish_all();
    assert_eq!(data(&harness, &read)[0], 1);
    // The first command after the change fails with a unit attention.
    assert_eq!(harness.read(register::TASK_FILE) & 1, 1);
    restart(&mut harness);
    assert_eq!(first_byte(&mut harness), 2);
}

#[test]
fn medium_is_changed_while_the_machine_is_paused() {
    let mut harness = drive(medium(3, 1));
    harness.bare.drain();
    harness.tray.change(image(medium(5, 2)), false).unwrap();
    harness.bare.start();
    harness.settle();
    assert_eq!(refused(&mut harness, &READY, 0), CHANGED);
    assert_eq!((blocks(&mut harness), first_byte(&mut harness)), (5, 2));
}
