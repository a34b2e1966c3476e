use proptest::prelude::*;

use super::*;

const DATA: u64 = 0;
const IER: u64 = 1;
const IIR: u64 = 2;
const FCR: u64 = 2;
const LCR: u64 = 3;
const MCR: u64 = 4;
const LSR: u64 = 5;
const MSR: u64 = 6;

#[test]
fn what_is_transmitted_is_printed_and_the_transmitter_is_always_empty() {
    let (uart, line) = port(100);
    print(&uart, b"hello");
    assert_eq!(printed(&uart), b"hello");
    assert_eq!(read(&uart, LSR), 0x60);
    assert_eq!(line.take(), 0);
}

#[test]
fn enabling_the_transmitter_interrupt_raises_it_each_time_and_reading_iir_clears_it() {
    // Sequence that Linux' serial8250_do_startup uses to detect broken ports.
    let (uart, line) = port(100);
    for _ in 0..2 {
        write(&uart, IER, 2);
        assert_eq!(line.take(), 1);
        assert_eq!(read(&uart, IIR), 0x02);
        assert_eq!(read(&uart, IIR), 0x01);
        write(&uart, IER, 0);
    }
    assert_eq!(read(&uart, IIR), 0x01);
}

#[test]
fn a_burst_of_output_costs_one_interrupt_and_the_next_burst_another() {
    let (uart, line) = port(100);
    write(&uart, FCR, 1);
    write(&uart, IER, 2);
    line.take();
    for _ in 0..3 {
        assert_eq!(read(&uart, IIR), 0xc2);
        print(&uart, &[b'x'; 16]);
        assert_eq!(line.take(), 1);
    }
}

#[test]
fn input_raises_one_interrupt_and_is_read_in_order() {
    let (uart, line) = port(100);
    write(&uart, FCR, 1);
    write(&uart, IER, 1);
    assert_eq!(uart.lock().unwrap().receive(b"abc"), 3);
    assert_eq!(line.take(), 1);
    assert_eq!(read(&uart, IIR), 0xc4);
    for byte in *b"abc" {
        assert_eq!(read(&uart, LSR), 0x61);
        assert_eq!(read(&uart, DATA), byte);
    }
    assert_eq!((read(&uart, LSR), read(&uart, IIR), line.take()), (0x60, 0xc1, 0));
}

#[test]
fn a_fifo_below_its_trigger_level_is_told_as_a_timeout() {
    let (uart, _) = port(100);
    write(&uart, FCR, 0xc1);
    write(&uart, IER, 1);
    uart.lock().unwrap().receive(&[0; 13]);
    assert_eq!(read(&uart, IIR), 0xcc);
    read(&uart, DATA);
    let (uart, _) = port(100);
    write(&uart, FCR, 0xc1);
    write(&uart, IER, 1);
    uart.lock().unwrap().receive(&[0; 14]);
    assert_eq!(read(&uart, IIR), 0xc4);
}

#[test]
fn more_input_than_fits_stays_with_its_sender_until_there_is_room() {
    let (uart, _) = port(100);
    write(&uart, FCR, 1);
    let input: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let room = uart.lock().unwrap().room_event().unwrap();
    let (mut sent, mut received) = (0, Vec::new());
    while received.len() < input.len() {
        while uart.lock().unwrap().room() > 0 && sent < input.len() {
            sent += uart.lock().unwrap().receive(&input[sent..]);
        }
        assert!(sent - received.len() <= 4096 + 16);
        while read(&uart, LSR) & 1 == 1 {
            received.push(read(&uart, DATA));
        }
        if sent < input.len() {
            assert!(room.read().is_ok());
        }
    }
    assert_eq!(received, input);
}

#[test]
fn the_autodetection_of_linux_finds_a_16550a() {
    let (uart, _) = port(100);
    // Loopback: the modem's outputs are its inputs, and nothing is printed.
    write(&uart, MCR, 0x1a);
    assert_eq!(read(&uart, MSR) & 0xf0, 0x90);
    write(&uart, DATA, b'x');
    assert_eq!((read(&uart, LSR), read(&uart, DATA)), (0x61, b'x'));
    assert_eq!(printed(&uart), b"");
    write(&uart, MCR, 0x0b);
    assert_eq!(read(&uart, MSR) & 0xf0, 0xb0);
    assert_eq!(read(&uart, MSR) & 0x0f, 0);
    // FIFO that works; no enhanced features register.
    write(&uart, FCR, 1);
    assert_eq!(read(&uart, IIR) >> 6, 3);
    write(&uart, LCR, 0xbf);
    assert_ne!(read(&uart, IIR), 0);
    // Divisor latch.
    write(&uart, DATA, 0x34);
    write(&uart, IER, 0x12);
    assert_eq!((read(&uart, DATA), read(&uart, IER)), (0x34, 0x12));
    write(&uart, LCR, 3);
    assert_eq!((read(&uart, IER), read(&uart, LCR)), (0, 3));
    // Scratch register; upper bits of IER that a 16550A has not.
    write(&uart, 7, 0xa5);
    write(&uart, IER, 0xf0);
    assert_eq!((read(&uart, 7), read(&uart, IER)), (0xa5, 0));
}

