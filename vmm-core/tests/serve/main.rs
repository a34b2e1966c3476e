//! `vmm serve` as the daemon sees it: a process of its own user, driven over its control socket, with tiny guests on
//! the machine's own KVM; and `vmm run`. Needs /dev/kvm and root (to start the process under another user).

mod disks;
mod failed_memory;
mod firmware;
mod guest;
mod migration;
mod process;
mod run;
mod sandbox;
mod snapshot;
mod vsock;

use std::{io::Write, os::unix::process::ExitStatusExt};

use rstest::rstest;
use vmm_protocol::vmm::{
    Boot, ErrorKind, ExitKind, GetStatus, Hello, InjectNmi, MachineSpec, OnCrash, Pause, PowerButton, Resume,
    State, Stop, event, request::Op, response::Result as Answer,
};

use process::{Client, Vmm};

fn boot(client: &mut Client, guest: &[u8]) {
    let answer = client.boot(guest, &Boot::default());
    assert!(
        matches!(&answer, Answer::Status(status) if status.state() == State::Running),
        "{answer:?}"
    );
}

/// A process whose guest runs these pieces of code.
fn booted(code: &[&[u8]]) -> (Vmm, Client) {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    boot(&mut client, &guest::program(&code.concat()));
    (vmm, client)
}

fn state(answer: &Answer) -> State {
    match answer {
        Answer::Status(status) => status.state(),
        other => panic!("{other:?}"),
    }
}

