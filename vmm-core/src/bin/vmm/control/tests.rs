use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    thread::{self, JoinHandle},
};

use rstest::rstest;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
use vmm_core::lifecycle::publisher::Audience as _;
use vmm_protocol::{
    vmm::{self, Boot, DeviceError, GetStatus, Hello, MachineSpec, PowerButton, State, StateChanged},
    wire,
};

use super::{requests::MAX_UNDER_WAY, *};

/// A running server and the driver's ends of its channels.
struct Fixture {
    _dir: tempfile::TempDir,
    path: PathBuf,
    outbox: Outbox,
    inputs: Receiver<Input>,
    signal: io::PipeWriter,
    thread: JoinHandle<io::Result<()>>,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let bound = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&bound, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let (sender, inputs) = channel();
        let (signals, signal) = io::pipe().unwrap();
        let (server, outbox) = Server::new(bound, signals.into(), sender).unwrap();
        let thread = thread::spawn(|| server.run());
        Self {
            _dir: dir,
            path,
            outbox,
            inputs,
            signal,
            thread,
        }
    }

    fn connect(&self) -> Peer {
        Peer {
            socket: UnixStream::connect(&self.path).unwrap(),
            receiver: wire::Receiver::new(),
        }
    }

    fn greeted(&self) -> Peer {
        let mut client = self.connect();
        assert!(matches!(client.ask(1, hello(wire::MAJOR)), Answer::Hello(_)));
        client
    }

    fn finish(self) {
        self.outbox.finish();
        self.thread.join().unwrap().unwrap();
    }
}

struct Peer {
    socket: UnixStream,
    receiver: wire::Receiver,
}

impl Peer {
    fn send(&self, id: u64, op: Option<Op>) {
        let request = vmm::Request {
            id,
            op,
            ..Default::default()
        };
        wire::send_all(
            &self.socket,
            &Message {
                kind: Some(Kind::Request(request)),
            },
            &[],
        )
        .unwrap();
    }

    fn receive(&mut self) -> Option<Kind> {
        wire::receive(&self.socket, &mut self.receiver)
            .unwrap()
            .map(|(message, _)| message.kind.unwrap())
    }

    fn answer(&mut self, id: u64) -> Answer {
        match self.receive() {
            Some(Kind::Response(response)) => {
                assert_eq!(response.id, id);
                response.result.unwrap()
            }
            other => panic!("{other:?} instead of an answer"),
        }
    }

    fn ask(&mut self, id: u64, op: Op) -> Answer {
        self.send(id, Some(op));
        self.answer(id)
    }

