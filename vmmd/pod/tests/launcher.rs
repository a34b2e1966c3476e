//! The program `vmmd-pod` against a scripted daemon.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rustix::{
    fs::{FileType, fstat},
    process::{Pid, Signal, kill_process},
};
use vmmd_pod::{
    MAX_FILE,
    message::{
        DaemonMessage, Ended, Hello, LauncherMessage, Output as Piece, Position, State, daemon_message,
        launcher_message::Kind,
    },
};
use vmmd_wire::Receiver;

/// No step takes this long.
const PATIENCE: Duration = Duration::from_secs(20);

struct Pod {
    folder: tempfile::TempDir,
    listener: UnixListener,
}

struct Daemon {
    stream: UnixStream,
    receiver: Receiver<LauncherMessage>,
}

impl Pod {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("vmmd.sock")).unwrap();
        fs::write(folder.path().join("termination"), "").unwrap();
        Self { folder, listener }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn uid(&self) -> String {
        let name = self.folder.path().file_name().unwrap().to_str().unwrap();
        name.replace('.', "")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmmd-pod"));
        command
            .env_clear()
            .env("VMMD_POD_NAMESPACE", "default")
            .env("VMMD_POD_NAME", "web-7")
            .env("VMMD_POD_UID", self.uid())
            .env("VMMD_POD_VM", "web")
            .env("VMMD_POD_RUN", "7")
            .env("VMMD_POD_GRACE_SECONDS", "35")
            .env("VMMD_POD_SOCKET", self.path("vmmd.sock"))
            .env("VMMD_POD_FOLDER", self.path("vmmd"))
            .env("VMMD_POD_TERMINATION_LOG", self.path("termination"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn launch(&self) -> Child {
        self.command().spawn().unwrap()
    }

    fn accept(&self) -> Daemon {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Daemon {
            stream,
            receiver: Receiver::new(),
        }
    }

    fn is_ready(&self) -> bool {
        self.command().arg("ready").status().unwrap().success()
    }

    fn termination(&self) -> String {
        fs::read_to_string(self.path("termination")).unwrap()
    }
}

/// Paths and contents of files.
type Files = Vec<(String, Vec<u8>)>;

impl Daemon {
    fn next(&mut self) -> (Kind, Vec<OwnedFd>) {
        let received = vmmd_wire::receive(&self.stream, &mut self.receiver);
        let (message, fds) = received.unwrap().unwrap();
        (message.kind.unwrap(), fds)
    }

    /// The files before Hello, and that.
    fn greeted(&mut self) -> (Files, Hello, Vec<OwnedFd>) {
        let mut files = Files::new();
        loop {
            match self.next() {
                (Kind::File(piece), fds) => {
                    assert!(fds.is_empty());
                    match files.last_mut().filter(|(path, _)| *path == piece.path) {
                        Some((_, content)) => content.extend(piece.content),
                        None => files.push((piece.path, piece.content)),
                    }
                }
                (Kind::Hello(hello), fds) => return (files, hello, fds),
                (other, _) => panic!("{other:?}"),
            }
        }
    }

    fn send(&self, kind: daemon_message::Kind) {
        let message = DaemonMessage { kind: Some(kind) };
        vmmd_wire::send_all(&self.stream, &message, &[]).unwrap();
    }

    fn print(&self, text: &str, offset: u64) {
        self.send(daemon_message::Kind::Output(Piece {
            bytes: text.as_bytes().to_vec(),
            position: Some(Position { log: 1, offset }),
        }));
    }

    fn state(&self, phase: &str) {
        self.send(daemon_message::Kind::State(State {
            phase: phase.to_owned(),
            reason: "Reason".to_owned(),
            message: "words".to_owned(),
        }));
    }

    fn end(&self, code: u32) {
        self.send(daemon_message::Kind::Ended(Ended {
            code,
            reason: "GuestShutdown".to_owned(),
            message: "it was enough".to_owned(),
        }));
    }
}

fn finish(child: Child) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn hello_has_the_pod_its_files_and_its_descriptors() {
    let pod = Pod::new();
    fs::create_dir_all(pod.path("vmmd/volumes/root")).unwrap();
    fs::create_dir_all(pod.path("vmmd/volumes/data")).unwrap();
    fs::create_dir_all(pod.path("vmmd/secrets/init")).unwrap();
    let large = vec![7; MAX_FILE];
    fs::write(pod.path("vmmd/secrets/init/large"), &large).unwrap();
    fs::write(pod.path("vmmd/secrets/init/empty"), "").unwrap();
    let child = pod.launch();
    let mut daemon = pod.accept();
    let (files, hello, fds) = daemon.greeted();
    assert!(
        files
            == [
                ("init/empty".to_owned(), Vec::new()),
                ("init/large".to_owned(), large)
            ]
    );
    let names = [&hello.namespace, &hello.name, &hello.vm];
    assert_eq!(names, ["default", "web-7", "web"]);
    assert_eq!((hello.uid, hello.run, hello.position), (pod.uid(), 7, None));
    let volumes: Vec<_> = hello.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(volumes, ["data", "root"]);
    assert_eq!(fds.len(), 4);
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let own = identity(rustix::fs::stat("/proc/self/ns/net").unwrap());
    assert_eq!(identity(fstat(&fds[0]).unwrap()), own);
    let kind = |fd: &OwnedFd| FileType::from_raw_mode(fstat(fd).unwrap().st_mode);
    assert_eq!(kind(&fds[1]), FileType::Fifo);
    let data = identity(rustix::fs::stat(pod.path("vmmd/volumes/data")).unwrap());
    assert_eq!(identity(fstat(&fds[2]).unwrap()), data);
    // The lifeline is open as long as the launcher lives.
    let mut lifeline = File::from(fds.into_iter().nth(1).unwrap());
    daemon.end(0);
    assert_eq!(finish(child).0, Some(0));
    assert_eq!(lifeline.read(&mut [0]).unwrap(), 0);
    assert_eq!(pod.termination(), "GuestShutdown: it was enough");
}

#[test]
fn output_comes_once_over_lost_connections() {
    let pod = Pod::new();
    let child = pod.launch();
    let mut daemon = pod.accept();
    assert_eq!(daemon.greeted().1.position, None);
    daemon.print("one ", 4);
    daemon.print("two ", 8);
    drop(daemon);
    for offset in [8, 14] {
        let mut daemon = pod.accept();
        let (_, hello, fds) = daemon.greeted();
        assert_eq!(hello.position, Some(Position { log: 1, offset }));
        assert_eq!(fds.len(), 2);
        if offset == 8 {
            daemon.print("three ", 14);
        } else {
            daemon.print("four", 18);
            daemon.end(1);
        }
    }
    let (code, output, said) = finish(child);
    assert_eq!((code, output.as_str()), (Some(1), "one two three four"));
    assert!(said.contains("connecting again"), "{said}");
}

#[test]
fn sigterm_stops_the_vm_with_the_rest_of_the_grace() {
    let pod = Pod::new();
    let child = pod.launch();
    let mut daemon = pod.accept();
    daemon.greeted();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let stop = |daemon: &mut Daemon| match daemon.next().0 {
        Kind::Stop(stop) => stop.grace_ms,
        other => panic!("{other:?}"),
    };
    let first = stop(&mut daemon);
    assert!((25_000..=30_000).contains(&first), "{first}");
    // Another daemon is asked too.
    drop(daemon);
    let mut daemon = pod.accept();
    daemon.greeted();
    assert!(stop(&mut daemon) <= first);
    daemon.end(0);
    assert_eq!(finish(child).0, Some(0));
}

#[test]
fn probe_succeeds_while_the_vm_runs_and_states_are_shown() {
    let pod = Pod::new();
    assert!(!pod.is_ready());
    let mut child = pod.launch();
    let mut daemon = pod.accept();
    daemon.greeted();
    let mut stderr = child.stderr.take().unwrap();
    let mut shown = Vec::new();
    for (phase, ready) in [("STARTING", false), ("RUNNING", true), ("PAUSED", false)] {
        daemon.state(phase);
        daemon.state(phase);
        let expected = format!("vmmd-pod: {phase}: Reason: words\n");
        let mut line = vec![0; expected.len()];
        stderr.read_exact(&mut line).unwrap();
        shown.extend(line);
        assert_eq!(pod.is_ready(), ready, "{phase}");
    }
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(shown.matches("RUNNING").count(), 1, "{shown}");
    daemon.end(0);
    assert_eq!(finish(child).0, Some(0));
    assert!(!pod.is_ready());
}

#[test]
fn input_goes_to_the_vm_and_its_end_is_no_end() {
    let pod = Pod::new();
    let mut child = pod.command().stdin(Stdio::piped()).spawn().unwrap();
    let mut daemon = pod.accept();
    daemon.greeted();
    child.stdin.take().unwrap().write_all(b"root\n").unwrap();
    match daemon.next().0 {
        Kind::Input(input) => assert_eq!(input.bytes, b"root\n"),
        other => panic!("{other:?}"),
    }
    daemon.print("login: ", 7);
    daemon.end(0);
    assert_eq!(finish(child).1, "login: ");
}

#[test]
fn wrong_pod_ends_with_a_reason() {
    let pod = Pod::new();
    fs::create_dir_all(pod.path("vmmd/devices/data")).unwrap();
    let (code, _, said) = finish(pod.launch());
    assert_eq!(code, Some(1));
    assert!(said.contains("is not a block device"), "{said}");
    assert!(pod.termination().starts_with("LauncherFailed: "));
    let child = pod.command().env_remove("VMMD_POD_RUN").spawn().unwrap();
    let (code, _, said) = finish(child);
    assert!(code == Some(1) && said.contains("VMMD_POD_RUN"), "{said}");
}
