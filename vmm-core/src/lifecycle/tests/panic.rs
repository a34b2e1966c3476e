//! Panics reported by pvpanic, and panics seen on the serial port.

use super::*;

fn printed(printed: u64) -> Input {
    Input::Notice(Notice::PanicPrinted { printed })
}

#[test]
fn a_panic_on_the_serial_port_is_told_when_it_holds() {
    let (log, record) = run(vec![request(1, boot(false)), printed(100)], |_| ());
    let checks = log.iter().filter(|line| *line == "panic at 100?").count();
    assert_eq!(checks, 5);
    assert_eq!(log.iter().filter(|line| *line == "guest panicked").count(), 1);
    assert_eq!(record.kind(), ExitKind::GuestPanic);
}

#[test]
fn a_line_of_a_panic_that_does_not_hold_is_forgotten() {
    let inputs = vec![request(1, boot(false)), printed(2), request(3, PAUSE)];
    let (sender, receiver) = channel();
    let log = Log::default();
    let builder = TestBuilder::new(&log, &sender);
    for input in inputs {
        sender.send(input).unwrap();
    }
    let (notifier, audience) = (Notifier::new(sender.clone()), log.clone());
    let thread = std::thread::spawn(move || Driver::new(receiver, notifier, audience, builder).run(|_| ()));
    // A paused machine is not checked.
    sender.send(request(4, RESUME)).unwrap();
    let start = Instant::now();
    while !log.0.lock().unwrap().contains(&"panic at 2?".to_owned()) {
        assert!(start.elapsed().as_secs() < 20);
        std::thread::yield_now();
    }
    sender.send(request(9, STOP)).unwrap();
    let record = thread.join().unwrap();
    assert!(!log.take().contains(&"guest panicked".to_owned()));
    assert_eq!(record.kind(), ExitKind::Stopped);
}

#[test]
fn a_reset_ends_the_suspicion_of_a_panic() {
    let inputs = vec![
        request(1, boot(false)),
        printed(100),
        Input::Notice(Notice::Reset),
        request(9, STOP),
    ];
    let (log, record) = run(inputs, |_| ());
    assert!(log.contains(&"guest reset 1".to_owned()), "{log:?}");
    assert!(!log.contains(&"guest panicked".to_owned()), "{log:?}");
    assert_eq!(record.kind(), ExitKind::Stopped);
}

#[test]
fn panic_is_reported_once_and_is_the_reason_of_the_end() {
    let panic = || Input::Notice(Notice::GuestPanicked(None));
    let (log, record) = run(
        vec![request(1, boot(false)), panic(), panic(), request(2, STOP)],
        |_| (),
    );
    assert_eq!(log.iter().filter(|line| *line == "guest panicked").count(), 1);
    assert_eq!(record.kind(), ExitKind::GuestPanic);
}

#[test]
fn reset_after_a_panic_clears_the_panic() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::GuestPanicked(None)),
        Input::Notice(Notice::Reset),
        request(2, STOP),
    ];
    assert_eq!(run(inputs, |_| ()).1.kind(), ExitKind::Stopped);
}

#[test]
fn crash_after_a_panic_resets_or_ends_as_panic() {
    for (on_crash, kind) in [
        (OnCrash::Restart, ExitKind::Stopped),
        (OnCrash::Stop, ExitKind::GuestPanic),
    ] {
        let inputs = vec![
            request(1, boot_with(on_crash, false)),
            Input::Notice(Notice::GuestPanicked(None)),
            triple_fault(),
            request(2, STOP),
        ];
        assert_eq!(run(inputs, |_| ()).1.kind(), kind);
    }
}
