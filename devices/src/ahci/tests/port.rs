//! Registers, stops, resets, errors and interrupts.

use proptest::prelude::*;

use super::*;

const HALTS: u32 = 1 << 30;
const BUS_FATAL: u32 = 1 << 29;

#[test]
fn controller_has_32_slots_and_the_ports_that_there_are() {
    let harness = disk();
    assert_eq!(harness.read(0x00), 0xc124_1f00);
    assert_eq!(harness.read(register::CONTROL), 0x8000_0002);
    assert_eq!((harness.read(0x0c), harness.read(0x10)), (1, 0x0001_0301));
    // The second port is not there.
    assert_eq!(harness.read(0x1a8), 0);
    let mut byte = [0];
    harness.hba.read(0x11, &mut byte);
    assert_eq!(byte, [3]);
}

#[test]
fn stopped_port_runs_until_its_commands_have_ended() {
    let mut harness = harness(false, false);
    issue(&mut harness, 3, &transfer(0x35, 0, 1));
    issue(&mut harness, 4, &transfer(0x35, 1, 1));
    assert_eq!(harness.read(register::COMMAND) >> 8 & 0x1f, 3);
    harness.write(register::COMMAND, 0x10);
    assert_eq!(harness.read(register::ISSUE), 0);
    assert_ne!(harness.read(register::COMMAND) & RUNS, 0);
    let interrupts = harness.read(register::INTERRUPT);
    harness.finish_all();
    assert_eq!(harness.read(register::COMMAND) & RUNS, 0);
    assert_eq!(harness.read(register::INTERRUPT), interrupts);
    assert_eq!(harness.read(register::TASK_FILE) & 0x80, 0);
    assert_eq!(harness.control.stats().write.requests, 0);
    harness.write(register::COMMAND, RUN);
    run(&mut harness, &transfer(0x35, 0, 1));
}

#[test]
fn command_of_the_same_slot_waits_for_the_stopped_one() {
    let mut harness = harness(false, false);
    issue(&mut harness, 0, &transfer(0x35, 0, 1));
    restart(&mut harness);
    issue(&mut harness, 0, &transfer(0xea, 0, 0));
    assert_eq!(harness.host.lock().unwrap().waiting.len(), 1);
    assert!(harness.finish(0));
    assert_eq!(harness.read(register::ISSUE), 1);
    assert!(harness.finish(0));
    assert_eq!(harness.read(register::ISSUE), 0);
    assert_eq!(harness.control.stats().flush.requests, 1);
}

#[test]
fn command_that_is_not_queued_waits_for_all_others() {
    let mut harness = harness(false, false);
    issue(&mut harness, 0, &transfer(0x61, 0, 1));
    issue(&mut harness, 1, &transfer(0xea, 0, 0));
    let queued = Request {
        count: 2 << 3,
        ..transfer(0x61, 1, 1)
    };
    issue(&mut harness, 2, &queued);
    let waiting = |harness: &Harness| harness.host.lock().unwrap().waiting.len();
    assert_eq!(waiting(&harness), 1);
    assert!(harness.finish(0));
    assert_eq!(
        (waiting(&harness), harness.read(register::ISSUE)),
        (1, 1 << 1 | 1 << 2)
    );
    assert!(harness.finish(0));
    assert!(harness.finish(0));
    assert_eq!(harness.read(register::ISSUE), 0);
}

#[test]
fn reset_of_the_link_resets_the_device() {
    let mut harness = harness(false, false);
    issue(&mut harness, 0, &transfer(0x35, 0, 1));
    harness.write(register::SATA_CONTROL, 0x301);
    assert_eq!(harness.read(register::SATA_STATUS), 1);
    harness.write(register::SATA_CONTROL, 0x300);
    assert_eq!(harness.read(register::SATA_STATUS), 0x123);
    assert_eq!(harness.read(register::SATA_ERROR), 1 << 26);
    assert_eq!(harness.read(register::TASK_FILE), 0x0150);
    // It has an interrupt until its cause is cleared.
    assert_ne!(harness.read(register::INTERRUPT) & 1 << 6, 0);
    harness.write(register::SATA_ERROR, u32::MAX);
    assert_eq!(harness.read(register::INTERRUPT) & 1 << 6, 0);
    harness.finish_all();
    assert_eq!(harness.control.stats().write.requests, 0);
}

