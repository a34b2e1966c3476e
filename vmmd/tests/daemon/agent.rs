//! Agents of guests: programs of the tests, in place of the mock's socket.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, copy},
    net::{UnixListener, UnixStream},
};
use vmmd_api::v1;

use crate::{
    harness::{Daemon, uid},
    verbs::within,
};

/// The VM "web" with a channel, whose agent answers each question as `answer` says, with the raw
/// bytes of a line. An empty answer is none.
pub async fn guest(daemon: &Daemon, answer: impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static) -> v1::Vm {
    guest_with(daemon, |_| (), answer).await
}

/// The same with a changed spec.
pub async fn guest_with(
    daemon: &Daemon,
    change: impl FnOnce(&mut v1::VmSpec),
    answer: impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static,
) -> v1::Vm {
    let with_agent = |spec: &mut v1::VmSpec| {
        spec.guest_agent = Some(v1::GuestAgentSpec {});
        change(spec);
    };
    let vm = daemon.run_with("web", "", with_agent).await;
    listen(daemon, &vm, answer);
    vm
}

/// Debian's agent in place of one in a guest: the "guest" is the machine of the test.
pub struct QemuAgent(Child);

impl QemuAgent {
    /// Answers for the VM "web", which this runs.
    pub async fn start(daemon: &Daemon) -> Self {
        Self::start_as(daemon, Command::new("qemu-ga"), |_| ()).await
    }

    /// The same with a changed spec. The guest has the user `guest` with this home directory.
    pub async fn start_with_user(daemon: &Daemon, home: &Path, change: impl FnOnce(&mut v1::VmSpec)) -> Self {
        let users = daemon.path("passwd");
        fs::write(&users, format!("guest:x:0:0::{}:/bin/sh\n", home.display())).unwrap();
        let mut command = Command::new("unshare");
        command
            .args(["--map-root-user", "--mount", "sh", "-c"])
            .arg("mount --bind \"$0\" /etc/passwd && exec qemu-ga \"$@\"")
            .arg(&users);
        Self::start_as(daemon, command, change).await
    }

    async fn start_as(daemon: &Daemon, mut command: Command, change: impl FnOnce(&mut v1::VmSpec)) -> Self {
        let with_agent = |spec: &mut v1::VmSpec| {
            spec.guest_agent = Some(v1::GuestAgentSpec {});
            change(spec);
        };
        let vm = daemon.run_with("web", "", with_agent).await;
        let listener = socket_of(daemon, &vm);
        let folder = daemon.path("qemu-ga");
        fs::create_dir(&folder).unwrap();
        let port = folder.join("port");
        let agent = command
            .args(["--method", "unix-listen", "--path"])
            .arg(&port)
            .arg("--statedir")
            .arg(&folder)
            .arg("--pidfile")
            .arg(folder.join("pid"))
            // These would act on the machine.
            .arg("--blacklist=guest-shutdown,guest-fsfreeze-freeze,guest-suspend-disk,guest-suspend-ram,guest-set-time")
            .env("TMPDIR", &folder)
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-ga: .ci/setup installs it");
        let mut port = within(async || UnixStream::connect(&port).await.ok()).await;
        // The agent has one connection up to its end, as at the port of a machine.
        tokio::spawn(async move {
            let (mut from_agent, mut to_agent) = port.split();
            while let Ok((mut stream, _)) = listener.accept().await {
                let (mut from_daemon, mut to_daemon) = stream.split();
                tokio::select! {
                    _ = copy(&mut from_daemon, &mut to_agent) => {}
                    _ = copy(&mut from_agent, &mut to_daemon) => {}
                }
            }
        });
        Self(agent)
    }
}

impl QemuAgent {
    /// Number of its open files that have no name any more.
    pub fn deleted_files(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.0.id());
        let files = fs::read_dir(folder).unwrap().flatten();
        let links = files.filter_map(|file| fs::read_link(file.path()).ok());
        links
            .filter(|link| link.to_string_lossy().ends_with(" (deleted)"))
            .count()
    }
}

impl Drop for QemuAgent {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Answers the questions to the agent of a VM.
pub fn listen(daemon: &Daemon, vm: &v1::Vm, answer: impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static) {
    let listener = socket_of(daemon, vm);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            serve(stream, &answer).await;
        }
    });
}

/// The socket of a VM's channel, in place of the mock's.
fn socket_of(daemon: &Daemon, vm: &v1::Vm) -> UnixListener {
    let socket = daemon.path(&format!("run/vms/{}/agent.sock", uid(vm)));
    fs::remove_file(&socket).unwrap();
    UnixListener::bind(socket).unwrap()
}

async fn serve(stream: UnixStream, answer: &impl Fn(&Value) -> Vec<u8>) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    while matches!(stream.read_until(b'\n', &mut line).await, Ok(1..)) {
        let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
        let question: Value = serde_json::from_slice(text).unwrap();
        let bytes = if question["execute"] == "guest-sync-delimited" {
            // Answers to earlier questions come first.
            let id = &question["arguments"]["id"];
            let old = b"{\"return\": {\"pid\": 1}}\n\xff{\"return\": 7}\n";
            [
                old.as_slice(),
                b"\xff",
                format!("{{\"return\": {id}}}\n").as_bytes(),
            ]
            .concat()
        } else {
            answer(&question)
        };
        if stream.write_all(&bytes).await.is_err() {
            return;
        }
        line.clear();
    }
}

/// The line of an answer.
pub fn reply(value: &Value) -> Vec<u8> {
    format!("{}\n", json!({"return": value})).into_bytes()
}

/// The line of a refusal.
pub fn refuse(class: &str, desc: &str) -> Vec<u8> {
    format!("{}\n", json!({"error": {"class": class, "desc": desc}})).into_bytes()
}

/// The answer to `guest-info` of an agent with these commands.
pub fn about(commands: &[&str]) -> Vec<u8> {
    let supported = commands.iter().map(|name| json!({"name": name, "enabled": true}));
    let supported: Vec<_> = supported.collect();
    reply(&json!({"version": "7.2.0", "supported_commands": supported}))
}
