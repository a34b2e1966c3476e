//! Disks that keep requests after an error: the pause for it, and what ends it.

use super::*;

fn held() -> Input {
    Input::Notice(Notice::DiskHeld {
        device: "disk data".into(),
        message: "write: No space left on device".into(),
    })
}

#[test]
fn held_requests_pause_the_machine_until_a_resume() {
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
fn requested_pause_keeps_its_reason_after_a_disk_error() {
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
fn failed_pause_for_a_disk_error_is_reported() {
    let inputs = vec![request(1, boot(false)), held(), request(2, STOP)];
    let (log, _) = run(inputs, |builder| {
        builder.pause_fails = true;
        builder.holds.store(true, Ordering::SeqCst);
    });
    assert_eq!(log[3], "pause");
    assert!(
        log[4].starts_with("disk data: write: No space left on device; the machine cannot be paused"),
        "{log:?}"
    );
    assert_eq!(log[5], "halt");
}
