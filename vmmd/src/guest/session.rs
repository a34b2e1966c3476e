//! A connection to an agent. It begins with a question whose answer is known
//! (`guest-sync-delimited`). This answer proves that an agent runs, and that later bytes belong to
//! this connection.

use std::time::Duration;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::timeout,
};
use vmmd_host::{failure::Failure, text};

use super::{confused, silent};
use crate::registry::agents::Turn;

/// Time limit for the first answer of an agent.
const SYNC: Duration = Duration::from_secs(5);
/// How long an agent may take for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest answer in bytes. The agent sends output in base64, both streams in one answer. A guest
/// has one answer at a time, which takes some three times as much memory.
const MAX_ANSWER: u64 = 6 << 20;
/// First byte of the answer to `guest-sync-delimited`. No JSON has it.
const DELIMITER: u8 = 0xff;

/// A connection to an agent that answers. No other question reaches the agent meanwhile.
#[derive(Debug)]
pub struct Session {
    /// `None` after an answer that has not come in time: it could be taken for the next one.
    stream: Option<BufReader<UnixStream>>,
    _turn: Turn,
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
    class: String,
    #[serde(default)]
    desc: String,
}

impl Session {
    pub(super) async fn begin(stream: UnixStream, turn: Turn) -> Result<Self, Failure> {
        let mut stream = BufReader::new(stream);
        match timeout(SYNC, synchronize(&mut stream)).await {
            Ok(Ok(())) => Ok(Self {
                stream: Some(stream),
                _turn: turn,
            }),
            Ok(Err(_)) | Err(_) => Err(silent()),
        }
    }

    /// Asks for an action that has no answer.
    pub async fn tell(&mut self, command: &str, arguments: Value) -> Result<(), Failure> {
        let mut stream = self.stream.take().ok_or_else(silent)?;
        let question = json!({"execute": command, "arguments": arguments});
        let line = format!("{question}\n");
        match timeout(ANSWER, stream.write_all(line.as_bytes())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(silent()),
        }
    }

    /// Asks one question.
    pub async fn ask<T: DeserializeOwned>(&mut self, command: &str, arguments: Value) -> Result<T, Failure> {
        let mut stream = self.stream.take().ok_or_else(silent)?;
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
        self.stream = Some(stream);
        let reply: Reply<T> =
            serde_json::from_slice(&answer).map_err(|error| confused(&error.to_string()))?;
        match reply {
            Reply {
                value: Some(value), ..
            } => Ok(value),
            Reply {
                error: Some(error), ..
            } => Err(refusal(command, &error)),
            _ => Err(confused("an answer without a result")),
        }
    }
}

fn refusal(command: &str, error: &ReplyError) -> Failure {
    let desc = text::brief(&error.desc);
    // The agent has no class for a command that its configuration disables.
    if error.class == "CommandNotFound" || desc.contains("has been disabled") {
        let message = format!(
            "the guest's agent does not have {command}: update qemu-guest-agent, or allow the command in its \
             configuration ({desc})"
        );
        return Failure::precondition("GUEST_AGENT_UNSUPPORTED", message);
    }
    let message = format!("the guest's agent refuses {command}: {desc}");
    Failure::precondition("GUEST_AGENT_ERROR", message)
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
