//! Commands of a CD-ROM drive.

use std::os::unix::fs::FileExt;

use super::*;

fn drive() -> Harness {
    let harness = harness(true, true);
    let host = harness.host.lock().unwrap();
    let content: Vec<u8> = (0..CAPACITY).map(|at| (at / 2048) as u8).collect();
    host.file.write_all_at(&content, 0).unwrap();
    drop(host);
    harness
}

/// A packet whose data, of so many bytes, is transferred by DMA.
pub(super) fn packet(bytes: &[u8], length: u32) -> Request {
    Request {
        command: 0xa0,
        features: 1,
        packet: bytes.to_vec(),
        buffers: if length > 0 {
            vec![(DATA, length)]
        } else {
            Vec::new()
        },
        ..Request::default()
    }
}

/// The sense data after a failed command.
fn sense(harness: &mut Harness) -> (u8, u8, u8) {
    let data = run(harness, &packet(&[3, 0, 0, 0, 18], 18));
    (data[2], data[12], data[13])
}

pub(super) fn refused(harness: &mut Harness, bytes: &[u8], length: u32) -> (u8, u8, u8) {
    let error = fails(harness, &packet(bytes, length));
    let sense = sense(harness);
    assert_eq!(error, sense.0 << 4 | 4);
    sense
}

pub(super) const READY: [u8; 6] = [0; 6];
const EJECT: [u8; 5] = [0x1b, 0, 0, 0, 2];
const LOAD: [u8; 5] = [0x1b, 0, 0, 0, 3];
pub(super) const TRAY_OPEN: (u8, u8, u8) = (2, 0x3a, 2);

#[test]
fn drive_is_found_by_its_signature() {
    let mut harness = drive();
    assert_eq!(harness.read(register::SIGNATURE), 0xeb14_0101);
    assert_eq!(fails(&mut harness, &page(0xec)), 4);
    assert_eq!(fis::<20>(&harness, REGISTER_FIS)[5..7], [0x14, 0xeb]);
    let data = run(&mut harness, &page(0xa1));
    assert_eq!(word(&data, 0), 0x85c0);
    let inquiry = run(&mut harness, &packet(&[0x12, 0, 0, 0, 36], 36));
    assert_eq!(
        (inquiry[0], inquiry[1], &inquiry[8..22]),
        (5, 0x80, &b"vmmd    CD-ROM"[..])
    );
    assert_eq!(refused(&mut harness, &[0x12, 1, 0x80, 0, 36], 36), (5, 0x24, 0));
}

#[test]
fn blocks_are_read_by_dma_and_pio() {
    let mut harness = drive();
    let capacity = run(&mut harness, &packet(&[0x25], 8));
    assert_eq!(capacity, [0, 0, 1, 0xff, 0, 0, 8, 0]);
    let read10 = packet(&[0x28, 0, 0, 0, 0, 7, 0, 0, 2], 4096);
    let expected = [[7; 2048], [8; 2048]].concat();
    assert_eq!(run(&mut harness, &read10), expected);
    let pio = Request {
        features: 0,
        packet: vec![0xa8, 0, 0, 0, 0, 7, 0, 0, 0, 2],
        ..read10
    };
    fill(&harness, DATA, 4096, 0);
    assert_eq!(run(&mut harness, &pio), expected);
    assert_eq!(fis::<20>(&harness, PIO_SETUP_FIS)[0], 0x5f);
    // It has ended: input/output, command/data.
    let register = fis::<20>(&harness, REGISTER_FIS);
    assert_eq!((register[0], register[12]), (0x34, 3));
    assert_eq!(harness.control.stats().read.bytes, 8192);
    let beyond = [0x28, 0, 0, 0, 1, 0xff, 0, 0, 2];
    assert_eq!(refused(&mut harness, &beyond, 4096), (5, 0x21, 0));
}

#[test]
fn host_error_is_an_unreadable_medium() {
    let mut harness = drive();
    harness.host.lock().unwrap().failures = 1;
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1];
    assert_eq!(refused(&mut harness, &read, 2048), (3, 0x11, 0));
    assert_eq!(harness.bare.backend_faults, 1);
}

