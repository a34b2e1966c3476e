//! Files of a guest.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use serde_json::{Value, json};
use vmmd_host::failure::Failure;

use super::{Agent, confused};
use crate::{host::Host, registry::vms::Entry};

/// Most bytes of a question and of an answer. Other questions come in between.
pub const PIECE: usize = 512 << 10;
/// Longest path in bytes (PATH_MAX of Linux).
const PATH: usize = 4096;

/// An open file of a guest. Each use has a turn at the agent of its own.
#[derive(Debug)]
pub struct GuestFile {
    host: Arc<Host>,
    entry: Entry,
    handle: i64,
}

/// Answer to `guest-file-read`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Read {
    buf_b64: String,
    eof: bool,
}

/// Answer to `guest-file-write`.
#[derive(Deserialize)]
struct Written {
    count: usize,
}

impl GuestFile {
    /// Opens a file of the guest for reading, or makes it empty and opens it for writing.
    pub async fn open(host: Arc<Host>, entry: Entry, path: &str, write: bool) -> Result<Self, Failure> {
        if !path.starts_with('/') || path.len() > PATH || path.contains('\0') {
            return Err(Failure::field(
                "path",
                "must be an absolute path of at most 4,096 bytes",
            ));
        }
        let mode = if write { "wb" } else { "rb" };
        let question = json!({"path": path, "mode": mode});
        let handle = Agent::of(&host, &entry)?.ask("guest-file-open", question).await?;
        Ok(Self { host, entry, handle })
    }

    fn agent(&self) -> Result<Agent<'_>, Failure> {
        Agent::of(&self.host, &self.entry)
    }

    /// Reads the next piece, and whether it is the last one.
    pub async fn read(&self) -> Result<(Vec<u8>, bool), Failure> {
        let question = json!({"handle": self.handle, "count": PIECE});
        let read: Read = self.agent()?.ask("guest-file-read", question).await?;
        let bytes = BASE64.decode(read.buf_b64);
        let bytes = bytes.map_err(|_| confused("the content of a file is not in base64"))?;
        if bytes.len() > PIECE || bytes.is_empty() && !read.eof {
            return Err(confused("a piece of a file that is too long, or empty"));
        }
        Ok((bytes, read.eof))
    }

    /// Writes all bytes.
    pub async fn write(&self, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            let piece = bytes.get(..PIECE).unwrap_or(bytes);
            let question = json!({"handle": self.handle, "buf-b64": BASE64.encode(piece)});
            let written: Written = self.agent()?.ask("guest-file-write", question).await?;
            if written.count == 0 || written.count > piece.len() {
                return Err(confused("a number of written bytes that cannot be"));
            }
            bytes = bytes.get(written.count..).unwrap_or_default();
        }
        Ok(())
    }

    /// Writes the agent's buffer to the file.
    pub async fn flush(&self) -> Result<(), Failure> {
        let question = json!({"handle": self.handle});
        let _nothing: Value = self.agent()?.ask("guest-file-flush", question).await?;
        Ok(())
    }

    /// Closes the file.
    pub async fn close(&self) -> Result<(), Failure> {
        let question = json!({"handle": self.handle});
        let _nothing: Value = self.agent()?.ask("guest-file-close", question).await?;
        Ok(())
    }
}
