//! Snapshots: pauses of the machine for a snapshot, and when the machine continues.

use vmm_protocol::vmm::MigrationPolicy;

use super::{
    disks::{attach, detach},
    *,
};

pub(super) fn save(id: u64, paused: bool, description: &str) -> Input {
    save_with(id, (paused, false), description)
}

/// A request with a file.
fn with_file(id: u64, op: Op) -> Input {
    let fds = vec![tempfile::tempfile().unwrap().into()];
    request(id, super::Request { op, fds })
}

pub(super) fn save_with(id: u64, (paused, keep_paused): (bool, bool), description: &str) -> Input {
    let save = Save {
        paused,
        description: description.into(),
        keep_paused,
        number: NUMBER,
        ..Save::default()
    };
    with_file(id, Op::Save(save))
}

/// The log between the answer to the boot and the stop.
pub(super) fn log_of(inputs: Vec<Input>, change: impl FnOnce(&mut TestBuilder)) -> Vec<String> {
    let (log, _) = run(inputs, change);
    let end = log.iter().position(|line| line == "halt").unwrap();
    let begin = log.iter().position(|line| line.starts_with("1 ok")).unwrap();
    log[begin + 1..end].to_vec()
}

#[test]
fn running_machine_is_paused_silently_for_its_state() {
    let log = log_of(vec![request(1, boot(false)), save(2, false, "x")], |_| ());
    assert_eq!(
        log,
        [
            "begin snapshot, runs: true",
            "pause",
            "complete snapshot x",
            "resume",
            "end snapshot",
            "2 saved 7"
        ]
    );
}

#[test]
fn many_changed_pages_keep_the_machine_paused_until_the_end() {
    let log = log_of(vec![request(1, boot(false)), save(2, false, "late")], |_| ());
    assert_eq!(
        log,
        [
            "begin snapshot, runs: true",
            "pause",
            "complete snapshot late",
            "is Paused for a snapshot",
            "end snapshot",
            "resume",
            "is Running",
            "2 saved 7"
        ]
    );
}

#[test]
fn paused_save_pauses_until_memory_is_written() {
    let inputs = vec![
        request(1, boot(false)),
        save(2, true, "x"),
        request(3, RESUME),
        save(4, true, "y"),
    ];
    assert_eq!(
        log_of(inputs, |_| ()),
        [
            "pause",
            "begin snapshot, runs: false",
            "is Paused for a snapshot",
            "3 State",
            "4 State",
            "complete snapshot x",
            "resume",
            "is Running",
            "end snapshot",
            "2 saved 7"
        ]
    );
}

#[test]
fn machine_that_a_client_paused_stays_paused() {
    let before = vec![request(1, boot(true)), save(2, false, "x")];
    assert_eq!(
        log_of(before, |_| ()),
        [
            "begin snapshot, runs: false",
            "complete snapshot x",
            "end snapshot",
            "2 saved 7"
        ]
    );
    let meanwhile = vec![request(1, boot(false)), save(2, true, "x"), request(3, PAUSE)];
    assert_eq!(
        log_of(meanwhile, |_| ())[2..],
        [
            "is Paused for a snapshot",
            "is Paused",
            "3 ok Paused web",
            "complete snapshot x",
            "end snapshot",
            "2 saved 7"
        ]
    );
}

