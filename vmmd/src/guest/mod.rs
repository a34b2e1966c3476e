//! The agent in a guest: qemu-guest-agent, which reads a line of JSON from its channel and answers
//! with a line of JSON.
//!
//! Each question has a connection of its own to the VM's `agent.sock`. It begins with a question
//! whose answer is known (`guest-sync-delimited`). This answer proves that an agent runs, and that
//! later bytes belong to this connection. An agent is not trusted: its answers are bounded in length
//! and time.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::timeout,
};
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};

use crate::{host::Host, paths::RuntimeDir, registry::vms::Entry};

/// Time limit for the first answer of an agent.
const SYNC: Duration = Duration::from_secs(5);
/// How long an agent may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest answer in bytes. The agent sends output in base64, both streams in one answer. A guest
/// has one answer at a time, which takes some three times as much memory.
const MAX_ANSWER: u64 = 6 << 20;
/// First byte of the answer to `guest-sync-delimited`. No JSON has it.
const DELIMITER: u8 = 0xff;

/// Channel to the agent of a VM.
#[derive(Debug)]
pub struct Agent<'a> {
    host: &'a Host,
    entry: &'a Entry,
}

/// How a command ended, with its output.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// The exit code.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// The agent has left out some output.
    pub truncated: bool,
}

#[derive(Deserialize)]
struct Reply<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<ReplyError>,
}

#[derive(Deserialize)]
struct ReplyError {
    #[serde(default)]
    desc: String,
}

/// Answer to `guest-exec`.
#[derive(Deserialize)]
struct Started {
    pid: i64,
}

/// Answer to `guest-exec-status`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ExecStatus {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    #[serde(default)]
    out_data: String,
    #[serde(default)]
    err_data: String,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

impl<'a> Agent<'a> {
    /// The agent of a VM that runs and has a channel to one. Whether it answers is seen at the first
    /// question.
    pub fn of(host: &'a Host, entry: &'a Entry) -> Result<Self, Failure> {
        let vm = entry.state.borrow();
        if vm.spec.as_ref().is_none_or(|spec| spec.guest_agent.is_none()) {
            let message = "the VM has no channel to an agent: give it a `guestAgent` and restart it";
            return Err(Failure::precondition("NO_GUEST_AGENT", message));
        }
        let phase = vm.status.as_ref().map(v1::VmStatus::phase);
        if phase != Some(v1::VmPhase::Running) {
            let message = "the VM is not running: start or resume it first";
            return Err(Failure::precondition("NOT_RUNNING", message));
        }
        drop(vm);
        Ok(Self { host, entry })
    }

    /// Starts a command and returns its number.
    pub async fn start(&self, command: &[String], env: &[String], input: &[u8]) -> Result<i64, Failure> {
        let (path, arguments) = command
            .split_first()
            .map_or(("", command), |(path, rest)| (path, rest));
        let mut question = json!({"path": path, "arg": arguments, "capture-output": true});
        if let Some(fields) = question.as_object_mut() {
            if !env.is_empty() {
                fields.insert("env".to_owned(), json!(env));
            }
            if !input.is_empty() {
                fields.insert("input-data".to_owned(), BASE64.encode(input).into());
            }
        }
        let started: Started = self.ask("guest-exec", question).await?;
        Ok(started.pid)
    }

    /// Whether a command has ended, and how. The agent forgets it with this answer.
    pub async fn ended(&self, pid: i64) -> Result<Option<Ended>, Failure> {
        let status: ExecStatus = self.ask("guest-exec-status", json!({"pid": pid})).await?;
        if !status.exited {
            return Ok(None);
        }
        let decode = |data: &str| {
            let decoded = BASE64.decode(data);
            decoded.map_err(|_| confused("its output is not in base64"))
        };
        Ok(Some(Ended {
            code: status.exitcode,
            signal: status.signal,
            stdout: decode(&status.out_data)?,
            stderr: decode(&status.err_data)?,
            truncated: status.out_truncated || status.err_truncated,
        }))
    }

    /// Asks one question.
    async fn ask<T: DeserializeOwned>(&self, command: &str, arguments: Value) -> Result<T, Failure> {
        let _turn = self.host.agents.turn(self.entry.uid).await;
        let path = RuntimeDir::of(&self.host.config, self.entry.uid).agent();
        let Ok(stream) = UnixStream::connect(path).await else {
            let message = "this run of the VM has no channel to an agent: restart the VM";
            return Err(Failure::precondition("NO_GUEST_AGENT", message));
        };
        let mut stream = BufReader::new(stream);
        match timeout(SYNC, synchronize(&mut stream)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return Err(silent()),
        }
        let question = json!({"execute": command, "arguments": arguments});
        let answer = timeout(ANSWER, exchange(&mut stream, &question)).await;
        let Ok(Ok(answer)) = answer else {
            return Err(silent());
        };
        if answer.last() != Some(&b'\n') {
            let message = format!(
                "the answer of the guest's agent is longer than {} MiB: write the output to a file in the guest",
                MAX_ANSWER >> 20
            );
            return Err(Failure::precondition("GUEST_AGENT_ERROR", message));
        }
        let reply: Reply<T> =
            serde_json::from_slice(&answer).map_err(|error| confused(&error.to_string()))?;
        match reply {
            Reply {
                value: Some(value), ..
            } => Ok(value),
            Reply {
                error: Some(error), ..
            } => {
                let message = format!(
                    "the guest's agent refuses {command}: {}",
                    text::brief(&error.desc)
                );
                Err(Failure::precondition("GUEST_AGENT_ERROR", message))
            }
            _ => Err(confused("an answer without a result")),
        }
    }
}

/// Skips all that the agent still says to earlier questions.
async fn synchronize(stream: &mut BufReader<UnixStream>) -> std::io::Result<()> {
    // In JSON all numbers of 32 bits are exact.
    let id = uuid::Uuid::new_v4().as_fields().0;
    let question = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
    // The delimiter makes the agent forget an unfinished line.
    stream.write_all(&[DELIMITER]).await?;
    stream.write_all(format!("{question}\n").as_bytes()).await?;
    loop {
        skip_to_delimiter(stream).await?;
        let mut line = Vec::new();
        let bounded = &mut *stream;
        bounded.take(4096).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let reply = serde_json::from_slice::<Reply<u32>>(&line);
        if reply.is_ok_and(|reply| reply.value == Some(id)) {
            return Ok(());
        }
    }
}

/// Reads up to the delimiter, and keeps nothing.
async fn skip_to_delimiter(stream: &mut BufReader<UnixStream>) -> std::io::Result<()> {
    loop {
        let bytes = stream.fill_buf().await?;
        if bytes.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let length = bytes.len();
        if let Some(at) = bytes.iter().position(|byte| *byte == DELIMITER) {
            stream.consume(at.saturating_add(1));
            return Ok(());
        }
        stream.consume(length);
    }
}

/// Asks, and returns the line of the answer, or the beginning of one that is too long.
async fn exchange(stream: &mut BufReader<UnixStream>, question: &Value) -> std::io::Result<Vec<u8>> {
    stream.write_all(format!("{question}\n").as_bytes()).await?;
    let mut line = Vec::new();
    stream.take(MAX_ANSWER).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line)
}

fn silent() -> Failure {
    let message =
        "no agent answers in the guest: has the guest started, and does qemu-guest-agent run in it?";
    Failure::new(Kind::Unavailable, "GUEST_AGENT_SILENT", message)
}

fn confused(why: &str) -> Failure {
    let message = format!("the guest's agent gave an invalid answer: {}", text::brief(why));
    Failure::precondition("GUEST_AGENT_ERROR", message)
}
