//! Agents of guests: programs of the tests, in place of the mock's socket.

use std::fs;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
};
use vmmd_api::v1;

use crate::harness::{Daemon, uid};

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

/// Answers the questions to the agent of a VM.
pub fn listen(daemon: &Daemon, vm: &v1::Vm, answer: impl Fn(&Value) -> Vec<u8> + Send + Sync + 'static) {
    let socket = daemon.path(&format!("run/vms/{}/agent.sock", uid(vm)));
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            serve(stream, &answer).await;
        }
    });
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
