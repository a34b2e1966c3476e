//! A serial console, as somebody at the keyboard has it.

use std::io::Write;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::steps::step;
use crate::wait::{Deadline, Follow};
use crate::{Case, must};

use super::BOOT;

/// A serial console, or any program in the node that is talked to.
pub struct Console {
    child: Child,
    input: ChildStdin,
    output: Follow<ChildStdout>,
}

/// Number of commands run at any console of this process. A reopened console repeats earlier
/// output, which has other numbers.
static COMMANDS: AtomicU32 = AtomicU32::new(0);

/// How long a command may take in a slow node, in seconds.
const PATIENCE: u64 = 120;

/// The last line that a guest's kernel prints, after everything there is to know.
const PANIC: &str = "end Kernel panic - not syncing";

impl Console {
    /// Runs a command in the node whose input and output are a console's.
    #[track_caller]
    pub fn open(case: &Case, command: &str) -> Self {
        must(Self::spawn(case.node().ssh_command().args(["--", command])))
    }

    /// Runs a command whose input and output are a console's.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the console")?;
        let input = child.stdin.take().context("the console's input")?;
        let output = Follow::ends_with(child.stdout.take().context("the console's output")?, PANIC);
        Ok(Console { child, input, output })
    }

    /// Waits until a busybox guest has booted.
    #[track_caller]
    pub fn booted(&mut self) -> String {
        self.until("GUEST-READY", BOOT)
    }

    /// Reads on until `wanted` has come; see [`Follow::until`].
    #[track_caller]
    pub fn until(&mut self, wanted: &str, seconds: u64) -> String {
        must(self.try_until(wanted, seconds))
    }

    /// Like [`Self::until`], for a caller that handles the failure.
    pub fn try_until(&mut self, wanted: &str, seconds: u64) -> Result<String> {
        step(
            || format!("until {wanted}"),
            || self.output.until(wanted, Deadline::seconds(seconds)),
        )
    }

    /// Types a line.
    #[track_caller]
    pub fn type_line(&mut self, line: &str) {
        must(self.try_type_line(line));
    }

    /// Like [`Self::type_line`], for a caller that handles the failure.
    pub fn try_type_line(&mut self, line: &str) -> Result<()> {
        self.input.write_all(line.as_bytes()).context("type")?;
        self.input.write_all(b"\n").context("type")?;
        self.input.flush().context("type")
    }

    /// Runs a command in the guest's shell and returns its output; the command must end with 0, in two minutes.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        must(self.try_run(command))
    }

    /// Like [`Self::run`], with another limit in seconds.
    #[track_caller]
    pub fn run_within(&mut self, command: &str, seconds: u64) -> String {
        must(self.try_run_within(command, seconds))
    }

    /// Like [`Self::run`], for a caller that handles the failure.
    pub fn try_run(&mut self, command: &str) -> Result<String> {
        self.try_run_within(command, PATIENCE)
    }

    fn try_run_within(&mut self, command: &str, seconds: u64) -> Result<String> {
        let n = COMMANDS.fetch_add(1, Ordering::Relaxed) + 1;
        let (begin, end) = (format!("begin-{n}:"), format!(":end-{n}="));
        // The guest assembles the marks, so the echo of the typed line does not contain them.
        self.try_type_line(&format!(
            "printf '%s-%s:' begin {n}; {command}; printf ':%s-%s=%s;' end {n} $?"
        ))?;
        let (text, status) = step(
            || format!("guest: {command}"),
            || {
                self.output.until(&begin, Deadline::seconds(seconds))?;
                let text = self.output.until(&end, Deadline::seconds(seconds))?;
                let status = self.output.until(";", Deadline::seconds(seconds))?;
                anyhow::Ok((text, status))
            },
        )?;
        let text = text.trim_end_matches(&end).replace("\r\n", "\n");
        ensure!(
            status == "0;",
            "`{command}` in the guest ended with {status} {text}"
        );
        Ok(text)
    }

    /// Waits until input reaches the guest's shell again: `vmmctl console` drops input while the
    /// daemon is gone.
    #[track_caller]
    pub fn attached_again(&mut self) {
        let deadline = Deadline::seconds(PATIENCE);
        for attempt in 1.. {
            // Put together in the guest, so that the echo is not taken for the answer.
            self.type_line(&format!("printf '%s-%s;' here {attempt}"));
            let answer = self.output.until(
                &format!("here-{attempt};"),
                deadline.at_most(Duration::from_secs(2)),
            );
            match answer {
                Err(error) if deadline.passed() => must(Err(error)),
                Err(_) => {}
                Ok(_) => return,
            }
        }
    }

    /// All that was read so far.
    pub fn text(&self) -> String {
        self.output.text()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
