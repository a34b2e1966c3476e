//! A machine goes from one process to another, both held in as in production.

use std::{io::Read, os::unix::net::UnixStream};

use proto::vmm::PauseReason;

use super::{
    snapshot::{echoes, echoing, running},
    *,
};

#[test]
fn a_guest_goes_on_in_the_process_that_received_it() {
    let (_first, mut client) = running();
    let (near, far) = UnixStream::pair().unwrap();
    let second = Vmm::start();
    let mut other = second.client();
    other.begin_receive(&echoing(), &far);
    client.begin_send(&near, 1000);
    drop((near, far));
    let sent = match client.answer() {
        Answer::Sent(sent) => sent,
        other => panic!("{other:?}"),
    };
    assert!(
        sent.memory_bytes > 0 && sent.sent_bytes > sent.memory_bytes,
        "{sent:?}"
    );
    assert!(sent.pause_ns > 0 && sent.pause_ns < sent.total_ns, "{sent:?}");
    let round = client.wait_for_event(|kind| match kind {
        event::Kind::MigrationRound(round) => Some(*round),
        _ => None,
    });
    assert!(
        round.number == 0 && round.sent_bytes <= sent.memory_bytes,
        "{round:?}"
    );
    assert_eq!(state(&other.answer()), State::Paused);
    match client.ask(Op::GetStatus(GetStatus {})) {
        Answer::Status(status) => {
            assert_eq!(status.state(), State::Paused);
            assert_eq!(status.pause_reason(), PauseReason::Migration);
        }
        other => panic!("{other:?}"),
    }
    client.ask(Op::Stop(Stop {}));
    assert_eq!(state(&other.ask(Op::Resume(Resume {}))), State::Running);
    assert!(echoes(&second));
    assert_eq!(second.serial_log(), "x", "it did not begin anew");
}

#[test]
fn a_guest_whose_target_vanishes_goes_on_where_it_is() {
    let (first, mut client) = running();
    let (near, mut far) = UnixStream::pair().unwrap();
    client.begin_send(&near, 1000);
    drop(near);
    far.read_exact(&mut [0; 100]).unwrap();
    drop(far);
    assert!(matches!(client.answer(), Answer::Error(_)));
    assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);
    assert!(echoes(&first));
}

#[test]
fn what_no_vmm_sends_ends_the_start() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut second = Vmm::start();
    let mut other = second.client();
    other.begin_receive(&echoing(), &far);
    drop(far);
    std::io::Write::write_all(&mut &near, b"vmmdmigr\x01\0\0\0\x09\0\0\0\0\0\0\0\0\0\0\0").unwrap();
    drop(near);
    let Answer::Error(error) = other.answer() else {
        panic!("it is taken")
    };
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.message.contains("no frame of its kind"),
        "{}",
        error.message
    );
    assert_eq!(second.wait().code(), Some(1));
    assert_eq!(second.exit_record().kind(), ExitKind::StartFailed);
}
