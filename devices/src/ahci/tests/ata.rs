//! Commands of a disk.

use std::os::unix::fs::FileExt;

use block::Operation;

use super::*;

fn content(harness: &Harness, offset: u64, length: usize) -> Vec<u8> {
    let mut content = vec![0; length];
    let host = harness.host.lock().unwrap();
    host.file.read_exact_at(&mut content, offset).unwrap();
    content
}

fn text(data: &[u8], word: usize, length: usize) -> String {
    let pairs = data[word * 2..][..length].chunks_exact(2);
    let bytes: Vec<u8> = pairs.flat_map(|pair| [pair[1], pair[0]]).collect();
    String::from_utf8(bytes).unwrap().trim_end().to_owned()
}

#[test]
fn identify_device_describes_the_disk() {
    let mut harness = disk();
    let data = run(&mut harness, &page(0xec));
    assert_eq!(text(&data, 10, 20), "serial-0123456789-to");
    assert_eq!(text(&data, 27, 40), "vmmd disk");
    let sectors = CAPACITY / 512;
    assert_eq!(
        u64::from(word(&data, 60)) | u64::from(word(&data, 61)) << 16,
        sectors
    );
    assert_eq!(u64::from(word(&data, 100)), sectors);
    // Queue depth 32, NCQ, TRIM, 8 sectors per physical block.
    assert_eq!((word(&data, 75), word(&data, 76) & 1 << 8), (31, 1 << 8));
    assert_eq!((word(&data, 169), word(&data, 106)), (1, 0x6003));
    assert_eq!(data.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    let setup = fis::<20>(&harness, PIO_SETUP_FIS);
    assert_eq!((setup[0], setup[1], setup[15], setup[17]), (0x5f, 0x60, 0x50, 2));
}

#[test]
fn each_kind_of_transfer_reaches_the_image() {
    let kinds = [
        (0x30, 0x20),
        (0x34, 0x24),
        (0xc5, 0xc4),
        (0x39, 0x29),
        (0xca, 0xc8),
        (0x35, 0x25),
        (0x3d, 0x25),
        (0x61, 0x60),
    ];
    for (write, read) in kinds {
        let mut harness = disk();
        let request = transfer(write, 5, 3);
        let written = fill(&harness, DATA, 3 * SECTOR, write);
        run(&mut harness, &request);
        assert_eq!(content(&harness, 5 * 512, 3 * SECTOR), written, "{write:#x}");
        fill(&harness, DATA, 3 * SECTOR, 0);
        assert_eq!(run(&mut harness, &transfer(read, 5, 3)), written, "{read:#x}");
        let stats = harness.control.stats();
        assert_eq!((stats.read.bytes, stats.write.bytes), (1536, 1536));
    }
}

#[test]
fn data_is_scattered_over_buffers_of_any_length() {
    let mut harness = disk();
    let buffers = vec![
        (DATA + 1024, 2),
        (REGION - 6, 6),
        (HOLE_END, 1000),
        (DATA, 16),
        (DATA + 0x1000, 2 << 10),
    ];
    let lengths: u32 = buffers.iter().map(|(_, length)| length).sum();
    let request = Request {
        buffers,
        ..transfer(0x25, 0, 6)
    };
    assert_eq!(lengths, 3072);
    let expected: Vec<u8> = (0..3072_u32).map(|at| (at * 13 / 5) as u8).collect();
    let host = harness.host.lock().unwrap();
    host.file.write_all_at(&expected, 0).unwrap();
    drop(host);
    assert_eq!(run(&mut harness, &request), expected);
    let mut count = [0; 4];
    harness
        .memory()
        .read_slice(&mut count, GuestAddress(LIST + 4))
        .unwrap();
    assert_eq!(u32::from_le_bytes(count), 3072);
}

#[test]
fn writes_are_stable_with_fua_or_without_the_cache() {
    let stable = |harness: &Harness| match harness.host.lock().unwrap().waiting[0].operation {
        Operation::Write { stable, .. } => stable,
        other => panic!("{other:?}"),
    };
    let mut harness = harness(false, false);
    let fua = Request {
        device: 0xc0,
        ..transfer(0x61, 0, 1)
    };
    for (request, expected) in [
        (transfer(0x35, 0, 1), false),
        (transfer(0x61, 0, 1), false),
        (transfer(0x3d, 0, 1), true),
        (fua, true),
    ] {
        issue(&mut harness, 0, &request);
        assert_eq!(stable(&harness), expected, "{request:x?}");
        harness.finish_all();
    }
    let feature = |features| Request {
        command: 0xef,
        features,
        ..Request::default()
    };
    issue(&mut harness, 0, &feature(0x82));
    assert_eq!(
        harness.host.lock().unwrap().waiting[0].operation,
        Operation::Flush
    );
    harness.finish_all();
    issue(&mut harness, 0, &transfer(0x35, 0, 1));
    assert!(stable(&harness));
    harness.finish_all();
    assert_eq!(word(&run(&mut harness, &page(0xec)), 85) & 1 << 5, 0);
    run(&mut harness, &feature(0x02));
    assert_ne!(word(&run(&mut harness, &page(0xec)), 85) & 1 << 5, 0);
    assert_eq!(fails(&mut harness, &feature(0x77)), 4);
}

#[test]
fn commands_that_empty_the_cache_flush_the_image() {
    let mut harness = disk();
    let commands = [0xe7, 0xea, 0xe0, 0xe2, 0xe6];
    for command in commands {
        run(
            &mut harness,
            &Request {
                command,
                ..Request::default()
            },
        );
    }
    assert_eq!(harness.control.stats().flush.requests, commands.len() as u64);
}

#[test]
fn trim_discards_its_ranges() {
    let mut harness = disk();
    let host = harness.host.lock().unwrap();
    host.file.write_all_at(&[7; 64 << 10], 0).unwrap();
    drop(host);
    let trim = |ranges: &[(u64, u64)], harness: &Harness| {
        let mut entries = [0; SECTOR];
        for (entry, (lba, count)) in entries.chunks_exact_mut(8).zip(ranges) {
            entry.copy_from_slice(&(lba | count << 48).to_le_bytes());
        }
        harness
            .memory()
            .write_slice(&entries, GuestAddress(DATA))
            .unwrap();
        Request {
            features: 1,
            count: 1,
            ..page(0x06)
        }
    };
    let request = trim(&[(8, 8), (32, 16)], &harness);
    run(&mut harness, &request);
    assert_eq!(content(&harness, 0, 4096), [7; 4096]);
    assert_eq!(content(&harness, 4096, 4096), [0; 4096]);
    assert_eq!(content(&harness, 16 << 10, 8192), [0; 8192]);
    assert_eq!(harness.control.stats().discard.bytes, 24 * 512);
    let nothing = trim(&[], &harness);
    run(&mut harness, &nothing);
    let beyond = trim(&[(8, 8), (CAPACITY / 512, 1)], &harness);
    assert_eq!(fails(&mut harness, &beyond), 4);
}

#[test]
fn transfers_beyond_the_end_have_no_effect() {
    let mut harness = disk();
    let end = CAPACITY / 512;
    for (command, lba) in [
        (0x25, end),
        (0x35, end - 1),
        (0x60, u64::from(u32::MAX)),
        (0x42, end),
    ] {
        assert_eq!(
            fails(&mut harness, &transfer(command, lba, 2)),
            0x10,
            "{command:#x}"
        );
    }
    run(&mut harness, &transfer(0x42, end - 2, 2));
    assert_eq!(content(&harness, CAPACITY - 512, SECTOR), [0; SECTOR]);
    // An address that is no LBA, and a tag that is not the slot's.
    let no_lba = Request {
        device: 0,
        ..transfer(0x25, 0, 1)
    };
    assert_eq!(fails(&mut harness, &no_lba), 4);
    let other_tag = Request {
        count: 3 << 3,
        ..transfer(0x60, 0, 1)
    };
    assert_eq!(fails(&mut harness, &other_tag), 4);
}

#[test]
fn unknown_commands_are_aborted() {
    let mut harness = disk();
    for command in [0x00, 0x27, 0x47, 0xa0, 0xa1, 0xf6, 0xff] {
        assert_eq!(fails(&mut harness, &page(command)), 4, "{command:#x}");
    }
}

#[test]
fn short_buffers_fail_a_transfer_with_overflow() {
    let mut harness = disk();
    let request = Request {
        buffers: vec![(DATA, 512)],
        ..transfer(0x25, 0, 2)
    };
    issue(&mut harness, 0, &request);
    let interrupts = harness.read(register::INTERRUPT);
    assert_eq!(interrupts & (1 << 30 | 1 << 24), 1 << 30 | 1 << 24);
    assert_eq!(harness.control.stats().read.requests, 0);
}

#[test]
fn queued_commands_complete_in_any_order() {
    let mut harness = harness(false, false);
    for slot in 0..32_u16 {
        let request = Request {
            count: slot << 3,
            buffers: vec![(DATA + u64::from(slot) * 512, 512)],
            ..transfer(0x61, u64::from(slot), 1)
        };
        fill(&harness, DATA + u64::from(slot) * 512, SECTOR, slot as u8);
        request.put(harness.memory(), slot.into());
    }
    harness.write(register::ACTIVE, u32::MAX);
    harness.write(register::ISSUE, u32::MAX);
    assert_eq!(harness.control.stats().in_flight, 32);
    assert!(harness.finish(5));
    assert_eq!(harness.read(register::ACTIVE), !(1 << 5));
    assert_eq!(
        fis::<8>(&harness, DEVICE_BITS_FIS),
        [0xa1, 0x40, 0x50, 0, 1 << 5, 0, 0, 0]
    );
    assert!(harness.finish(30));
    assert_eq!(harness.read(register::ACTIVE), !(1 << 31 | 1 << 5));
    harness.finish_all();
    assert_eq!(
        (harness.read(register::ACTIVE), harness.read(register::ISSUE)),
        (0, 0)
    );
    assert_eq!(content(&harness, 9 * 512, SECTOR)[0], 9);
}

#[test]
fn failed_queued_command_is_in_the_log() {
    let mut harness = harness(false, false);
    harness.host.lock().unwrap().failures = 1;
    let queued = |slot: u16| Request {
        count: slot << 3,
        ..transfer(0x60, 3 + u64::from(slot), 1)
    };
    for slot in [4, 7] {
        issue(&mut harness, slot.into(), &queued(slot));
    }
    assert!(harness.finish(1));
    assert_eq!(harness.read(register::TASK_FILE), 0x4051);
    assert_eq!(harness.read(register::ACTIVE), 1 << 4 | 1 << 7);
    let log = Request {
        lba: 0x10,
        count: 1,
        ..page(0x2f)
    };
    harness.finish_all();
    restart(&mut harness);
    let content = run(&mut harness, &log);
    assert_eq!(content[..5], [7, 0, 0x51, 0x40, 10]);
    assert_eq!(content.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    // The log is read once.
    assert_eq!(run(&mut harness, &log)[0], 0x80);
    let directory = run(&mut harness, &Request { lba: 0, ..log });
    assert_eq!((word(&directory, 0), word(&directory, 0x10)), (1, 1));
    assert_eq!(harness.control.stats().read.errors, 1);
}

#[test]
fn smart_says_that_the_disk_is_healthy() {
    let mut harness = disk();
    let smart = |features| Request {
        command: 0xb0,
        features,
        lba: 0xc2_4f00,
        ..Request::default()
    };
    run(&mut harness, &smart(0xda));
    assert_eq!(fis::<20>(&harness, REGISTER_FIS)[4..8], [0, 0x4f, 0xc2, 0]);
    run(&mut harness, &smart(0xd9));
    assert_eq!(fails(&mut harness, &smart(0xda)), 4);
    run(&mut harness, &smart(0xd8));
    let no_signature = Request {
        lba: 0,
        ..smart(0xda)
    };
    assert_eq!(fails(&mut harness, &no_signature), 4);
    run(
        &mut harness,
        &Request {
            command: 0xe5,
            ..Request::default()
        },
    );
    assert_eq!(fis::<20>(&harness, REGISTER_FIS)[12], 0xff);
}

#[test]
fn software_reset_gives_the_signature() {
    let mut harness = disk();
    for control in [4, 0] {
        let mut reset = [0; 20];
        (reset[0], reset[15]) = (0x27, control);
        put_fis(harness.memory(), 0, &reset, &Request::default());
        harness.write(register::ISSUE, 1);
        assert_eq!(harness.read(register::ISSUE), 0);
    }
    assert_eq!(
        fis::<20>(&harness, REGISTER_FIS)[4..14],
        [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    );
    assert_eq!(harness.read(register::SIGNATURE), 0x0000_0101);
}