#[test]
fn keep_paused_pauses_until_the_disks_are_copied() {
    let kept = |description, paused| {
        let inputs = vec![request(1, boot(false)), save_with(2, (paused, true), description)];
        log_of(inputs, |_| ())
    };
    let begin = |description| {
        [
            "begin snapshot, runs: true".to_owned(),
            "pause".to_owned(),
            format!("complete snapshot {description}"),
            "is Paused for a snapshot".to_owned(),
            "commit disks".to_owned(),
            "disks quiet".to_owned(),
        ]
    };
    // The thread writes memory on behind the resumed machine.
    let log = kept("copied first", false);
    assert_eq!(log[..6], begin("copied first"));
    assert_eq!(
        log[6..],
        [
            "resume",
            "is Running",
            "8 ok Running web",
            "end snapshot",
            "2 saved 7"
        ]
    );
    let log = kept("late, copied first", false);
    assert_eq!(log[..6], begin("late, copied first"));
    assert_eq!(
        log[6..],
        [
            "8 ok Paused web",
            "end snapshot",
            "resume",
            "is Running",
            "2 saved 7"
        ]
    );
    // Memory is written, and the disks are not copied yet.
    let log = kept("written first", false);
    assert_eq!(log[..6], begin("written first"));
    assert_eq!(
        log[6..],
        [
            "end snapshot",
            "resume",
            "is Running",
            "2 saved 7",
            "8 ok Running web"
        ]
    );
    assert_eq!(
        kept("written first", true),
        [
            "pause",
            "begin snapshot, runs: false",
            "is Paused for a snapshot",
            "commit disks",
            "disks quiet",
            "complete snapshot written first",
            "end snapshot",
            "resume",
            "is Running",
            "2 saved 7",
            "8 ok Running web"
        ]
    );
}

pub(super) fn disks_alone(id: u64) -> Input {
    let save = Save {
        disks_alone: true,
        number: NUMBER,
        ..Save::default()
    };
    request(id, Op::Save(save))
}

#[test]
fn save_of_disks_alone_pauses_until_release_without_a_file() {
    let release = |give_up| release(8, give_up);
    let stop = || request(9, STOP);
    let resize = |id| {
        let (name, capacity_bytes) = ("data".into(), 4096);
        request(id, Op::ResizeDisk(ResizeDisk { name, capacity_bytes }))
    };
    let quiet = ["pause", "is Paused for a snapshot", "commit disks", "disks quiet"];
    let copied = vec![
        request(1, boot(false)),
        disks_alone(2),
        save(3, false, "x"),
        request(4, RESUME),
        resize(5),
        release(false),
        resize(6),
        stop(),
    ];
    let log = log_of(copied, |_| ());
    assert_eq!(log[..4], quiet);
    assert_eq!(
        log[4..],
        [
            "3 State",
            "4 State",
            "5 State",
            "resume",
            "is Running",
            "2 saved 0",
            "8 ok Running web",
            "ResizeDisk(ResizeDisk { name: \"data\", capacity_bytes: 4096 })",
            "6 ok Running web"
        ]
    );
    let given_up = vec![request(1, boot(false)), disks_alone(2), release(true), stop()];
    let log = log_of(given_up, |_| ());
    assert_eq!(log[..4], quiet);
    assert_eq!(log[4..], ["resume", "is Running", "2 State", "8 ok Running web"]);
    // A machine that was paused before stays paused.
    let paused = vec![request(1, boot(true)), disks_alone(2), release(false), stop()];
    assert_eq!(
        log_of(paused, |_| ()),
        ["commit disks", "disks quiet", "2 saved 0", "8 ok Paused web"]
    );
    let meanwhile = vec![
        request(1, boot(false)),
        disks_alone(2),
        request(3, PAUSE),
        release(false),
        stop(),
    ];
    assert_eq!(
        log_of(meanwhile, |_| ())[4..],
        ["is Paused", "3 ok Paused web", "2 saved 0", "8 ok Paused web"]
    );
}

#[test]
fn failed_commit_of_disks_fails_the_save_and_resumes() {
    let inputs = || vec![request(1, boot(false)), disks_alone(2), request(9, STOP)];
    let log = log_of(inputs(), |builder| builder.commit_fails = true);
    let going_on = log.iter().position(|line| line == "resume").unwrap();
    assert_eq!(log[..3], ["pause", "is Paused for a snapshot", "commit disks"]);
    assert_eq!(
        log[going_on..going_on + 3],
        ["resume", "is Running", "2 Resources"]
    );
    assert!(!log.contains(&"disks quiet".to_owned()));
    let log = log_of(inputs(), |builder| builder.pause_fails = true);
    assert_eq!(log.last().unwrap(), "2 Internal");
}

