//! Static programs of the project that run in the node or in a guest, independent of the C library
//! there.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{self, Inputs};
use crate::wait::Deadline;
use crate::{paths, run};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds `program` of the workspace's `package`, linked statically, and returns where it is.
pub fn build_static(package: &str, program: &str) -> Result<PathBuf> {
    let mut command = cargo(package, program);
    command
        .arg("--release")
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    finish(command, program, "release")
}

/// Builds `program` of the workspace's `package` for development with these features, beside the
/// build without features. Returns the program's path.
pub fn build_with(package: &str, program: &str, features: &[&str]) -> Result<PathBuf> {
    let mut command = cargo(package, program);
    command.args(["--features", &features.join(",")]);
    finish(command, program, "debug")
}

/// Returns the path of a program of the workspace's development build, which exists if the tests
/// were built.
pub fn development(program: &str) -> Result<PathBuf> {
    let path = paths::target_dir().join("debug").join(program);
    ensure!(path.is_file(), "{} is missing: run `make build`", path.display());
    Ok(path)
}

/// A folder with `vmmd`, `vmm` and `vmmctl` of a commit of this repository. The first call for a commit builds them, which takes minutes.
pub fn of_commit(commit: &str) -> Result<PathBuf> {
    let mut inputs = Inputs::new(1);
    inputs.add("commit", commit.as_bytes());
    cache::get_or_build("previous", &inputs, |out| {
        let sources = out.join("sources");
        fs::create_dir(&sources)?;
        let mut unpack = Command::new("sh");
        unpack
            .args(["-c", "git archive \"$0\" | tar -x -C \"$1\"", commit])
            .arg(&sources)
            .current_dir(paths::workspace_dir());
        run::check(&mut unpack, Deadline::seconds(60)).with_context(|| format!("unpack commit {commit}"))?;
        // A development build compiles in a fraction of the time, and has the checks for overflow and `debug_assert!` on.
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build
            .args(["build", "--quiet", "--locked", "-j2"])
            .args(["-p", "vmmd", "-p", "vmmctl", "-p", "vmm-core"])
            .args(["--bin", "vmmd", "--bin", "vmmctl", "--bin", "vmm"])
            .env("CARGO_TARGET_DIR", "target")
            .env("CARGO_PROFILE_DEV_DEBUG", "none")
            .env("CARGO_INCREMENTAL", "0")
            .current_dir(&sources);
        run::check(&mut build, Deadline::seconds(3600)).with_context(|| format!("build commit {commit}"))?;
        for program in ["vmmd", "vmm", "vmmctl"] {
            fs::copy(sources.join("target/debug").join(program), out.join(program))
                .with_context(|| format!("copy {program}"))?;
        }
        fs::remove_dir_all(&sources).context("remove the sources")
    })
}

fn cargo(package: &str, program: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--quiet", "--locked", "-j2", "--target", TARGET])
        .args(["-p", package, "--bin", program])
        .current_dir(paths::workspace_dir());
    command
}

fn finish(mut command: Command, program: &str, profile: &str) -> Result<PathBuf> {
    let status = command.status().context("start cargo")?;
    ensure!(status.success(), "building {program} failed");
    Ok(paths::target_dir().join(TARGET).join(profile).join(program))
}
