//! The program nft, which puts rulesets into the kernel.

use std::{io, process::Stdio, time::Duration};

use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};
use vmmd_host::fault;

use super::{
    connections,
    ruleset::{FAMILIES, Name, TABLE},
};

/// How long it may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Carries commands out, in one transaction.
pub async fn apply(commands: &str) -> io::Result<()> {
    fault::step("change the packet filter");
    run(&["-j", "-f", "-"], commands.as_bytes()).await.map(drop)
}

/// Whether the kernel can track connections on a bridge. Changes nothing, but the kernel may load
/// the module for this.
pub async fn tracks_bridges() -> bool {
    let probe = run(
        &["-c", "-j", "-f", "-"],
        connections::probe().to_string().as_bytes(),
    )
    .await;
    probe.is_ok()
}

/// The chains of our tables.
pub async fn chains() -> io::Result<Vec<Name>> {
    let listed = run(&["-j", "list", "chains"], &[]).await?;
    let listed: Value = serde_json::from_slice(&listed).map_err(io::Error::other)?;
    let objects = listed["nftables"].as_array().into_iter().flatten();
    let chains = objects.filter_map(|object| object.get("chain"));
    let ours = chains.filter(|chain| {
        let family = chain["family"].as_str();
        chain["table"] == TABLE && family.is_some_and(|family| FAMILIES.contains(&family))
    });
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(ours
        .map(|chain| (text(&chain["family"]), text(&chain["name"])))
        .collect())
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
