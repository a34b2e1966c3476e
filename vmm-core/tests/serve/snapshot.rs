//! Snapshots between processes that are held in as in production.

use std::{fs::File, os::unix::fs::FileExt};

use vmm_protocol::vmm::{
    ErrorKind, ExitKind, Pause, PauseReason, Release, Resume, Save, SaveReply, State, event,
};

use super::*;
use crate::guest::{ECHO, PRINT_HI, program};

pub fn echoing() -> Vec<u8> {
    program(&[PRINT_HI, ECHO].concat())
}

fn saved(answer: Answer) -> SaveReply {
    match answer {
        Answer::Saved(reply) => reply,
        other => panic!("{other:?}"),
    }
}

/// Whether the guest echoes typed input.
pub fn echoes(vmm: &Vmm) -> bool {
    let mut console = vmm.console();
    let replay = u64::from_le_bytes(console.read(8).try_into().unwrap());
    console.read(usize::try_from(replay).unwrap());
    console.write(b"x");
    console.read(1) == b"x"
}

/// A process whose guest has printed, and its client.
pub fn running() -> (Vmm, Client) {
    let vmm = Vmm::start();
    let mut client = vmm.client();
    boot(&mut client, &echoing());
    vmm.wait_for_serial("hi");
    (vmm, client)
}

#[test]
fn saved_guest_resumes_in_other_processes() {
    let (first, mut client) = running();
    for paused in [false, true] {
        let file = tempfile::tempfile().unwrap();
        let reply = saved(client.save(&file, paused));
        assert_eq!(reply.file_bytes, file.metadata().unwrap().len());
        assert!(reply.memory_bytes > 0 && reply.pause_ns > 0 && reply.pause_ns <= reply.total_ns);
        assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
        assert!(echoes(&first));
        let read_only = File::open(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&file)
        ));
        let read_only = read_only.unwrap();
        for on_demand in [false, true] {
            let other = Vmm::start();
            let mut client = other.client();
            assert_eq!(
                state(&client.restore(&echoing(), &read_only, on_demand)),
                State::Running
            );
            assert!(echoes(&other));
            assert_eq!(other.serial_log(), "x", "it did not begin anew");
            client.ask(Op::Stop(Stop {}));
        }
    }
}

#[test]
fn pause_for_a_snapshot_has_its_reason() {
    let (_first, mut client) = running();
    let file = tempfile::tempfile().unwrap();
    saved(client.save(&file, true));
    let reason = |wanted: State| {
        move |kind: &event::Kind| match kind {
            event::Kind::StateChanged(changed) => {
                let status = changed.status.as_ref().unwrap();
                (status.state() == wanted).then(|| status.pause_reason())
            }
            _ => None,
        }
    };
    assert_eq!(
        client.wait_for_event(reason(State::Paused)),
        PauseReason::Snapshot
    );
    assert_eq!(state(&client.ask(Op::Pause(Pause {}))), State::Paused);
    assert_eq!(saved(client.save(&file, false)).pause_ns, 0);
    assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Paused);
    assert_eq!(state(&client.ask(Op::Resume(Resume {}))), State::Running);
}

#[test]
fn snapshot_of_disks_alone_pauses_until_a_release() {
    let (first, mut client) = running();
    let mut other = first.client();
    for (number, give_up) in [(7, false), (8, true)] {
        let save = Save {
            number,
            disks_alone: true,
            ..Save::default()
        };
        client.send(Op::Save(save), &[]);
        client.wait_for_event(|kind| match kind {
            event::Kind::DisksQuiet(quiet) => (quiet.number == number).then_some(()),
            _ => None,
        });
        let Answer::Status(status) = other.ask(Op::GetStatus(GetStatus {})) else {
            panic!("no state");
        };
        assert_eq!(status.pause_reason(), PauseReason::Snapshot);
        other.ask(Op::Release(Release { give_up }));
        match client.answer() {
            Answer::Saved(reply) if !give_up => {
                assert_eq!((reply.file_bytes, reply.memory_bytes), (0, 0));
                assert!(reply.pause_ns > 0);
            }
            Answer::Error(_) if give_up => {}
            unexpected => panic!("{unexpected:?}"),
        }
        assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
        assert!(echoes(&first));
    }
}

#[test]
fn damaged_snapshot_ends_the_start_with_its_place() {
    let (_first, mut client) = running();
    let file = tempfile::tempfile().unwrap();
    let reply = saved(client.save(&file, false));
    let mut byte = [0];
    file.read_exact_at(&mut byte, reply.file_bytes - 1).unwrap();
    file.write_all_at(&[!byte[0]], reply.file_bytes - 1).unwrap();
    let refused = || {
        let mut vmm = Vmm::start();
        let Answer::Error(error) = vmm.client().restore(&echoing(), &file, false) else {
            panic!("it is taken")
        };
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(vmm.wait().code(), Some(1));
        assert_eq!(vmm.exit_record().kind(), ExitKind::StartFailed);
        error.message
    };
    let message = refused();
    assert!(message.contains("damaged in its section"), "{message}");
    file.set_len(reply.file_bytes / 2).unwrap();
    let message = refused();
    assert!(message.contains("was written with"), "{message}");
}

#[test]
fn a_file_that_can_not_be_written_leaves_the_machine_running() {
    let (first, mut client) = running();
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let read_only = File::open("/dev/null").unwrap();
    for file in [&full, &read_only] {
        assert!(matches!(client.save(file, true), Answer::Error(_)));
        assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
        assert!(echoes(&first));
    }
}