#[test]
fn controller_resets_when_no_command_is_in_process() {
    let mut harness = harness(false, false);
    issue(&mut harness, 0, &transfer(0x35, 0, 1));
    harness.write(register::CONTROL, 1);
    assert_eq!(harness.read(register::CONTROL), 0x8000_0001);
    harness.finish_all();
    assert_eq!(harness.read(register::CONTROL), 0x8000_0000);
    assert_eq!(harness.read(register::COMMAND), 6);
    assert_eq!(harness.read(register::LIST), LIST as u32);
    harness.start();
    run(&mut harness, &page(0xec));
}

#[test]
fn structures_outside_memory_are_fatal_errors_of_the_bus() {
    let breaks: [fn(&mut Harness); 4] = [
        |harness| harness.write(register::LIST, REGION as u32),
        |harness| harness.write(register::LIST + 4, u32::MAX),
        |harness| harness.write(register::RECEIVED, REGION as u32),
        |harness| {
            // The command table.
            let place = GuestAddress(LIST + 8);
            harness.memory().write_obj(REGION as u32, place).unwrap();
        },
    ];
    for break_it in breaks {
        let mut harness = disk();
        page(0xec).put(harness.memory(), 0);
        break_it(&mut harness);
        harness.write(register::ISSUE, 1);
        assert_ne!(harness.read(register::INTERRUPT) & BUS_FATAL, 0);
        harness.write(register::ISSUE, 2);
        assert_eq!(harness.read(register::ISSUE), 3, "the port has halted");
    }
    let mut harness = disk();
    let outside = Request {
        buffers: vec![(REGION - 256, 512)],
        ..transfer(0x25, 0, 1)
    };
    issue(&mut harness, 0, &outside);
    assert_ne!(harness.read(register::INTERRUPT) & BUS_FATAL, 0);
}

#[test]
fn long_tables_of_tiny_buffers_are_bounded() {
    let mut harness = disk();
    // Each descriptor has 2 bytes; the table is the whole rest of memory.
    let table = 0x3_0000_u64;
    let request = transfer(0x25, 0, 8);
    request.put(harness.memory(), 0);
    let header = [0xffff_0005_u32, 0, table as u32, 0];
    for (at, word) in (0..).zip(header) {
        harness
            .memory()
            .write_obj(word, GuestAddress(LIST + at * 4))
            .unwrap();
    }
    let mut fis = [0; 20];
    harness
        .memory()
        .read_slice(&mut fis, GuestAddress(TABLES))
        .unwrap();
    harness.memory().write_slice(&fis, GuestAddress(table)).unwrap();
    for at in 0..2048_u64 {
        let place = table + 0x80 + at * 16;
        harness
            .memory()
            .write_obj(DATA as u32, GuestAddress(place))
            .unwrap();
        harness
            .memory()
            .write_obj(1_u32, GuestAddress(place + 12))
            .unwrap();
    }
    harness.write(register::ISSUE, 1);
    assert_ne!(harness.read(register::INTERRUPT) & 1 << 24, 0);
    restart(&mut harness);
    // A kilobyte is within the bound.
    let mut short = fis;
    short[12] = 2;
    harness.memory().write_slice(&short, GuestAddress(table)).unwrap();
    harness.write(register::ISSUE, 1);
    assert_eq!(
        (harness.read(register::ISSUE), harness.read(register::TASK_FILE)),
        (0, 0x50)
    );
}

#[test]
fn failed_command_halts_the_port_until_it_is_stopped() {
    let mut harness = disk();
    issue(&mut harness, 0, &page(0xff));
    issue(&mut harness, 1, &page(0xec));
    assert_eq!(harness.read(register::ISSUE), 3);
    assert_ne!(harness.read(register::INTERRUPT) & HALTS, 0);
    restart(&mut harness);
    run(&mut harness, &page(0xec));
}

