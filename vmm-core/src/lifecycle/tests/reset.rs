//! Resets. Some wait for the end of a capture, or for requests that the storage has not answered.

use super::{
    snapshot::{disks_alone, log_of, save, save_with, send},
    *,
};

fn notice(notice: Notice) -> Input {
    Input::Notice(notice)
}

fn fault() -> Notice {
    Notice::TripleFault("vCPU 0: triple fault".into())
}

/// Positions of lines in a log. The log has each line exactly once.
fn positions(log: &[String], lines: &[&str]) -> Vec<usize> {
    let position = |line: &&str| {
        let found: Vec<_> = (0..log.len()).filter(|index| log[*index] == **line).collect();
        assert_eq!(found.len(), 1, "{line}: {log:?}");
        found[0]
    };
    lines.iter().map(position).collect()
}

/// `lines` are in the log, in this order.
fn assert_order(log: &[String], lines: &[&str]) {
    let found = positions(log, lines);
    assert!(found.is_sorted(), "{lines:?}: {log:?}");
}

#[test]
fn a_reset_while_a_snapshot_needs_the_memory_gives_it_up() {
    for (reported, event) in [
        (Notice::Reset, "guest reset 1"),
        (fault(), "crash reset 1: vCPU 0: triple fault"),
    ] {
        let inputs = vec![request(1, boot(false)), save(2, false, "late")];
        let log = log_of(inputs, |builder| builder.reported = Some(reported));
        let order = [
            "complete snapshot late",
            "is Paused for a snapshot",
            "give up snapshot",
            "end snapshot",
            "resume",
            "is Running",
            "2 State",
            "reset",
            event,
            "start",
        ];
        assert_order(&log, &order);
    }
}

#[test]
fn a_reset_while_a_paused_snapshot_is_written_gives_it_up() {
    for keep_paused in [false, true] {
        let inputs = vec![
            request(1, boot(false)),
            save_with(2, (true, keep_paused), "x"),
            notice(Notice::Reset),
        ];
        let log = log_of(inputs, |_| ());
        let order = [
            "begin snapshot, runs: false",
            "give up snapshot",
            "end snapshot",
            "resume",
            "2 State",
            "reset",
        ];
        assert_order(&log, &order);
    }
    // A machine that a client has paused stays paused.
    let inputs = vec![request(1, boot(true)), save(2, false, "x"), notice(Notice::Reset)];
    let log = log_of(inputs, |_| ());
    assert_order(
        &log,
        &[
            "give up snapshot",
            "end snapshot",
            "2 State",
            "reset",
            "guest reset 1",
        ],
    );
    assert!(!log.contains(&"start".to_owned()), "{log:?}");
}

#[test]
fn a_reset_in_the_last_stage_of_a_migration_gives_it_up() {
    let inputs = vec![request(1, boot(false)), send(2, 100)];
    let log = log_of(inputs, |builder| builder.reported = Some(Notice::Reset));
    let order = [
        "is Paused for a migration",
        "give up snapshot",
        "end snapshot",
        "resume",
        "is Running",
        "2 State",
        "reset",
        "start",
    ];
    assert_order(&log, &order);
}

#[test]
fn a_reset_while_disks_are_copied_follows_their_release() {
    let inputs = vec![
        request(1, boot(false)),
        disks_alone(2),
        notice(Notice::Reset),
        release(8, false),
        request(9, STOP),
    ];
    let log = log_of(inputs, |_| ());
    assert_order(&log, &["disks quiet", "resume", "2 saved 0", "reset", "start"]);
}

#[test]
fn a_reset_with_the_memory_copied_is_done_at_once() {
    let inputs = vec![request(1, boot(false)), save(2, false, "x")];
    let log = log_of(inputs, |builder| builder.reported = Some(Notice::Reset));
    assert_order(
        &log,
        &[
            "complete snapshot x",
            "resume",
            "reset",
            "end snapshot",
            "2 saved 7",
        ],
    );
}

#[test]
fn a_guest_that_ends_during_a_capture_ends_the_run() {
    for (reported, kind) in [
        (Notice::PowerOff, ExitKind::PowerOff),
        (Notice::GuestCrashed("vCPU 0".into()), ExitKind::GuestCrash),
        (Notice::VmmFailed("KVM".into()), ExitKind::VmmError),
    ] {
        for capture in [save(2, false, "late"), send(2, 100)] {
            let (log, record) = run(vec![request(1, boot(false)), capture], |builder| {
                builder.reported = Some(reported.clone());
            });
            assert_eq!(record.kind(), kind);
            assert!(log.contains(&"2 State".to_owned()), "{log:?}");
            assert!(!log.contains(&"end snapshot".to_owned()), "{log:?}");
        }
    }
}

#[test]
fn a_panic_during_a_capture_does_not_disturb_it() {
    let inputs = vec![request(1, boot(false)), save(2, false, "late")];
    let log = log_of(inputs, |builder| {
        builder.reported = Some(Notice::GuestPanicked(None));
    });
    assert_order(&log, &["guest panicked", "end snapshot", "2 saved 7"]);
}

