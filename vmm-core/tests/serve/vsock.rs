//! Connections by the socket device of a machine.

use std::{
    io::Read as _,
    os::{fd::AsFd as _, unix::net::UnixStream},
};

use vmm_protocol::vmm::{
    Boot, ErrorKind, MachineSpec, OpenVsock, Pause, ResetMachine, State, Vsock, request::Op,
    response::Result as Answer,
};

use crate::{
    booted, guest, kind,
    process::{Client, Vmm},
    state,
};

fn open(client: &mut Client, port: u32) -> (UnixStream, Answer) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let open = OpenVsock {
        socket_fd: 0,
        port,
        accept: true,
    };
    client.send(Op::OpenVsock(open), &[theirs.as_fd()]);
    (ours, client.answer())
}

#[test]
fn machine_without_a_socket_device_refuses_connections() {
    let (_vmm, mut client) = booted(&[guest::HALT]);
    let (mut ours, answer) = open(&mut client, 22);
    assert_eq!(kind(&answer), ErrorKind::NotFound);
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
}

#[test]
fn clients_of_a_guest_without_a_driver_wait_and_give_up() {
    let mut vmm = Vmm::start();
    let mut client = vmm.client();
    let machine = MachineSpec {
        vsock: Some(Vsock { pci_slot: 24, cid: 3 }),
        ..MachineSpec::default()
    };
    let boot = Boot {
        machine: Some(machine),
        ..Boot::default()
    };
    let answer = client.boot(&guest::program(guest::HALT), &boot);
    assert_eq!(state(&answer), State::Running);
    // Clients that give up free their places.
    for _ in 0..3 {
        let waiting: Vec<_> = (0..64)
            .map(|port| {
                let (ours, answer) = open(&mut client, port);
                assert_eq!(state(&answer), State::Running);
                ours
            })
            .collect();
        assert_eq!(kind(&open(&mut client, 64).1), ErrorKind::Resources);
        drop(waiting);
    }
    assert_eq!(
        state(&client.ask(Op::ResetMachine(ResetMachine {}))),
        State::Running
    );
    assert_eq!(state(&client.ask(Op::Pause(Pause {}))), State::Paused);
    assert_eq!(state(&open(&mut client, 1).1), State::Paused);
    vmm.terminate();
    vmm.wait();
}