#[test]
fn held_commands_are_carried_out_after_a_pause() {
    let mut host = host(CAPACITY, false, 512);
    host.failures = 1;
    let mut harness = Harness::new(host, options(false, OnError::Hold));
    harness.start();
    let written = fill(&harness, DATA, SECTOR, 9);
    issue(&mut harness, 0, &transfer(0x35, 2, 1));
    issue(&mut harness, 1, &transfer(0xea, 0, 0));
    harness.finish_all();
    let stats = harness.control.stats();
    assert_eq!(
        (stats.held, stats.in_flight, harness.bare.backend_faults),
        (1, 1, 1)
    );
    assert_eq!(harness.read(register::ISSUE), 3);
    harness.bare.drain();
    assert_eq!(harness.control.stats().held, 1);
    harness.bare.start();
    harness.pause_and_resume();
    harness.finish_all();
    assert_eq!(harness.read(register::ISSUE), 0);
    let stats = harness.control.stats();
    assert_eq!(
        (stats.held, stats.write.requests, stats.flush.requests),
        (0, 1, 1)
    );
    fill(&harness, DATA, SECTOR, 0);
    assert_eq!(run(&mut harness, &transfer(0x25, 2, 1)), written);
}

#[test]
fn port_interrupts_for_enabled_causes_alone() {
    let mut harness = disk();
    let sent = harness.msi.count(0);
    run(
        &mut harness,
        &Request {
            command: 0xea,
            ..Request::default()
        },
    );
    assert_eq!(harness.msi.count(0), sent + 1);
    assert_eq!(
        (
            harness.read(register::INTERRUPTS),
            harness.read(register::INTERRUPT)
        ),
        (1, 1)
    );
    // The controller's bit stays set as long as the port's cause does.
    harness.write(register::INTERRUPTS, 1);
    assert_eq!(harness.read(register::INTERRUPTS), 1);
    harness.write(register::INTERRUPT, 1);
    harness.write(register::INTERRUPTS, 1);
    assert_eq!(harness.read(register::INTERRUPTS), 0);
    harness.write(register::ENABLE, 0);
    let sent = harness.msi.count(0);
    run(
        &mut harness,
        &Request {
            command: 0xea,
            ..Request::default()
        },
    );
    assert_eq!(
        (harness.msi.count(0), harness.read(register::INTERRUPTS)),
        (sent, 0)
    );
    harness.write(register::ENABLE, 1);
    assert_eq!(
        (harness.msi.count(0), harness.read(register::INTERRUPTS)),
        (sent + 1, 1)
    );
}

/// The content of a register after a write of `value`, with the content `before`.
fn model(offset: u64, before: u32, value: u32) -> u32 {
    match offset {
        register::LIST => value & !0x3ff,
        register::RECEIVED => value & !0xff,
        0x104 | 0x10c => value,
        register::ENABLE => value & 0xfdc0_00ff,
        register::SATA_ERROR => before & !value,
        register::SATA_CONTROL => value & 0xfff,
        register::COMMAND => {
            let (start, receive) = (value & 1, value & 0x10);
            6 | value & 0x0300_0011 | start << 15 | receive << 10
        }
        register::ACTIVE | register::ISSUE | register::INTERRUPT => u32::MAX,
        _ => before,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each register follows its own mask, and only a write to PxCI issues commands.
    #[test]
    fn registers_follow_their_masks(
        writes in prop::collection::vec((0_u64..0x60, any::<u32>()), 1..60)
    ) {
        let mut harness = disk();
        harness.write(register::COMMAND, 0);
        for (index, value) in writes {
            let offset = index * 4 + 0x100;
            let before = harness.read(offset);
            harness.write(offset, value);
            let (expected, mut after) = (model(offset, before, value), harness.read(offset));
            if offset == register::COMMAND {
                // The slot of the last command.
                after &= !0x1f00;
            }
            if expected != u32::MAX {
                prop_assert_eq!(after, expected, "{:#x}", offset);
            }
            let started = harness.read(register::COMMAND) & 1 != 0;
            let (issued, active) = (harness.read(register::ISSUE), harness.read(register::ACTIVE));
            prop_assert!(started || issued == 0 && active == 0);
            prop_assert_eq!(harness.read(register::INTERRUPT) & !0xfdc0_00ff, 0);
            prop_assert_eq!(harness.read(0x0c), 1);
        }
    }
}
