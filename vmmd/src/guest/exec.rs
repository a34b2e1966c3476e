//! Commands in a guest.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use serde_json::json;
use tokio::time::sleep;
use vmmd_host::failure::Failure;

use super::{Agent, confused};
use crate::{host::Host, registry::vms::Entry};

/// Times between two looks at whether a command has ended: the first one, and the longest one. The
/// agent does not say when a command ends.
pub const FIRST_LOOK: Duration = Duration::from_millis(10);
pub const LAST_LOOK: Duration = Duration::from_secs(1);

/// How a command ended, with its output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

impl Agent<'_> {
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
}

/// Waits until a command of a guest has ended.
pub async fn end_of(host: &Host, entry: &Entry, pid: i64) -> Result<Ended, Failure> {
    let mut pause = FIRST_LOOK;
    loop {
        if let Some(ended) = Agent::of(host, entry)?.ended(pid).await? {
            return Ok(ended);
        }
        sleep(pause).await;
        pause = pause.saturating_mul(2).min(LAST_LOOK);
    }
}