#[test]
fn modem_lines_that_change_are_told_once() {
    let (uart, line) = port(100);
    write(&uart, IER, 8);
    write(&uart, MCR, 0x10);
    assert_eq!((read(&uart, IIR), line.take()), (0x00, 1));
    assert_eq!(read(&uart, MSR), 0x0b);
    assert_eq!((read(&uart, MSR), read(&uart, IIR)), (0, 1));
}

#[test]
fn loopback_keeps_input_from_outside_away_and_can_overrun() {
    let (uart, _) = port(100);
    write(&uart, FCR, 1);
    write(&uart, MCR, 0x10);
    uart.lock().unwrap().receive(b"outside");
    assert_eq!(read(&uart, LSR), 0x60);
    (0..17).for_each(|byte| write(&uart, DATA, byte));
    assert_eq!((read(&uart, LSR), read(&uart, LSR)), (0x63, 0x61));
    for byte in 0..16 {
        assert_eq!(read(&uart, DATA), byte);
    }
    write(&uart, MCR, 0);
    assert_eq!(read(&uart, DATA), b'o');
}

#[test]
fn a_pause_loses_no_interrupt_and_no_input() {
    let (uart, line) = port(100);
    write(&uart, IER, 3);
    line.take();
    uart.lock().unwrap().pause();
    let room = uart.lock().unwrap().room_event().unwrap();
    assert_eq!(uart.lock().unwrap().room(), 0);
    // A sender that had asked before the pause.
    assert_eq!(uart.lock().unwrap().receive(b"x"), 1);
    assert_eq!((line.take(), room.read().is_ok()), (0, false));
    uart.lock().unwrap().resume();
    assert!(line.take() >= 1);
    assert!(room.read().is_ok());
    assert_eq!((read(&uart, IIR), read(&uart, DATA)), (0x04, b'x'));
    assert_eq!(read(&uart, IIR), 0x02);
}

#[test]
fn a_reset_forgets_settings_and_input_but_not_what_was_printed() {
    let (uart, _) = port(100);
    print(&uart, b"boot 1\n");
    write(&uart, IER, 0xf);
    write(&uart, MCR, 0x1f);
    uart.lock().unwrap().receive(&[1; 5000]);
    uart.lock().unwrap().reset();
    assert_eq!(
        (read(&uart, IER), read(&uart, MCR), read(&uart, LSR)),
        (0, 0, 0x60)
    );
    assert_eq!(uart.lock().unwrap().room(), 4096);
    assert_eq!(printed(&uart), b"boot 1\n");
}

#[test]
fn accesses_of_other_widths_do_nothing() {
    let (uart, _) = port(100);
    let mut data = [0; 4];
    uart.lock().unwrap().read(0, &mut data);
    assert_eq!(data, [0xff; 4]);
    let _ = uart.lock().unwrap().write(0, b"ab");
    assert_eq!(printed(&uart), b"");
}

proptest! {
    #[test]
    fn no_sequence_of_accesses_panics_or_prints_what_was_not_written(
        steps in proptest::collection::vec((0_u64..10, any::<u8>(), any::<bool>()), 0..200)
    ) {
        let (uart, _) = port(1000);
        let mut written = 0;
        for (offset, value, write_it) in steps {
            if write_it {
                write(&uart, offset, value);
                written += usize::from(offset == 0);
            } else {
                read(&uart, offset);
            }
            uart.lock().unwrap().receive(&[value]);
        }
        prop_assert!(printed(&uart).len() <= written);
    }
}

#[test]
fn a_break_comes_between_the_input_before_and_after_it_as_a_zero_with_its_status_once() {
    let (uart, line) = port(100);
    write(&uart, 2, 1);
    write(&uart, 1, 5);
    line.take();
    uart.lock().unwrap().receive(b"ab");
    uart.lock().unwrap().receive_break();
    uart.lock().unwrap().receive(b"h");
    assert_eq!(line.take(), 1);
    assert_eq!(
        [read(&uart, 5), read(&uart, 0), read(&uart, 0)],
        [0x61, b'a', b'b']
    );
    // The break raises an interrupt of the line status.
    assert_eq!((line.take(), read(&uart, 2)), (1, 0xc6));
    assert_eq!([read(&uart, 5), read(&uart, 5), read(&uart, 0)], [0x71, 0x61, 0]);
    assert_eq!(
        [read(&uart, 5), read(&uart, 0), read(&uart, 5)],
        [0x61, b'h', 0x60]
    );
}
