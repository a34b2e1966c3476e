use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::{
    super::{history::Capacity, log::Log, server::MAX_CLIENTS},
    *,
};
use crate::component::Component;

const CAPACITY: Capacity = Capacity {
    first: 100,
    last: 1000,
};

pub(super) struct Rig {
    port: SerialPort,
    pub(super) uart: Arc<Mutex<Uart>>,
    path: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl Rig {
    fn new(log: Option<Log>) -> Self {
        Self::with(CAPACITY, log)
    }

    pub(super) fn with(capacity: Capacity, log: Option<Log>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let setup = Setup {
            listener: Some(listener.into()),
            log,
            ..Setup::default()
        };
        let port = SerialPort::start(Arc::new(Line::default()), capacity, setup).unwrap();
        let uart = port.device();
        Self {
            port,
            uart,
            path,
            _directory: directory,
        }
    }

    fn connect(&self) -> UnixStream {
        let client = UnixStream::connect(&self.path).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client
    }

    /// Connects and reads the replay.
    pub(super) fn attach(&self) -> (UnixStream, String) {
        let mut client = self.connect();
        let mut length = [0; 8];
        client.read_exact(&mut length).unwrap();
        let replay = take(&mut client, usize::try_from(u64::from_le_bytes(length)).unwrap());
        (client, replay)
    }
}

fn take(client: &mut impl Read, length: usize) -> String {
    let mut text = vec![0; length];
    client.read_exact(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Plays a guest that reads its port until `count` bytes have come.
fn guest_reads(uart: &Mutex<Uart>, count: usize) -> Vec<u8> {
    let (mut input, begin) = (Vec::new(), Instant::now());
    while input.len() < count {
        if read(uart, 5) & 1 == 1 {
            input.push(read(uart, 0));
        } else {
            assert!(
                begin.elapsed() < Duration::from_secs(20),
                "input stopped after {}",
                input.len()
            );
            thread::yield_now();
        }
    }
    input
}

#[test]
fn a_client_gets_what_was_printed_before_and_then_what_comes() {
    let rig = Rig::new(None);
    print(&rig.uart, b"early ");
    let (mut first, replay) = rig.attach();
    assert_eq!(replay, "early ");
    print(&rig.uart, b"late");
    assert_eq!(take(&mut first, 4), "late");
    let (_second, replay) = rig.attach();
    assert_eq!(replay, "early late");
}

#[test]
fn a_watch_sees_what_is_printed_without_a_log_or_a_client() {
    let (sender, seen) = std::sync::mpsc::channel();
    let setup = Setup {
        watch: Some(Box::new(move |text, printed| {
            // The test may have ended.
            let _gone = sender.send((text.to_vec(), printed));
        })),
        ..Setup::default()
    };
    let port = SerialPort::start(Arc::new(Line::default()), CAPACITY, setup).unwrap();
    for (line, end) in [("first\n", 6), ("second\n", 13)] {
        print(&port.device(), line.as_bytes());
        let mut text = Vec::new();
        let mut printed = 0;
        while printed < end {
            let (more, upto) = seen.recv_timeout(Duration::from_secs(20)).unwrap();
            text.extend(more);
            printed = upto;
        }
        assert_eq!((text.as_slice(), printed), (line.as_bytes(), end));
        assert_eq!(port.printed(), end);
    }
}

#[test]
fn several_clients_see_the_same_and_all_may_type() {
    let rig = Rig::new(None);
    let mut clients: Vec<_> = (0..3).map(|_| rig.attach().0).collect();
    print(&rig.uart, b"login: ");
    for client in &mut clients {
        assert_eq!(take(client, 7), "login: ");
        client.write_all(b"x").unwrap();
    }
    assert_eq!(guest_reads(&rig.uart, 3), b"xxx");
}

#[test]
fn typed_input_waits_for_the_guest_without_being_lost() {
    let rig = Rig::new(None);
    write(&rig.uart, 2, 1);
    let input: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let (client, _) = rig.attach();
    let sender = {
        let (mut client, input) = (client.try_clone().unwrap(), input.clone());
        thread::spawn(move || client.write_all(&input).unwrap())
    };
    assert_eq!(guest_reads(&rig.uart, input.len()), input);
    sender.join().unwrap();
}

#[test]
fn input_of_a_client_that_left_arrives_and_its_place_is_free() {
    let rig = Rig::new(None);
    for _ in 0..3 * MAX_CLIENTS {
        let (mut client, _) = rig.attach();
        client.write_all(b"z").unwrap();
        drop(client);
        assert_eq!(guest_reads(&rig.uart, 1), b"z");
    }
}

#[test]
fn one_client_too_many_is_closed_and_another_is_served_when_one_left() {
    let rig = Rig::new(None);
    let mut clients: Vec<_> = (0..MAX_CLIENTS).map(|_| rig.attach().0).collect();
    assert_eq!(rig.connect().read(&mut [0; 8]).unwrap(), 0);
    drop(clients.pop());
    let begin = Instant::now();
    // The server may not have noticed yet.
    while rig.connect().read(&mut [0; 8]).unwrap() == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn replays_that_nobody_takes_have_bounded_memory_and_who_comes_then_gets_the_end() {
    let whole = Capacity::default();
    let rig = Rig::with(whole, None);
    let length = whole.first + whole.last;
    print(&rig.uart, &vec![b'.'; length]);
    let clients: Vec<_> = (0..MAX_CLIENTS).map(|_| rig.connect()).collect();
    let mut replays = Vec::new();
    for mut client in clients {
        let mut replay = [0; 8];
        client.read_exact(&mut replay).unwrap();
        replays.push((usize::try_from(u64::from_le_bytes(replay)).unwrap(), client));
    }
    let lengths: Vec<_> = replays.iter().map(|(length, _)| *length).collect();
    assert_eq!(lengths[..3], [length; 3]);
    // Each has 64 KiB and a notice at least, and all together little more than 4 MiB.
    assert!(lengths.iter().all(|length| *length > 64 << 10), "{lengths:?}");
    assert!(
        lengths.iter().sum::<usize>() < (4 << 20) + MAX_CLIENTS * (65 << 10),
        "{lengths:?}"
    );
    let (length, mut client) = replays.pop().unwrap();
    let text = take(&mut client, length);
    assert!(
        text.starts_with("\r\n[") && text.ends_with("..."),
        "{}",
        &text[..40]
    );
}

#[test]
fn while_paused_no_input_is_let_in() {
    let mut rig = Rig::new(None);
    let (mut client, _) = rig.attach();
    rig.port.pause(Instant::now()).unwrap();
    client.write_all(b"ab").unwrap();
    // The server has looked at its sockets by the time that it answers another client.
    rig.attach();
    assert_eq!(read(&rig.uart, 5) & 1, 0);
    rig.port.resume().unwrap();
    assert_eq!(guest_reads(&rig.uart, 2), b"ab");
}

#[test]
fn the_log_holds_all_that_was_printed_up_to_the_end() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = Log::new(file.reopen().unwrap(), None, 1 << 20).unwrap();
    let mut rig = Rig::new(Some(log));
    let (mut client, _) = rig.attach();
    for line in 0..100 {
        print(&rig.uart, format!("line {line}\n").as_bytes());
        if line % 10 == 0 {
            take(&mut client, 1);
        }
    }
    print(&rig.uart, b"reboot: Power down\n");
    rig.port.finish();
    let text = std::fs::read_to_string(file.path()).unwrap();
    assert!(text.starts_with("line 0\nline 1\n") && text.ends_with("line 99\nreboot: Power down\n"));
    // The end of the stream notifies clients.
    let mut rest = String::new();
    client.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("Power down\n"));
}

#[test]
fn a_terminal_sees_all_output_and_its_escape_is_no_input() {
    let (input, keyboard) = UnixStream::pair().unwrap();
    let (output, screen) = UnixStream::pair().unwrap();
    for end in [&input, &output] {
        end.set_nonblocking(true).unwrap();
    }
    let escaped = EventFd::new(0).unwrap();
    let terminal = Terminal {
        input: input.into(),
        output: output.into(),
        escape: Some((0x1d, escaped.try_clone().unwrap())),
    };
    let setup = Setup {
        terminal: Some(terminal),
        ..Setup::default()
    };
    let port = SerialPort::start(Arc::new(Line::default()), CAPACITY, setup).unwrap();
    let uart = port.device();
    print(&uart, b"$ ");
    let (mut screen, mut keyboard) = (screen, keyboard);
    assert_eq!(take(&mut screen, 2), "$ ");
    keyboard.write_all(b"ls\x1d\n").unwrap();
    assert_eq!(guest_reads(&uart, 3), b"ls\n");
    assert_eq!(escaped.read().unwrap(), 1);
}

#[test]
fn plain_files_serve_as_a_terminal() {
    let (mut typed, shown) = (
        tempfile::tempfile().unwrap(),
        tempfile::NamedTempFile::new().unwrap(),
    );
    typed.write_all(b"hello").unwrap();
    std::io::Seek::rewind(&mut typed).unwrap();
    let terminal = Terminal {
        input: typed.into(),
        output: shown.reopen().unwrap().into(),
        escape: None,
    };
    let setup = Setup {
        terminal: Some(terminal),
        ..Setup::default()
    };
    let mut port = SerialPort::start(Arc::new(Line::default()), CAPACITY, setup).unwrap();
    assert_eq!(guest_reads(&port.device(), 5), b"hello");
    print(&port.device(), b"done");
    port.finish();
    assert_eq!(std::fs::read(shown.path()).unwrap(), b"done");
}

#[test]
fn a_reopened_descriptor_does_not_block_and_leaves_the_first_as_it_was() {
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let opened = super::super::server::reopen(&reader, false).unwrap();
    let would_block = |fd: OwnedFd| File::from(fd).read(&mut [0; 1]).unwrap_err().kind();
    assert_eq!(would_block(opened), ErrorKind::WouldBlock);
    assert!(
        !rustix::fs::fcntl_getfl(&reader)
            .unwrap()
            .contains(rustix::fs::OFlags::NONBLOCK)
    );
}
