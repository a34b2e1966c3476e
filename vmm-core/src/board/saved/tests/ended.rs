//! Machines whose guest has powered off, or has panicked.

use super::{
    snapshot::{Kit, One},
    *,
};
use crate::{lifecycle::Reset, snapshot::saving::Event};

/// Prints `line` on the serial port and loops then.
fn prints(line: &[u8]) -> Vec<u8> {
    let text = u32::try_from(layout::LOW_RESERVED_END).unwrap() + 20;
    let length = u32::try_from(line.len()).unwrap();
    [
        &[0xbe][..], // mov esi, text
        &text.to_le_bytes(),
        &[0xb9], // mov ecx, length
        &length.to_le_bytes(),
        &[0x66, 0xba, 0xf8, 0x03], // mov dx, 0x3f8
        &[0xac, 0xee],             // again: lodsb, out dx, al
        &[0xe2, 0xfc],             // loop again
        &SPIN,
        line,
    ]
    .concat()
}

#[test]
fn a_machine_whose_vcpu_has_ended_is_not_saved_and_stays_so() {
    let kit = Kit::new(&POWER_OFF);
    let mut one = kit.started();
    let power_off = |one: &One| {
        let notice = one.notices.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(notice, Input::Notice(Notice::PowerOff)), "{notice:?}");
    };
    power_off(&one);
    one.machine.pause().unwrap();
    let begin = |one: &mut One| {
        let file = tempfile::tempfile().unwrap();
        one.machine.begin_snapshot(file, false).unwrap();
        one.wait_for(Event::Ready);
    };
    begin(&mut one);
    let failure = one.machine.complete_snapshot(Vec::new(), false).unwrap_err();
    assert!(
        failure.message.starts_with("vCPU 0 has just reset"),
        "{failure:?}"
    );
    one.machine.give_up_snapshot();
    one.wait_for(Event::Ended);
    one.machine.end_snapshot().unwrap_err();
    one.machine.resume().unwrap();
    one.machine.pause().unwrap();
    assert!(one.notices.try_recv().is_err(), "it ran on behind its end");
    // After a reset the paused machine can be saved, and it runs again.
    assert_eq!(one.machine.reset(), Ok(Reset::Done));
    begin(&mut one);
    one.machine.complete_snapshot(Vec::new(), false).unwrap();
    one.wait_for(Event::Ended);
    one.machine.end_snapshot().unwrap();
    one.machine.resume().unwrap();
    power_off(&one);
}

#[test]
fn the_last_line_of_a_panic_is_seen_on_the_serial_port() {
    let line = b"[    1.204816] ---[ end Kernel panic - not syncing: VFS: no root ]---\r\n";
    let kit = Kit::new(&prints(line));
    let mut one = kit.started();
    match one.notices.recv_timeout(PATIENCE) {
        Ok(Input::Notice(Notice::PanicPrinted { printed })) => {
            assert_eq!(printed, line.len() as u64);
            assert_eq!(one.machine.may_have_panicked(printed), Ok(true));
            assert_eq!(one.machine.may_have_panicked(printed - 1), Ok(false));
        }
        other => panic!("{other:?}"),
    }
    let kit = Kit::new(&prints(b"---[ end trace 0000000000000000 ]---\r\n"));
    let mut other = kit.started();
    let mut printed = [0; 38];
    other.console.read_exact(&mut printed).unwrap();
    assert!(other.notices.try_recv().is_err());
}

#[test]
fn machine_restored_from_a_panicked_guest_reports_the_panic() {
    let kit = Kit::new(&SPIN);
    let mut one = kit.started();
    for panicked in [false, true] {
        one.machine.pause().unwrap();
        let file = tempfile::tempfile().unwrap();
        one.machine
            .begin_snapshot(file.try_clone().unwrap(), false)
            .unwrap();
        one.wait_for(Event::Ready);
        one.machine.complete_snapshot(Vec::new(), panicked).unwrap();
        one.wait_for(Event::Ended);
        one.machine.end_snapshot().unwrap();
        one.machine.resume().unwrap();
        let other = kit.restored(&file, false).unwrap();
        let told = matches!(
            other.notices.try_recv(),
            Ok(Input::Notice(Notice::GuestPanicked(None)))
        );
        assert_eq!(told, panicked);
    }
}
