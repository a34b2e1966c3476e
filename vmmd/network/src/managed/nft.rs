//! The program nft, which puts rules into the kernel.

use std::{io, process::Stdio, time::Duration};

use tokio::{io::AsyncWriteExt, process::Command, time::timeout};
use vmmd_host::fault;

use super::{filter::Own, firewall};

/// How long it may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Carries commands out, in one transaction, in the network namespace of the thread. On the node `own` notes that the change is the
/// daemon's.
pub async fn apply(commands: &str, own: Option<&Own>) -> io::Result<()> {
    fault::step("change the packet filter");
    run(&["-f", "-"], commands, own).await.map(drop)
}

/// A list of nft in JSON (libnftables-json(5)).
pub async fn list(what: &[&str]) -> io::Result<serde_json::Value> {
    let arguments = [&["-j", "list"], what].concat();
    let output = run(&arguments, "", None).await?;
    serde_json::from_slice(&output).map_err(io::Error::other)
}

/// Whether the kernel can track connections on a bridge. Changes nothing, but the kernel may load
/// the module for this.
pub async fn tracks_bridges() -> bool {
    run(&["-c", "-f", "-"], firewall::PROBE, None).await.is_ok()
}

async fn run(arguments: &[&str], input: &str, own: Option<&Own>) -> io::Result<Vec<u8>> {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                io::Error::new(error.kind(), "there is no program nft: install nftables")
            }
            _ => error,
        })?;
    if let (Some(own), Some(pid)) = (own, child.id()) {
        own.note(pid);
    }
    let talk = async {
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).await?;
        }
        child.wait_with_output().await
    };
    let output = timeout(TIMEOUT, talk)
        .await
        .map_err(|_| io::ErrorKind::TimedOut)??;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().next().unwrap_or("it said nothing");
    Err(io::Error::other(format!("nft failed: {first}")))
}
