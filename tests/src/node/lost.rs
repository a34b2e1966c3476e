//! A test is run again when the emulator lost the node or a guest under it, and never otherwise.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};

use super::machine::Machine;
use super::{NODE_VARIABLE, keeper};

/// Variable with nextest's name for the program of a test: the crate, `::`, the test's file.
const BINARY_VARIABLE: &str = "NEXTEST_BINARY_ID";
const TEST_VARIABLE: &str = "NEXTEST_TEST_NAME";

/// Names the program through which cargo, nextest and assert_cmd start others.
pub const RUNNER_VARIABLE: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// Variable with the path of a file. The file exists if the emulator has lost a guest of the test.
const GUEST_VARIABLE: &str = "VMMD_GUEST_LOST";

/// Has the test that runs here run again when it fails, as the emulator has lost a guest of it.
pub fn guest_lost() {
    if let Some(path) = std::env::var_os(GUEST_VARIABLE) {
        let _ = File::create(path);
    }
}

/// The file in a node's folder that names the tests that were run again, one a line.
pub fn retried_log(dir: &Path) -> PathBuf {
    dir.join("retried.log")
}

/// Suffix of the name of a second node that a test boots.
pub const SECOND: &str = "-second";

/// Runs a test program. Runs a failed end-to-end test once more if the emulator lost its node, its
/// second node or a guest: its node was replaced meanwhile, or died of a known fault of the
/// emulator. `node with` makes this function the runner of all test programs.
pub fn run_test(program: &str, arguments: &[String]) -> Result<ExitStatus> {
    let guest = std::env::temp_dir().join(format!("vmmd-guest-lost.{}", std::process::id()));
    let run = || {
        let mut command = Command::new(program);
        // The test starts programs of ours itself: those are no tests.
        command
            .args(arguments)
            .env_remove(RUNNER_VARIABLE)
            .env(GUEST_VARIABLE, &guest);
        command.status().with_context(|| format!("start {program}"))
    };
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (Some(dir), true) = (
        std::env::var_os(NODE_VARIABLE).map(PathBuf::from),
        is_end_to_end(&variable(BINARY_VARIABLE)),
    ) else {
        return run();
    };
    // The first tests start while the node still boots. The test itself reports an error of the
    // node.
    let _ = keeper::ask();
    let before = Machine::load(&dir)?.map(|node| node.pid);
    let status = run()?;
    // All checks must run, because each check consumes its finding.
    let guest_lost = fs::remove_file(&guest).is_ok();
    if status.success() || !(guest_lost | second_lost(&dir)? | replaced(&dir, before)?) {
        return Ok(status);
    }
    let name = format!("{} {}", variable(BINARY_VARIABLE), variable(TEST_VARIABLE));
    eprintln!(
        "node: {name} is run again: the emulator lost {} under it",
        if guest_lost { "a guest" } else { "the node" }
    );
    let mut log = File::options()
        .append(true)
        .create(true)
        .open(retried_log(&dir))?;
    writeln!(log, "{name}").context("write down that a test is run again")?;
    run()
}

fn is_end_to_end(binary: &str) -> bool {
    binary.starts_with("vmmd-tests::")
}

fn replaced(dir: &Path, before: Option<u32>) -> Result<bool> {
    match Machine::load(dir)? {
        Some(node) => Ok(Some(node.pid) != before),
        // A node that died of anything else is not replaced; the test's own failure is what counts.
        None => Ok(keeper::ask().unwrap_or_else(|error| {
            eprintln!("node: {error:#}");
            false
        })),
    }
}

/// Whether a test has left the record of a second node that the emulator lost; it is gone then.
fn second_lost(dir: &Path) -> Result<bool> {
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(SECOND);
    let Some(failed) = Machine::failed(&dir.with_file_name(name))? else {
        return Ok(false);
    };
    failed.stop()?;
    Ok(keeper::signature(&failed.console_log()).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_node_counts_as_lost_once() {
        let folder = tempfile::tempdir().expect("folder");
        let second = folder.path().join(format!("test{SECOND}"));
        fs::create_dir(&second).expect("folder");
        let mut ended = Command::new("true").spawn().expect("a process");
        ended.wait().expect("its end");
        let machine = Machine {
            name: format!("test{SECOND}"),
            pid: ended.id(),
            ssh_port: 1,
            dir: second.clone(),
            sockets: second.join("sockets"),
        };
        for (console, lost) in [("Oops: int3: 0000", true), ("Kernel panic", false)] {
            fs::write(second.join("console.log"), console).expect("console");
            let record = serde_json::to_string(&machine).expect("JSON");
            fs::write(second.join("node.json"), record).expect("record");
            for expected in [lost, false] {
                let found = second_lost(&folder.path().join("test")).expect("look");
                assert_eq!(found, expected, "{console}");
            }
        }
    }
}
