//! A machine goes from one process to another, both held in as in production.

use std::os::{
    fd::AsFd,
    unix::{
        fs::{FileExt, MetadataExt},
        net::UnixStream,
    },
};

use vmm_protocol::vmm::{PauseReason, ResetMachine, Send, UnlockDisks};

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
fn a_reset_boots_the_kernel_that_came_with_the_machine() {
    let (_first, mut client) = running();
    let (near, far) = UnixStream::pair().unwrap();
    let second = Vmm::start();
    let mut other = second.client();
    other.begin_receive_boot(&far);
    near.set_write_timeout(Some(std::time::Duration::from_millis(100)))
        .unwrap();
    let send = Send {
        downtime_ms: 1000,
        boot_files: true,
        ..Send::default()
    };
    client.send(Op::Send(send), &[near.as_fd()]);
    drop((near, far));
    assert!(matches!(client.answer(), Answer::Sent(_)));
    assert_eq!(state(&other.answer()), State::Paused);
    client.ask(Op::Stop(Stop {}));
    assert_eq!(state(&other.ask(Op::Resume(Resume {}))), State::Running);
    assert!(echoes(&second));
    other.ask(Op::ResetMachine(ResetMachine {}));
    second.wait_for_serial("xhi");
}

#[test]
fn a_machine_whose_kernel_does_not_come_is_refused() {
    let (_first, mut client) = running();
    let (near, far) = UnixStream::pair().unwrap();
    let second = Vmm::start();
    let mut other = second.client();
    other.begin_receive_boot(&far);
    client.begin_send(&near, 1000);
    drop((near, far));
    let Answer::Error(error) = other.answer() else {
        panic!("it is taken")
    };
    assert!(error.message.contains("sent no kernel"), "{}", error.message);
}

#[test]
fn what_no_vmm_sends_ends_the_start() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut second = Vmm::start();
    let mut other = second.client();
    other.begin_receive(&echoing(), &far);
    drop(far);
    std::io::Write::write_all(&mut &near, b"vmmdmigr\x01\0\0\0\x63\0\0\0\0\0\0\0\0\0\0\0").unwrap();
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

#[test]
fn disk_moves_between_processes_only_by_its_lock() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let open = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(image.path()).unwrap()
    };
    let (first, second) = (Vmm::start(), Vmm::start());
    let (mut client, mut other) = (first.client(), second.client());
    let disk = open();
    assert_eq!(state(&client.boot_with_disk(&echoing(), &disk)), State::Running);
    drop(disk);
    let (near, far) = UnixStream::pair().unwrap();
    let disk = open();
    other.begin_receive_with(&echoing(), &far, Some(&disk));
    drop(disk);
    client.begin_send(&near, 1000);
    drop((near, far));
    assert!(matches!(client.answer(), Answer::Sent(_)));
    assert_eq!(
        state(&other.answer()),
        State::Paused,
        "the disk is not needed yet"
    );

    let in_use = |answer: Answer| match answer {
        Answer::Error(error) => {
            assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.message);
            assert!(
                error.message.starts_with("disk root: in use by"),
                "{}",
                error.message
            );
        }
        other => panic!("{other:?}"),
    };
    in_use(other.ask(Op::Resume(Resume {})));
    for _ in 0..2 {
        assert_eq!(state(&client.ask(Op::UnlockDisks(UnlockDisks {}))), State::Paused);
    }
    assert_eq!(state(&other.ask(Op::Resume(Resume {}))), State::Running);
    assert!(echoes(&second));
    in_use(client.ask(Op::Resume(Resume {})));
    assert!(
        matches!(other.ask(Op::UnlockDisks(UnlockDisks {})), Answer::Error(_)),
        "it runs"
    );
    other.ask(Op::Stop(Stop {}));
    drop((other, second));
    // A source takes its VM back when the target is gone: the kernel lets go of a process's files a moment after its end.
    let resumed = (0..200).any(|_| match client.ask(Op::Resume(Resume {})) {
        Answer::Status(status) => status.state() == State::Running,
        _ => {
            std::thread::sleep(std::time::Duration::from_millis(20));
            false
        }
    });
    assert!(resumed, "nobody else has the disk");
    assert!(echoes(&first));
}

#[test]
fn a_disk_that_only_one_process_has_goes_along_by_its_content() {
    let image = |size: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file
    };
    let (one, two) = (image(8 << 20), image(8 << 20));
    one.write_all_at(&[7; 100_000], 0).unwrap();
    one.write_all_at(&[8; 4096], (8 << 20) - 4096).unwrap();
    let (first, second) = (Vmm::start(), Vmm::start());
    let (mut client, mut other) = (first.client(), second.client());
    assert_eq!(state(&client.boot_with_disk(&echoing(), &one)), State::Running);

    // A smaller disk is refused, and the guest continues.
    let (near, far) = UnixStream::pair().unwrap();
    let small = Vmm::start();
    let mut refusing = small.client();
    refusing.begin_receive_copy(&echoing(), &far, Some(&image(1 << 20)), &["root"]);
    client.begin_send_with(&near, 1000, &["root"]);
    drop((near, far));
    let Answer::Error(error) = refusing.answer() else {
        panic!("it is taken");
    };
    assert!(
        error
            .message
            .contains("disk root has 8388608 bytes instead of 1048576"),
        "{}",
        error.message
    );
    assert!(matches!(client.answer(), Answer::Error(_)));
    assert_eq!(state(&client.ask(Op::GetStatus(GetStatus {}))), State::Running);

    let (near, far) = UnixStream::pair().unwrap();
    other.begin_receive_copy(&echoing(), &far, Some(&two), &["root"]);
    client.begin_send_with(&near, 1000, &["root"]);
    drop((near, far));
    let sent = match client.answer() {
        Answer::Sent(sent) => sent,
        other => panic!("{other:?}"),
    };
    assert_eq!(sent.disk_bytes, 102_400 + 4096, "{sent:?}");
    let disks = client.wait_for_event(|kind| match kind {
        event::Kind::MigrationDisks(disks) => Some(*disks),
        _ => None,
    });
    assert_eq!(disks.total_bytes, 8 << 20);
    assert_eq!(state(&other.answer()), State::Paused);
    let content = |file: &std::fs::File| {
        let mut bytes = vec![0; 8 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert!(content(&one) == content(&two), "the disk is another");
    assert!(two.metadata().unwrap().blocks() * 512 < 1 << 20, "it is sparse");
    // Each has its own: neither waits for the other's lock.
    assert_eq!(state(&other.ask(Op::Resume(Resume {}))), State::Running);
    assert!(echoes(&second));
    assert_eq!(state(&client.ask(Op::UnlockDisks(UnlockDisks {}))), State::Paused);
    assert_eq!(state(&client.ask(Op::Resume(Resume {}))), State::Running);
    assert!(echoes(&first));
    // A migration of an unknown disk is refused.
    let (near, _far) = UnixStream::pair().unwrap();
    client.begin_send_with(&near, 1000, &["data"]);
    assert!(matches!(client.answer(), Answer::Error(error) if error.kind() == ErrorKind::NotFound));
    assert!(echoes(&first));
}