#[test]
fn table_of_contents_has_one_data_track() {
    let mut harness = drive();
    let toc = |flags, format, first| packet(&[0x43, flags, format, 0, 0, 0, first, 0, 20], 20);
    assert_eq!(
        run(&mut harness, &toc(0, 0, 0)),
        [
            0, 18, 1, 1, 0, 0x14, 1, 0, 0, 0, 0, 0, 0, 0x14, 0xaa, 0, 0, 0, 2, 0
        ]
    );
    assert_eq!(run(&mut harness, &toc(2, 0, 1))[8..12], [0, 0, 2, 0]);
    // 512 blocks and 2 seconds are 8 seconds and 62 frames.
    assert_eq!(run(&mut harness, &toc(2, 0, 1))[16..20], [0, 0, 8, 62]);
    let session = packet(&[0x43, 0, 1, 0, 0, 0, 0, 0, 12], 12);
    assert_eq!(run(&mut harness, &session)[..8], [0, 10, 1, 1, 0, 0x14, 1, 0]);
    assert_eq!(
        refused(&mut harness, &[0x43, 0, 2, 0, 0, 0, 0, 0, 12], 12),
        (5, 0x24, 0)
    );
}

#[test]
fn medium_is_ejected_and_loaded() {
    let mut harness = drive();
    let event = packet(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8], 8);
    assert_eq!(run(&mut harness, &event), [0, 6, 4, 0x10, 0, 2, 0, 0]);
    run(&mut harness, &packet(&EJECT, 0));
    assert_eq!(run(&mut harness, &event), [0, 6, 4, 0x10, 3, 1, 0, 0]);
    assert_eq!(refused(&mut harness, &READY, 0), TRAY_OPEN);
    assert_eq!(
        refused(&mut harness, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1], 2048),
        TRAY_OPEN
    );
    run(&mut harness, &packet(&LOAD, 0));
    assert_eq!(refused(&mut harness, &READY, 0), (6, 0x28, 0));
    run(&mut harness, &packet(&READY, 0));
    assert_eq!(run(&mut harness, &event)[4..6], [2, 2]);
}

#[test]
fn locked_tray_stays_closed() {
    let mut harness = drive();
    run(&mut harness, &packet(&[0x1e, 0, 0, 0, 1], 0));
    assert_eq!(refused(&mut harness, &EJECT, 0), (5, 0x53, 2));
    run(&mut harness, &packet(&READY, 0));
    run(&mut harness, &packet(&[0x1e], 0));
    run(&mut harness, &packet(&EJECT, 0));
    assert_eq!(refused(&mut harness, &READY, 0), TRAY_OPEN);
    // A reset leaves the tray as it is.
    harness.write(register::CONTROL, 1);
    harness.start();
    assert_eq!(refused(&mut harness, &READY, 0), TRAY_OPEN);
}

#[test]
fn configuration_and_mode_pages_describe_the_drive() {
    let mut harness = drive();
    let configuration =
        |kind, feature, length: u8| packet(&[0x46, kind, 0, feature, 0, 0, 0, 0, length], length.into());
    // The current profile is a CD-ROM's.
    let data = run(&mut harness, &configuration(2, 0, 20));
    assert_eq!(
        data,
        [0, 0, 0, 16, 0, 0, 0, 8, 0, 0, 3, 8, 0, 16, 0, 0, 0, 8, 1, 0]
    );
    let all = run(&mut harness, &configuration(0, 0, 56));
    assert_eq!(usize::from(all[3]) + 4, 56);
    let sense = packet(&[0x5a, 0, 0x2a, 0, 0, 0, 0, 0, 28], 28);
    let data = run(&mut harness, &sense);
    assert_eq!((data[1], data[8], data[9], data[14]), (26, 0x2a, 18, 0x29));
    assert_eq!(
        refused(&mut harness, &[0x5a, 0, 0x1b, 0, 0, 0, 0, 0, 28], 28),
        (5, 0x24, 0)
    );
    assert_eq!(
        refused(&mut harness, &[0x5a, 0, 0xea, 0, 0, 0, 0, 0, 28], 28),
        (5, 0x39, 0)
    );
    let disc = run(&mut harness, &packet(&[0x51, 0, 0, 0, 0, 0, 0, 0, 34], 34));
    assert_eq!(disc[..5], [0, 32, 0x0e, 1, 1]);
    run(&mut harness, &packet(&[0x35], 0));
}

#[test]
fn drive_takes_no_writes() {
    let mut harness = drive();
    for command in [0x2a, 0xaa, 0x04, 0xff] {
        assert_eq!(
            refused(&mut harness, &[command, 0, 0, 0, 0, 0, 0, 0, 1], 0),
            (5, 0x20, 0)
        );
    }
    for command in [0x35, 0x61, 0x06] {
        assert_eq!(fails(&mut harness, &transfer(command, 0, 1)), 4);
    }
    assert_eq!(harness.control.stats().write.requests, 0);
}
