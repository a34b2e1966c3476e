//! Save and restore of the port.

use proptest::prelude::*;

use super::*;
use crate::state::{Change, Section, message, refuses};

#[derive(Clone, Debug)]
enum Step {
    Read(u64),
    Write(u64, u8),
    Receive(Vec<u8>),
    Break,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0_u64..8).prop_map(Step::Read),
        2 => (0_u64..8, any::<u8>()).prop_map(|(offset, value)| Step::Write(offset, value)),
        // What drivers write: FIFOs and interrupts on, loopback.
        1 => Just(Step::Write(2, 0xc1)),
        1 => Just(Step::Write(1, 0x0f)),
        1 => Just(Step::Write(4, 0x1b)),
        2 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Step::Receive),
        1 => Just(Step::Break),
    ];
    prop::collection::vec(step, 0..60)
}

/// Returns the read value or the number of taken input bytes of each step, and the number of raised
/// edges.
fn run(uart: &Mutex<Uart>, line: &Line, steps: &[Step]) -> Vec<(usize, usize)> {
    let step = |step: &Step| {
        let result = match step {
            Step::Read(offset) => read(uart, *offset).into(),
            Step::Write(offset, value) => {
                write(uart, *offset, *value);
                0
            }
            Step::Receive(input) => uart.lock().unwrap().receive(input),
            Step::Break => {
                uart.lock().unwrap().receive_break();
                0
            }
        };
        (result, line.take())
    };
    steps.iter().map(step).collect()
}

/// Through the encoded form into a port that was just built.
fn reborn(uart: &Mutex<Uart>) -> (Arc<Mutex<Uart>>, Arc<Line>) {
    let section = Section::new("serial", &uart.lock().unwrap().save());
    let (new, line) = port(10_000);
    let saved = section.open().unwrap();
    new.lock().unwrap().restore(&saved).unwrap();
    (new, line)
}

proptest! {
    #[test]
    fn a_restored_port_behaves_as_its_twin_that_was_not_saved(before in steps(), after in steps()) {
        let (twin, twin_line) = port(10_000);
        run(&twin, &twin_line, &before);
        twin.lock().unwrap().pause();
        let (restored, line) = reborn(&twin);
        let printed_before = printed(&twin).len();
        twin.lock().unwrap().resume();
        restored.lock().unwrap().resume();
        prop_assert_eq!(line.take(), twin_line.take());
        prop_assert_eq!(run(&restored, &line, &after), run(&twin, &twin_line, &after));
        prop_assert_eq!(&printed(&restored)[..], &printed(&twin)[printed_before..]);
        prop_assert_eq!(restored.lock().unwrap().save(), twin.lock().unwrap().save());
    }
}

#[test]
fn a_restored_port_lets_no_input_in_and_raises_no_interrupt_before_it_is_resumed() {
    let (uart, _) = port(100);
    write(&uart, 1, 1);
    uart.lock().unwrap().pause();
    uart.lock().unwrap().receive(b"ab");
    let (restored, line) = reborn(&uart);
    assert_eq!((read(&restored, 5), line.take()), (0x60, 0));
    restored.lock().unwrap().resume();
    assert_eq!(read(&restored, 5), 0x61);
    assert!(line.take() > 0);
    assert_eq!([read(&restored, 0), read(&restored, 0)], *b"ab");
}

#[test]
fn a_full_backlog_is_restored_whole_and_its_sender_is_woken_when_there_is_room() {
    let (uart, _) = port(100);
    uart.lock().unwrap().pause();
    let input: Vec<u8> = (0..=255).cycle().take(4096).collect();
    assert_eq!(uart.lock().unwrap().receive(&input), 4096);
    let (restored, _) = reborn(&uart);
    let room = restored.lock().unwrap().room_event().unwrap();
    assert_eq!(restored.lock().unwrap().room(), 0);
    restored.lock().unwrap().resume();
    let received: Vec<u8> = input.iter().map(|_| read(&restored, 0)).collect();
    assert_eq!(received, input);
    room.read().unwrap();
    assert_eq!(restored.lock().unwrap().room(), 4096);
}

#[test]
fn a_saved_state_that_no_port_has_is_refused_and_changes_nothing() {
    let good = port(10).0.lock().unwrap().save();
    let changes: [Change<message::Serial>; 13] = [
        ("ier", |saved| saved.ier = 0x10),
        ("fcr", |saved| saved.fcr = 0x100),
        ("fcr", |saved| saved.fcr = 0x08),
        ("fcr", |saved| saved.fcr = 0x03),
        ("fcr", |saved| saved.fcr = 0xc0),
        ("lcr", |saved| saved.lcr = 0x100),
        ("mcr", |saved| saved.mcr = 0x20),
        ("msr", |saved| saved.msr = 0x100),
        ("scratch", |saved| saved.scratch = 0x100),
        ("divisor", |saved| saved.divisor = 0x1_0000),
        ("fifo", |saved| saved.fifo = vec![0; 2]),
        ("backlog", |saved| saved.backlog = vec![0; 4097]),
        ("break_after", |saved| saved.break_after = Some(1)),
    ];
    refuses(&good, &changes, |saved| {
        let (uart, _) = port(10);
        let result = uart.lock().unwrap().restore(saved);
        assert_eq!(uart.lock().unwrap().save(), good);
        result
    });
}

#[test]
fn a_state_of_version_1_is_still_read() {
    let payload = vec![
        0x08, 0x0f, 0x10, 0xc1, 0x01, 0x18, 0x83, 0x01, 0x20, 0x0b, 0x28, 0xb1, 0x01, 0x30, 0x5a, 0x38, 0x01,
        0x40, 0x01, 0x48, 0x01, 0x52, 0x02, b'h', b'i', 0x5a, 0x01, b'!',
    ];
    let section = Section {
        kind: "serial".into(),
        version: 1,
        id: "serial".into(),
        payload,
    };
    let (uart, _) = port(10);
    uart.lock().unwrap().restore(&section.open().unwrap()).unwrap();
    assert_eq!(Section::new("serial", &uart.lock().unwrap().save()), section);
}