fn kind(answer: &Answer) -> ErrorKind {
    match answer {
        Answer::Error(error) => error.kind(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_guest_prints_and_powers_off_and_the_record_says_so() {
    let (mut vmm, mut client) = booted(&[guest::PRINT_HI, guest::POWER_OFF]);
    let ended = client.wait_for_end();
    assert_eq!(ended.kind(), ExitKind::PowerOff);
    assert_eq!(vmm.wait().code(), Some(0));
    assert_eq!(vmm.exit_record().kind(), ExitKind::PowerOff);
    assert_eq!(vmm.serial_log(), "hi");
    assert!(vmm.lock_is_free());
}

#[test]
fn full_serial_log_becomes_the_older_one() {
    let mut vmm = Vmm::start();
    vmm.fill_serial_log((1 << 20) - 1);
    let mut client = vmm.client();
    boot(
        &mut client,
        &guest::program(&[guest::PRINT_HI, guest::POWER_OFF].concat()),
    );
    assert_eq!(client.wait_for_end().kind(), ExitKind::PowerOff);
    vmm.wait();
    assert_eq!(vmm.serial_log(), "i");
}

#[test]
fn the_console_replays_what_was_printed_and_takes_input() {
    let (vmm, mut client) = booted(&[guest::PRINT_HI, guest::ECHO]);
    vmm.wait_for_serial("hi");
    let mut console = vmm.console();
    assert_eq!(console.read(8), 2_u64.to_le_bytes());
    assert_eq!(console.read(2), b"hi");
    console.write(b"x");
    assert_eq!(console.read(1), b"x");
    client.ask(Op::Stop(Stop {}));
}

#[rstest]
#[case::triple_fault(guest::TRIPLE_FAULT, ExitKind::GuestCrash, 2)]
#[case::power_off_after_panic(&[guest::PANIC, guest::POWER_OFF].concat(), ExitKind::GuestPanic, 2)]
fn ends_of_the_guests_own_making_are_told_apart(
    #[case] code: &[u8],
    #[case] kind: ExitKind,
    #[case] exit: i32,
) {
    let mut vmm = Vmm::start();
    let mut client = vmm.client();
    let stop = Boot {
        machine: Some(MachineSpec {
            on_crash: OnCrash::Stop.into(),
            ..MachineSpec::default()
        }),
        ..Boot::default()
    };
    let answer = client.boot(&guest::program(code), &stop);
    assert_eq!(state(&answer), State::Running);
    assert_eq!(client.wait_for_end().kind(), kind);
    assert_eq!(vmm.wait().code(), Some(exit));
    assert_eq!(vmm.exit_record().kind(), kind);
}

#[test]
fn closed_lifeline_ends_a_running_machine_with_its_record() {
    let (mut vmm, mut end) = Vmm::with_lifeline();
    let mut client = vmm.client();
    boot(
        &mut client,
        &guest::program(&[guest::PRINT_HI, guest::HALT].concat()),
    );
    vmm.wait_for_serial("hi");
    // Bytes in the pipe mean nothing.
    end.write_all(b"x").unwrap();
    assert!(matches!(
        client.ask(Op::GetStatus(GetStatus {})),
        Answer::Status(_)
    ));
    drop(end);
    assert_eq!(vmm.wait().code(), Some(1));
    let record = vmm.exit_record();
    assert_eq!(record.kind(), ExitKind::LifelineClosed);
    assert!(record.message.contains("launcher"), "{}", record.message);
}

#[test]
fn a_guest_that_resets_goes_on_in_the_same_process() {
    let (mut vmm, mut client) = booted(&[guest::PRINT_HI, guest::RESET_ONCE, guest::POWER_OFF]);
    let reset = client.wait_for_event(|kind| match kind {
        event::Kind::GuestReset(reset) => Some(reset.guest_resets),
        _ => None,
    });
    assert_eq!(reset, 1);
    assert_eq!(client.wait_for_end().kind(), ExitKind::PowerOff);
    assert_eq!(vmm.wait().code(), Some(0));
    assert_eq!(vmm.serial_log(), "hihi");
}

#[test]
fn a_guest_that_crashes_starts_anew_in_the_same_process() {
    let (mut vmm, mut client) = booted(&[guest::PRINT_HI, guest::TRIPLE_FAULT]);
    for turn in 1..=3 {
        let message = client.wait_for_event(|kind| match kind {
            event::Kind::CrashReset(reset) if reset.crash_resets == turn => Some(reset.message.clone()),
            _ => None,
        });
        assert_eq!(message, "vCPU 0: triple fault");
    }
    client.ask(Op::Stop(Stop {}));
    vmm.wait();
    assert_eq!(vmm.exit_record().kind(), ExitKind::Stopped);
    assert!(vmm.serial_log().starts_with("hihihi"));
}

#[test]
fn panicked_guest_runs_on_and_ends_as_panic() {
    let (mut vmm, mut client) = booted(&[guest::PANIC, guest::HALT]);
    client.wait_for_event(|kind| matches!(kind, event::Kind::GuestPanicked(_)).then_some(()));
    assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
    assert_eq!(state(&client.ask(Op::Stop(Stop {}))), State::Ended);
    vmm.wait();
    assert_eq!(vmm.exit_record().kind(), ExitKind::GuestPanic);
}

#[test]
fn nmi_by_request_reaches_the_guest() {
    let (mut vmm, mut client) = booted(&[guest::AWAIT_NMI]);
    vmm.wait_for_serial("r");
    client.ask(Op::Pause(Pause {}));
    assert_eq!(kind(&client.ask(Op::InjectNmi(InjectNmi {}))), ErrorKind::State);
    client.ask(Op::Resume(Resume {}));
    assert_eq!(state(&client.ask(Op::InjectNmi(InjectNmi {}))), State::Running);
    assert_eq!(client.wait_for_end().kind(), ExitKind::PowerOff);
    assert_eq!(vmm.wait().code(), Some(0));
    assert_eq!(vmm.serial_log(), "rn");
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_was() {
    let (vmm, mut client) = booted(&[guest::PRINT_HI, guest::ECHO]);
    vmm.wait_for_serial("hi");
    assert_eq!(state(&client.ask(Op::Pause(Pause {}))), State::Paused);
    assert_eq!(state(&client.ask(Op::Pause(Pause {}))), State::Paused);
    assert_eq!(
        kind(&client.ask(Op::PowerButton(PowerButton {}))),
        ErrorKind::State
    );
    let mut console = vmm.console();
    console.read(10);
    console.write(b"y");
    assert_eq!(state(&client.ask(Op::Resume(Resume {}))), State::Running);
    assert_eq!(console.read(1), b"y");
    client.ask(Op::Stop(Stop {}));
}

#[test]
fn the_process_outlives_its_daemon_and_serves_the_next_one() {
    let (mut vmm, client) = booted(&[guest::HALT]);
    drop(client);
    let mut next = vmm.client();
    assert_eq!(state(&next.ask(Op::GetStatus(GetStatus {}))), State::Running);
    assert_eq!(
        kind(&next.boot(&guest::program(guest::HALT), &Boot::default())),
        ErrorKind::State
    );
    next.ask(Op::Stop(Stop {}));
    assert_eq!(vmm.wait().code(), Some(0));
    assert_eq!(vmm.exit_record().kind(), ExitKind::Stopped);
}

#[rstest]
#[case::no_kernel(&[b'x'; 4096], "neither a bzImage nor")]
#[case::truncated(&guest::program(guest::HALT)[..100], "truncated")]
fn a_kernel_that_is_none_fails_the_boot_with_the_reason(#[case] file: &[u8], #[case] reason: &str) {
    let mut vmm = Vmm::start();
    let mut client = vmm.client();
    let Answer::Error(error) = client.boot(file, &Boot::default()) else {
        panic!()
    };
    assert_eq!(error.kind(), ErrorKind::Image);
    assert!(error.message.contains(reason), "{}", error.message);
    assert_eq!(vmm.wait().code(), Some(1));
    let record = vmm.exit_record();
    assert_eq!(
        (record.kind(), record.message),
        (ExitKind::StartFailed, error.message)
    );
}

#[test]
fn a_machine_that_is_booted_paused_runs_when_it_is_resumed() {
    let mut vmm = Vmm::start();
    let mut client = vmm.client();
    let paused = Boot {
        paused: true,
        ..Boot::default()
    };
    assert_eq!(
        state(&client.boot(&guest::program(guest::POWER_OFF), &paused)),
        State::Paused
    );
    assert_eq!(state(&client.ask(Op::Resume(Resume {}))), State::Running);
    assert_eq!(client.wait_for_end().kind(), ExitKind::PowerOff);
    assert!(vmm.wait().success());
}

#[test]
fn a_termination_signal_ends_the_run_with_a_record() {
    let (mut vmm, mut client) = booted(&[guest::HALT]);
    vmm.terminate();
    assert_eq!(client.wait_for_end().kind(), ExitKind::Stopped);
    assert_eq!(vmm.wait().signal(), None);
}

#[test]
fn the_process_has_its_own_user_and_no_rights() {
    let (vmm, mut client) = booted(&[guest::HALT]);
    let status = vmm.proc_status();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!(status["NoNewPrivs"], "1");
    assert!(
        status["Uid"]
            .split_whitespace()
            .all(|uid| uid == process::UID.to_string())
    );
    assert!(vmm.thread_names().contains(&"control".to_owned()));
    assert!(vmm.thread_names().contains(&"vcpu-0".to_owned()));
    client.ask(Op::Stop(Stop {}));
}

#[test]
fn it_refuses_to_serve_as_root_or_with_capabilities() {
    for (options, reason) in [
        (&["--reuid=0"][..], "does not run as root"),
        (
            &["--reuid=54321", "--bounding-set=+all"][..],
            "runs without capabilities",
        ),
    ] {
        let message = process::refused(options);
        assert!(
            message.contains(reason) && message.lines().count() == 1,
            "{message}"
        );
    }
}

#[test]
fn hello_is_answered_while_a_boot_is_under_way() {
    let vmm = Vmm::start();
    let mut first = vmm.client();
    first.send_boot(&guest::program(guest::HALT), &Boot::default());
    let mut second = vmm.connect();
    let hello = Op::Hello(Hello {
        major: vmm_protocol::wire::MAJOR,
        minor: 0,
    });
    assert!(matches!(second.ask(hello), Answer::Hello(_)));
    first.ask(Op::Stop(Stop {}));
}