#[test]
fn a_reset_waits_for_the_storage_and_then_starts_the_machine() {
    for (reset, answer) in [
        (notice(Notice::Reset), "guest reset 1"),
        (request(2, RESET), "2 ok Running web"),
    ] {
        let inputs = vec![
            request(1, boot(false)),
            reset,
            // Reports of the guest from before its stop.
            notice(Notice::PowerOff),
            notice(Notice::Reset),
            request(3, PAUSE),
            save(4, true, "x"),
            request(5, GET_DISK_STATS),
        ];
        let (log, _) = run(inputs, |builder| {
            builder.reset_waits = 3;
            builder.stops_after_reset = true;
        });
        assert_eq!(log.iter().filter(|line| *line == "reset waits").count(), 3);
        assert_order(&log, &["3 State", "4 State", "5 stats", "reset"]);
        assert_order(&log, &["reset", answer]);
        assert!(log.contains(&"ended Stopped".to_owned()), "{log:?}");
    }
}

#[test]
fn a_reset_that_waits_gives_up_a_running_capture() {
    let inputs = vec![
        request(1, boot(false)),
        save(2, false, "x"),
        notice(Notice::Reset),
    ];
    let (log, _) = run(inputs, |builder| {
        builder.reset_waits = 2;
    });
    assert!(log.contains(&"2 State".to_owned()), "{log:?}");
}

#[test]
fn a_stop_ends_a_machine_whose_reset_waits_for_ever() {
    let inputs = vec![request(1, boot(false)), request(2, RESET), request(9, STOP)];
    let (log, record) = run(inputs, |builder| builder.reset_waits = u32::MAX);
    assert_order(&log, &["reset waits", "2 State", "halt"]);
    assert_eq!(record.kind(), ExitKind::Stopped);
}

#[test]
fn reset_drops_notices_of_the_old_guest_and_keeps_requests() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            Input::Notice(Notice::Reset),
            request(2, STOP),
        ],
        |_| (),
    );
    assert_eq!(log[3..6], ["reset", "guest reset 1", "start"]);
    assert!(log.contains(&"ended Stopped".to_owned()), "{log:?}");
}

#[test]
fn requested_reset_is_answered_when_the_machine_runs() {
    let (log, record) = run(
        vec![
            request(1, boot(false)),
            Input::Notice(Notice::GuestPanicked(None)),
            request(2, RESET),
            request(3, PAUSE),
            request(4, RESET),
            request(5, STOP),
        ],
        |_| (),
    );
    let from = log.iter().position(|line| line == "reset").unwrap();
    // The state is published again, without the panic.
    let expected = ["reset", "is Running", "start", "2 ok Running web"];
    assert_eq!(log[from..from + expected.len()], expected);
    assert!(
        log.contains(&"4 State".to_owned()),
        "a paused one is not: {log:?}"
    );
    assert!(!log.iter().any(|line| line.starts_with("guest reset")), "{log:?}");
    assert_eq!(record.kind(), ExitKind::Stopped, "the panic is over");
}

#[test]
fn triple_fault_resets_and_is_counted_apart() {
    for on_crash in [OnCrash::Unspecified, OnCrash::Restart] {
        let (log, record) = run(
            vec![
                request(1, boot_with(on_crash, false)),
                triple_fault(),
                Input::Notice(Notice::Reset),
                request(2, STOP),
            ],
            |_| (),
        );
        assert_eq!(
            log[3..6],
            ["reset", "crash reset 1: vCPU 0: triple fault", "start"],
            "{log:?}"
        );
        assert!(!log.contains(&"guest reset 2".to_owned()), "{log:?}");
        assert_eq!(record.kind(), ExitKind::Stopped);
    }
}

#[test]
fn each_turn_of_a_crash_loop_is_counted() {
    const TURNS: usize = 100;
    let (sender, receiver) = channel();
    let log = Log::default();
    let builder = TestBuilder::new(&log, &sender);
    let (notifier, audience) = (Notifier::new(sender.clone()), log.clone());
    // A driver stays on the thread that made it.
    let thread = std::thread::spawn(move || Driver::new(receiver, notifier, audience, builder).run(|_| ()));
    let starts = |log: &Log| {
        let lines = log.0.lock().unwrap();
        lines.iter().filter(|line| *line == "start").count()
    };
    sender.send(request(1, boot(false))).unwrap();
    for turn in 1..=TURNS {
        // A crash that is reported during a reset would belong to that reset.
        while starts(&log) < turn {
            std::thread::yield_now();
        }
        sender.send(triple_fault()).unwrap();
    }
    while starts(&log) <= TURNS {
        std::thread::yield_now();
    }
    sender.send(request(2, STOP)).unwrap();
    assert_eq!(thread.join().unwrap().kind(), ExitKind::Stopped);
    let last = format!("crash reset {TURNS}: vCPU 0: triple fault");
    assert!(log.take().contains(&last));
}
