//! Disks that come and go, and requests that are answered later or reach the machine's devices.

use super::*;

fn attach(name: &str) -> Request {
    Request::AttachDisk {
        disk: Box::new(Disk {
            name: name.into(),
            ..Disk::default()
        }),
        fds: Vec::new(),
    }
}

fn detach(name: &str, force: bool) -> Request {
    Request::DetachDisk {
        name: name.into(),
        force,
    }
}

#[test]
fn disks_come_and_go_while_the_guest_runs_and_while_it_is_paused() {
    let (log, _) = run(
        vec![
            request(1, attach("early")),
            request(2, boot(false)),
            request(3, attach("data")),
            request(4, Request::Pause),
            request(5, attach("more")),
            request(6, detach("data", false)),
            request(7, detach("none", false)),
            request(8, detach("more", true)),
            request(9, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(log[0], "1 State");
    assert_eq!(
        log[4..15],
        [
            "attach data 0",
            "3 ok Running web",
            "pause",
            "is Paused",
            "4 ok Paused web",
            "attach more 0",
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
fn an_image_that_is_slow_to_open_holds_up_nothing_and_is_answered_when_it_is_attached() {
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(2, attach("slow")),
            request(3, attach("data")),
            request(4, Request::GetDiskStats),
            request(5, Request::Pause),
            // The image is open now.
            request(6, Request::Resume),
            Input::Notice(Notice::ImageOpened),
            request(7, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(
        log[3..12],
        [
            "attach slow 0",
            "attach data 0",
            "3 ok Running web",
            "4 stats of data",
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
            request(3, Request::Stop),
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
fn a_request_that_is_pending_is_answered_at_its_deadline_without_a_notice() {
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
    sender.send(request(3, Request::Stop)).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_disk_that_the_guest_ejected_is_told_when_it_is_gone() {
    let inputs = vec![
        request(1, boot(false)),
        Input::Notice(Notice::Unplugged),
        Input::Notice(Notice::Unplugged),
        request(2, Request::Stop),
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
        request(2, Request::Stop),
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
fn sizes_limits_and_counters_reach_the_machine() {
    let limit = RateLimit {
        operations_per_second: 100,
        ..RateLimit::default()
    };
    let (log, _) = run(
        vec![
            request(1, boot(false)),
            request(
                2,
                Request::ResizeDisk {
                    name: "data".into(),
                    capacity: Some(4096),
                },
            ),
            request(
                3,
                Request::SetRateLimit {
                    target: LimitTarget::Group("slow".into()),
                    limit,
                },
            ),
            request(4, Request::GetDiskStats),
            request(6, Request::GetMachineStats),
            request(7, Request::SetBalloon(1 << 20)),
            request(5, Request::Stop),
        ],
        |_| (),
    );
    assert_eq!(
        log[3..11],
        [
            "resize data Some(4096)",
            "2 ok Running web",
            "limit Group(\"slow\") 100",
            "3 ok Running web",
            "4 stats of data",
            "6 all stats of data",
            "balloon 1048576",
            "7 ok Running web",
        ]
    );
}

#[test]
fn nics_and_shares_come_and_go_as_disks_do_and_their_end_is_told() {
    let nic = |name: &str| Request::AttachNic {
        nic: Box::new(Nic {
            name: name.into(),
            ..Nic::default()
        }),
        fds: Vec::new(),
    };
    let share = |name: &str| Request::AttachShare {
        share: Box::new(Share {
            name: name.into(),
            ..Share::default()
        }),
        fds: Vec::new(),
    };
    let no_nic = |force| Request::DetachNic {
        name: "lan".into(),
        force,
    };
    let no_share = |force| Request::DetachShare {
        name: "lan".into(),
        force,
    };
    let rows = [
        ("nic", nic("early"), nic("lan"), [no_nic(false), no_nic(true)]),
        (
            "share",
            share("early"),
            share("lan"),
            [no_share(false), no_share(true)],
        ),
    ];
    for (what, early, attach, [ask, take]) in rows {
        let (log, _) = run(
            vec![
                request(1, early),
                request(2, boot(false)),
                request(3, attach),
                request(4, ask),
                request(5, take),
                request(6, Request::Stop),
            ],
            |_| (),
        );
        assert_eq!(log[0], "1 State");
        assert_eq!(
            log[4..11],
            [
                format!("attach {what} lan"),
                "3 ok Running web".into(),
                format!("detach {what} lan"),
                "4 ok Running web".into(),
                format!("detach {what} lan"),
                format!("{what} lan detached, forced true"),
                "5 ok Running web".into(),
            ]
        );
    }
}
