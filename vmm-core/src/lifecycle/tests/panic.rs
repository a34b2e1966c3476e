//! Panics reported by pvpanic.

use super::*;

#[test]
fn a_panic_is_told_once_and_is_the_reason_when_the_machine_is_stopped_after_it() {
    let panic = || Input::Notice(Notice::GuestPanicked);
    let (log, record) = run(
        vec![
            request(1, boot(false)),
            panic(),
            panic(),
            request(2, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(log.iter().filter(|line| *line == "guest panicked").count(), 1);
    assert_eq!(record.kind(), ExitKind::GuestPanic);
}

#[test]
fn a_guest_that_resets_after_its_panic_is_not_called_panicked_later() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::GuestPanicked),
        Input::Notice(Notice::Reset),
        request(2, Request::Stop),
    ];
    assert_eq!(run(inputs, |_| ()).1.kind(), ExitKind::Stopped);
}

#[test]
fn a_guest_that_crashes_after_its_panic_starts_anew_or_has_panicked() {
    for (on_crash, kind) in [
        (OnCrash::Restart, ExitKind::Stopped),
        (OnCrash::Stop, ExitKind::GuestPanic),
    ] {
        let inputs = vec![
            request(1, boot_with(on_crash, false)),
            Input::Notice(Notice::GuestPanicked),
            triple_fault(),
            request(2, Request::Stop),
        ];
        assert_eq!(run(inputs, |_| ()).1.kind(), kind);
    }
}
