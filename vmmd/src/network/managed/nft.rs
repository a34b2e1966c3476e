//! The program nft, which puts rulesets into the kernel.

use std::{io, process::Stdio, time::Duration};

use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use super::{
    connections,
    rules::{FAMILIES, Ruleset, TABLE},
};

/// How long it may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Puts a ruleset into the kernel, in one transaction.
pub async fn apply(ruleset: &Ruleset) -> io::Result<()> {
    run(&["-j", "-f", "-"], ruleset.commands.to_string().as_bytes())
        .await
        .map(drop)
}

/// Whether the kernel can tell connections apart on a bridge. Changes nothing, but may make the kernel load its module for that.
pub async fn tracks_bridges() -> bool {
    let probe = run(
        &["-c", "-j", "-f", "-"],
        connections::probe().to_string().as_bytes(),
    )
    .await;
    probe.is_ok()
}

/// Whether the kernel has this ruleset.
pub async fn has(ruleset: &Ruleset) -> io::Result<bool> {
    let listed = run(&["-j", "list", "chains"], &[]).await?;
    let listed: Value = serde_json::from_slice(&listed).map_err(io::Error::other)?;
    let objects = listed["nftables"].as_array().into_iter().flatten();
    let chains: Vec<_> = objects.filter_map(|object| object.get("chain")).collect();
    let marked = |family: &&str| {
        let is_mark = |chain: &&Value| {
            chain["family"] == **family && chain["table"] == TABLE && chain["name"] == ruleset.mark.as_str()
        };
        chains.iter().any(is_mark)
    };
    Ok(FAMILIES.iter().all(marked))
}

/// Runs nft; what it prints.
async fn run(arguments: &[&str], input: &[u8]) -> io::Result<Vec<u8>> {
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
    let talk = async {
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input).await?;
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
