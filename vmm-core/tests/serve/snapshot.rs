//! Snapshots between processes that are held in as in production.

use std::fs::File;

use vmm_protocol::vmm::{SaveReply, State};

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