#[test]
fn release_without_a_paused_save_is_refused() {
    let log = log_of(
        vec![request(1, boot(false)), release(3, false), save(2, false, "x")],
        |_| (),
    );
    assert_eq!(log[0], "3 State");
}

#[test]
fn save_cancelled_in_any_stage_fails_and_resumes() {
    let give_up = || release(3, true);
    let while_it_runs = vec![request(1, boot(false)), save(2, false, "x"), give_up()];
    assert_eq!(
        log_of(while_it_runs, |_| ()),
        [
            "begin snapshot, runs: true",
            "give up snapshot",
            "3 ok Running web",
            "end snapshot",
            "2 State"
        ]
    );
    for keep_paused in [false, true] {
        let while_paused = vec![
            request(1, boot(false)),
            save_with(2, (true, keep_paused), "x"),
            give_up(),
        ];
        let log = log_of(while_paused, |_| ());
        assert_eq!(
            log[log.len() - 6..],
            [
                "give up snapshot",
                "3 ok Paused web",
                "end snapshot",
                "resume",
                "is Running",
                "2 State"
            ]
        );
    }
    let written = vec![
        request(1, boot(false)),
        save_with(2, (false, true), "written first, given up"),
    ];
    assert_eq!(
        log_of(written, |_| ())[5..],
        [
            "disks quiet",
            "end snapshot",
            "resume",
            "is Running",
            "2 State",
            "8 ok Running web"
        ]
    );
}

#[test]
fn cancel_without_a_save_is_refused() {
    let give_up = || release(3, true);
    let log = log_of(vec![request(1, boot(false)), send(2, 100), give_up()], |_| ());
    assert_eq!(log[1], "3 State");
    let log = log_of(
        vec![request(1, boot(false)), give_up(), save(2, false, "x")],
        |_| (),
    );
    assert_eq!(log[0], "3 State");
}

#[test]
fn a_snapshot_that_fails_leaves_the_machine_running() {
    let log = log_of(vec![request(1, boot(false)), save(2, false, "none")], |_| ());
    assert_eq!(
        log,
        [
            "begin snapshot, runs: true",
            "pause",
            "complete snapshot none",
            "give up snapshot",
            "resume",
            "end snapshot",
            "2 Internal"
        ]
    );
    let log = log_of(vec![request(1, boot(false)), save(2, false, "x")], |builder| {
        builder.pause_fails = true;
    });
    assert_eq!(
        log,
        [
            "begin snapshot, runs: true",
            "pause",
            "give up snapshot",
            "end snapshot",
            "2 Internal"
        ]
    );
}

#[test]
fn a_machine_that_ends_answers_who_waits_for_a_snapshot() {
    let inputs = vec![
        request(1, boot(false)),
        save(2, false, "x"),
        Input::Notice(Notice::PowerOff),
    ];
    let (log, _) = run(inputs, |_| ());
    assert!(log.contains(&"2 State".to_owned()), "{log:?}");
}

#[test]
fn boot_from_a_snapshot_resumes_the_machine() {
    let restored = |paused| {
        let Op::Boot(mut boot) = boot(paused) else {
            unreachable!()
        };
        boot.restore = Some(Restore::default());
        let (log, _) = run(vec![request(1, Op::Boot(boot)), request(2, STOP)], |_| ());
        log[..3].to_vec()
    };
    assert_eq!(restored(false), ["restore", "resume", "is Running"]);
    assert_eq!(restored(true), ["restore", "is Paused", "1 ok Paused web"]);
}

pub(super) fn send(id: u64, downtime_ms: u64) -> Input {
    let send = Send {
        downtime_ms,
        disks: vec!["data".into()],
        ..Send::default()
    };
    with_file(id, Op::Send(send))
}

