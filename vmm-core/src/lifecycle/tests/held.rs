//! Disks that keep requests after an error: the pause for it, and what ends it.

use super::*;

fn held() -> Input {
    Input::Notice(Notice::DiskHeld {
        device: "disk data".into(),
        message: "write: No space left on device".into(),
    })
}

#[test]
fn a_disk_that_holds_requests_pauses_the_machine_with_the_reason_until_it_is_resumed() {
    let inputs = vec![
        request(1, boot(false)),
        held(),
        held(),
        request(2, PAUSE),
        request(3, RESUME),
        request(4, STOP),
    ];
    let (log, _) = run(inputs, |builder| builder.holds.store(true, Ordering::SeqCst));
    assert_eq!(
        log[3..9],
        [
            "pause",
            "is Paused: disk data: write: No space left on device",
            "2 ok Paused web",
            "resume",
            "is Running",
            "3 ok Running web",
        ]
    );
}

#[test]
fn a_pause_that_was_asked_for_keeps_its_reason_and_an_error_that_is_over_pauses_nothing() {
    let inputs = vec![
        request(1, boot(false)),
        request(2, PAUSE),
        held(),
        request(3, RESUME),
        held(),
        request(4, STOP),
    ];
    let (log, _) = run(inputs, |_| ());
    assert!(log.iter().all(|line| !line.contains("No space")), "{log:?}");
    assert_eq!(log.iter().filter(|line| *line == "pause").count(), 1);
}

#[test]
fn a_pause_for_an_error_that_fails_is_told_and_the_machine_runs_on() {
    let inputs = vec![request(1, boot(false)), held(), request(2, STOP)];
    let (log, _) = run(inputs, |builder| {
        builder.pause_fails = true;
        builder.holds.store(true, Ordering::SeqCst);
    });
    assert_eq!(log[3], "pause");
    assert!(
        log[4].starts_with("disk data: write: No space left on device; the machine can't be paused"),
        "{log:?}"
    );
    assert_eq!(log[5], "halt");
}
