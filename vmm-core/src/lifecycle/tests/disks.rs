//! Disks that come and go, and requests that are answered later or reach the machine's devices.

use super::*;

pub(super) fn attach(name: &str) -> Op {
    let disk = Disk {
        name: name.into(),
        ..Disk::default()
    };
    Op::AttachDisk(AttachDisk { disk: Some(disk) })
}

pub(super) fn detach(name: &str, force: bool) -> Op {
    let name = name.into();
    Op::DetachDisk(DetachDisk { name, force })
}

#[test]
fn disks_come_and_go_while_running_and_paused() {
    let (log, _) = run(
        vec![
            request(1, attach("early")),
            request(2, boot(false)),
            request(3, attach("data")),
            request(4, PAUSE),
            request(5, attach("more")),
            request(6, detach("data", false)),
            request(7, detach("none", false)),
            request(8, detach("more", true)),
            request(9, STOP),
        ],
        |_| (),
    );
    assert_eq!(log[0], "1 State");
    assert_eq!(
        log[4..15],
        [
            "attach data",
            "3 ok Running web",
            "pause",
            "is Paused",
            "4 ok Paused web",
            "attach more",
            "5 ok Paused web",
            "detach data",
            "6 ok Paused web",
            "detach none",
            "7 NotFound",
        ]
    );
    assert_eq!(
        log[15..18],
        [
            "detach more",
            "disk more detached, forced true",
            "8 ok Paused web"
        ],
        "the event comes before the answer"
    );
}

#[test]
fn slow_image_delays_no_other_request() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(2, attach("slow")),
            request(3, attach("data")),
            request(4, GET_DISK_STATS),
            request(5, PAUSE),
            // The image is open now.
            request(6, RESUME),
            Input::Notice(Notice::ImageOpened),
            request(7, STOP),
        ],
        |_| (),
    );
    assert_eq!(
        log[3..13],
        [
            "attach slow",
            "attach data",
            "3 ok Running web",
            "GetDiskStats(GetDiskStats)",
            "4 stats",
            "pause",
            "is Paused",
            "5 ok Paused web",
            "resume",
            "is Running",
        ]
    );
    assert_eq!(
        log.iter().filter(|line| line.starts_with("2 ")).count(),
        1,
        "{log:?}"
    );
    assert!(log.contains(&"2 ok Running web".to_owned()), "{log:?}");
}

#[test]
fn a_machine_that_ends_answers_what_is_pending() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(2, attach("slow")),
            Input::Notice(Notice::Reset),
            request(3, STOP),
        ],
        |_| (),
    );
    let of = |line: &str| log.iter().position(|found| found == line).unwrap();
    assert!(
        of("reset") < of("2 State") && of("2 State") < of("halt"),
        "{log:?}"
    );
}

#[test]
fn pending_request_is_answered_at_its_deadline() {
    let (sender, receiver) = channel();
    let log = Log::default();
    let builder = TestBuilder::new(&log, &sender);
    let (notifier, audience) = (Notifier::new(sender.clone()), log.clone());
    let thread = std::thread::spawn(move || Driver::new(receiver, notifier, audience, builder).run(|_| ()));
    sender.send(request(1, boot(false))).unwrap();
    sender.send(request(2, detach("slow", true))).unwrap();
    let start = Instant::now();
    while !log.0.lock().unwrap().contains(&"2 ok Running web".to_owned()) {
        assert!(start.elapsed().as_secs() < 20);
        std::thread::yield_now();
    }
    sender.send(request(3, STOP)).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_disk_that_the_guest_ejected_is_told_when_it_is_gone() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::Unplugged),
        Input::Notice(Notice::Unplugged),
        request(2, STOP),
    ];
    let (log, _) = run(inputs, |builder| {
        builder.detached.lock().unwrap().push(Detached {
            what: Pluggable::Disk,
            name: "data".into(),
            forced: false,
        });
    });
    let told = log
        .iter()
        .filter(|line| *line == "disk data detached, forced false");
    assert_eq!(told.count(), 1, "{log:?}");
}

#[test]
fn disks_that_go_with_a_reset_are_told_after_it() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::Reset),
        request(2, STOP),
    ];
    let (log, _) = run(inputs, |builder| {
        builder.detached.lock().unwrap().push(Detached {
            what: Pluggable::Disk,
            name: "data".into(),
            forced: false,
        });
    });
    assert_eq!(
        log[3..7],
        [
            "reset",
            "guest reset 1",
            "disk data detached, forced false",
            "start"
        ]
    );
}

#[test]
fn nics_and_shares_come_and_go_as_disks_do() {
    let name = || "lan".to_owned();
    let nic = Nic {
        name: name(),
        ..Nic::default()
    };
    let share = Share {
        name: name(),
        ..Share::default()
    };
    let no_nic = |force| Op::DetachNic(DetachNic { name: name(), force });
    let no_share = |force| Op::DetachShare(DetachShare { name: name(), force });
    let nic = || {
        Op::AttachNic(AttachNic {
            nic: Some(nic.clone()),
        })
    };
    let share = || {
        Op::AttachShare(AttachShare {
            share: Some(share.clone()),
        })
    };
    let rows = [
        ("nic", nic(), nic(), [no_nic(false), no_nic(true)]),
        ("share", share(), share(), [no_share(false), no_share(true)]),
    ];
    for (what, early, attach, [ask, take]) in rows {
        let (log, _) = run(
            vec![
                request(1, early),
                request(2, boot(false)),
                request(3, attach),
                request(4, ask),
                request(5, take),
                request(6, STOP),
            ],
            |_| (),
        );
        assert_eq!(log[0], "1 State");
        let [attached, asked, taken] = [4, 6, 8].map(|index| log[index].starts_with(['A', 'D']));
        assert!(attached && asked && taken, "{log:?}");
        assert_eq!([&log[5], &log[7]], ["3 ok Running web", "4 ok Running web"]);
        assert_eq!(
            log[9..11],
            [
                format!("{what} lan detached, forced true"),
                "5 ok Running web".into()
            ]
        );
    }
}