#[test]
fn vcpus_are_throttled_as_a_round_says() {
    let send = Send {
        downtime_ms: 1000,
        policy: MigrationPolicy::PreferForced.into(),
        ..Send::default()
    };
    let send = with_file(2, Op::Send(send));
    let log = log_of(vec![request(1, boot(false)), send], |_| ());
    assert_eq!(log[1..4], ["round 0, 9 sent", "throttle 20", "pause"]);
}

#[test]
fn a_machine_that_was_sent_stays_paused() {
    let log = log_of(vec![request(1, boot(false)), send(2, 100)], |_| ());
    assert_eq!(
        log,
        [
            "begin migration, disks: [\"data\"]",
            "disks 3 of 8",
            "round 0, 9 sent",
            "pause",
            "complete snapshot ",
            "is Paused for a migration",
            "end snapshot",
            "2 sent 7"
        ]
    );
}

#[test]
fn a_machine_that_could_not_be_sent_goes_on() {
    let log = log_of(vec![request(1, boot(false)), send(2, 0)], |_| ());
    assert_eq!(
        log[4..],
        [
            "complete snapshot ",
            "is Paused for a migration",
            "end snapshot",
            "resume",
            "is Running",
            "2 Internal"
        ]
    );
}

#[test]
fn pause_fails_a_send_and_a_send_refuses_other_captures() {
    let inputs = vec![
        request(1, boot(false)),
        send(2, 100),
        save(3, false, "x"),
        send(4, 100),
        request(5, PAUSE),
    ];
    let log = log_of(inputs, |_| ());
    assert_eq!(
        log,
        [
            "begin migration, disks: [\"data\"]",
            "3 State",
            "4 State",
            "pause",
            "is Paused",
            "5 ok Paused web",
            "disks 3 of 8",
            "round 0, 9 sent",
            "give up snapshot",
            "end snapshot",
            "2 State"
        ]
    );
}

#[test]
fn no_capture_begins_while_a_device_comes_or_goes() {
    let inputs = vec![
        request(1, boot(false)),
        request(2, attach("slow")),
        save(3, false, "x"),
        send(4, 100),
        disks_alone(5),
        request(9, STOP),
    ];
    let log = log_of(inputs, |_| ());
    assert_eq!(log[..4], ["attach slow", "3 State", "4 State", "5 State"]);
}

#[test]
fn no_device_comes_or_goes_while_the_machine_is_saved_or_sent() {
    let changes = [
        attach("data"),
        Op::AttachNic(AttachNic::default()),
        Op::AttachShare(AttachShare::default()),
        detach("data", false),
        Op::DetachNic(DetachNic::default()),
        Op::DetachShare(DetachShare::default()),
    ];
    for change in changes {
        let log = log_of(
            vec![request(1, boot(false)), save(2, false, "x"), request(3, change)],
            |_| (),
        );
        assert_eq!(log[1], "3 State");
    }
    let log = log_of(
        vec![
            request(1, boot(false)),
            send(2, 100),
            request(3, detach("data", true)),
        ],
        |_| (),
    );
    assert_eq!(log[1], "3 State");
}

#[test]
fn state_of_a_panicked_guest_has_the_mark_until_a_reset() {
    let saved = |notices: Vec<Notice>| {
        let mut inputs = vec![request(1, boot(false))];
        inputs.extend(notices.into_iter().map(Input::Notice));
        inputs.push(save(2, true, "x"));
        let log = log_of(inputs, |_| ());
        log.into_iter().find(|line| line.starts_with("complete snapshot"))
    };
    let mark = "complete snapshot x of a panicked guest";
    assert_eq!(saved(vec![Notice::GuestPanicked(None)]).as_deref(), Some(mark));
    let reset = vec![Notice::GuestPanicked(None), Notice::Reset];
    assert_eq!(saved(reset).as_deref(), Some("complete snapshot x"));
}
