//! Static programs of ours that run in the node or in a guest, whatever C library is there.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::paths;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds `program` of the workspace's `package`, linked statically, and returns where it is.
pub fn build_static(package: &str, program: &str) -> Result<PathBuf> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "build",
            "--quiet",
            "--locked",
            "-j2",
            "--release",
            "--target",
            TARGET,
            "-p",
            package,
            "--bin",
            program,
        ])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(paths::workspace_dir())
        .status()
        .context("start cargo")?;
    ensure!(status.success(), "building {program} failed");
    Ok(paths::target_dir().join(TARGET).join("release").join(program))
}
