//! Ports of this machine, and pipes, that lead to a port of a VM.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    process::{Command, Stdio},
};

use proto::v1::VmPhase;

use crate::support::Daemon;

fn daemon() -> Daemon {
    let daemon = Daemon::start();
    daemon.state.put("web", VmPhase::Running, &[]);
    daemon
}

#[test]
fn a_pipe_leads_to_a_port_until_both_ends_have_ended() {
    let daemon = daemon();
    let mut command = daemon.vmmctl();
    command.args(["port-forward", "--stdio", "web", "7"]);
    let output = command.write_stdin("GET /").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"GET /");
    let mut command = daemon.vmmctl();
    let refused = command
        .args(["port-forward", "--stdio", "web", "8"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(5), "{refused:?}");
    let mut command = daemon.vmmctl();
    let two = command
        .args(["port-forward", "--stdio", "web", "7", "8"])
        .output()
        .unwrap();
    assert_eq!(two.status.code(), Some(2), "{two:?}");
}

#[test]
fn a_port_of_this_machine_leads_to_one_of_the_vm_for_several_clients() {
    let daemon = daemon();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmmctl"))
        .args(["port-forward", "web", "0:7"])
        .env("VMMD_SOCKET", &daemon.socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut said)
        .unwrap();
    let (address, rest) = said.split_once(' ').unwrap();
    assert_eq!(rest, "leads to port 7 of vm/web\n");
    let mut clients: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (client, text) in clients.iter_mut().zip(["one", "two"]) {
        client.write_all(text.as_bytes()).unwrap();
    }
    for (client, text) in clients.iter_mut().zip(["one", "two"]) {
        client.shutdown(Shutdown::Write).unwrap();
        let mut had = String::new();
        client.read_to_string(&mut had).unwrap();
        assert_eq!(had, text);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