    /// Reads the remaining data until the server closes the connection.
    fn wait_for_close(mut self) -> bool {
        let mut rest = Vec::new();
        match self.socket.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

fn hello(major: u32) -> Op {
    Op::Hello(Hello { major, minor: 7 })
}

fn kind_of(answer: Answer) -> ErrorKind {
    match answer {
        Answer::Error(error) => error.kind(),
        other => panic!("{other:?} is no error"),
    }
}

fn running() -> Status {
    Status {
        state: State::Running.into(),
        name: "web".into(),
        ..Status::default()
    }
}

fn changed(status: Status) -> Event {
    Event {
        kind: Some(event::Kind::StateChanged(StateChanged { status: Some(status) })),
    }
}

#[test]
fn hello_tells_version_process_and_status() {
    let fixture = Fixture::new();
    let mut client = fixture.connect();
    let Answer::Hello(reply) = client.ask(5, hello(wire::MAJOR)) else {
        panic!()
    };
    assert_eq!((reply.major, reply.pid), (wire::MAJOR, std::process::id()));
    assert_eq!(reply.status.unwrap().state(), State::Empty);
    fixture.finish();
}

#[test]
fn another_major_version_is_refused_with_both_versions_named() {
    let fixture = Fixture::new();
    let mut client = fixture.connect();
    let Answer::Error(error) = client.ask(1, hello(wire::MAJOR + 1)) else {
        panic!()
    };
    assert!(
        error.message.contains("2 is not served, this is 1."),
        "{}",
        error.message
    );
    assert!(client.wait_for_close());
    fixture.finish();
}

#[test]
fn nothing_is_done_for_a_client_that_did_not_say_hello() {
    let fixture = Fixture::new();
    let mut client = fixture.connect();
    assert_eq!(kind_of(client.ask(1, Op::Stop(Stop {}))), ErrorKind::State);
    assert!(client.wait_for_close());
    assert!(fixture.inputs.try_recv().is_err());
    fixture.finish();
}

#[rstest]
#[case(b"GET / HTTP/1.1\r\n\r\n".to_vec())]
#[case(vec![0; 64])]
#[case(vec![0xff; 64])]
#[case(vec![3, 0, 0, 0, 0xff, 0xff, 0xff])]
fn garbage_closes_its_connection_and_disturbs_no_other(#[case] garbage: Vec<u8>) {
    let fixture = Fixture::new();
    let mut good = fixture.greeted();
    let mut bad = fixture.connect();
    bad.socket.write_all(&garbage).unwrap();
    assert!(bad.wait_for_close());
    assert!(matches!(
        good.ask(2, Op::GetStatus(GetStatus {})),
        Answer::Status(_)
    ));
    fixture.finish();
}

#[test]
fn answer_reaches_the_asker_after_the_events() {
    let fixture = Fixture::new();
    let (mut client, mut other) = (fixture.greeted(), fixture.greeted());
    let boot = Boot {
        machine: Some(MachineSpec::default()),
        paused: true,
        ..Boot::default()
    };
    let file = std::fs::File::open("/dev/null").unwrap();
    let request = vmm::Request {
        id: 8,
        op: Some(Op::Boot(boot)),
        ..Default::default()
    };
    let message = Message {
        kind: Some(Kind::Request(request)),
    };
    wire::send_all(&client.socket, &message, &[file.as_fd()]).unwrap();
    let Input::Request(token, received) = fixture.inputs.recv().unwrap() else {
        panic!()
    };
    assert!(matches!(received.op, Op::Boot(boot) if boot.paused));
    assert_eq!(received.fds.len(), 1);

    fixture.outbox.event(changed(running()));
    fixture.outbox.reply(token, Ok(Answer::Status(running())));
    assert!(matches!(client.receive(), Some(Kind::Event(_))));
    assert_eq!(client.answer(8), Answer::Status(running()));
    assert!(matches!(other.receive(), Some(Kind::Event(_))));
    // The status reports the published state without the driver.
    assert_eq!(
        other.ask(2, Op::GetStatus(GetStatus {})),
        Answer::Status(running())
    );
    fixture.finish();
}

#[test]
fn unknown_request_gets_an_error_and_the_connection_stays() {
    let fixture = Fixture::new();
    let mut client = fixture.greeted();
    client.send(2, None);
    assert_eq!(kind_of(client.answer(2)), ErrorKind::Invalid);
    assert!(matches!(
        client.ask(4, Op::GetStatus(GetStatus {})),
        Answer::Status(_)
    ));
    fixture.finish();
}

#[test]
fn requests_beyond_the_limit_are_refused() {
    let fixture = Fixture::new();
    let mut client = fixture.greeted();
    for id in 0..MAX_UNDER_WAY as u64 {
        client.send(10 + id, Some(Op::PowerButton(PowerButton {})));
    }
    assert_eq!(
        kind_of(client.ask(99, Op::PowerButton(PowerButton {}))),
        ErrorKind::Resources
    );
    let Input::Request(token, _) = fixture.inputs.recv().unwrap() else {
        panic!()
    };
    fixture.outbox.reply(token, Ok(Answer::Status(running())));
    assert_eq!(client.answer(10), Answer::Status(running()));
    client.send(100, Some(Op::PowerButton(PowerButton {})));
    let last = fixture
        .inputs
        .iter()
        .find(|input| matches!(input, Input::Request(token, _) if token.request == 100));
    assert!(last.is_some());
    fixture.finish();
}

#[test]
fn client_that_does_not_read_is_dropped_alone() {
    let fixture = Fixture::new();
    let (slow, mut quick) = (fixture.greeted(), fixture.greeted());
    let message = "x".repeat(64 << 10);
    for _ in 0..64 {
        let error = DeviceError {
            device: "disk root".into(),
            message: message.clone(),
        };
        fixture.outbox.event(Event {
            kind: Some(event::Kind::DeviceError(error)),
        });
        assert!(matches!(quick.receive(), Some(Kind::Event(_))));
    }
    assert!(slow.wait_for_close());
    fixture.finish();
}

#[test]
fn a_termination_signal_stops_the_run() {
    let mut fixture = Fixture::new();
    fixture.signal.write_all(&[0; 128]).unwrap();
    let Input::Request(_, request) = fixture.inputs.recv().unwrap() else {
        panic!()
    };
    assert!(matches!(request.op, Op::Stop(_)));
    fixture.finish();
}

#[test]
fn the_driver_learns_when_the_last_client_is_gone() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.greeted(), fixture.greeted());
    drop(first);
    drop(second);
    assert!(matches!(fixture.inputs.recv().unwrap(), Input::Abandoned));
    fixture.finish();
}

#[test]
fn last_events_reach_clients_before_the_thread_ends() {
    let fixture = Fixture::new();
    let mut client = fixture.greeted();
    fixture.outbox.event(changed(running()));
    fixture.finish();
    assert!(matches!(client.receive(), Some(Kind::Event(_))));
    assert!(client.receive().is_none());
}
