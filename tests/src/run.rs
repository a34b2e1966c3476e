//! Execution of other programs, with captured output, a deadline, and errors that contain the
//! command.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};

use crate::steps::step;
use crate::wait::{Deadline, Process, tail};

/// Result of a program.
#[derive(Debug)]
pub struct Output {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Output {
    /// Whether it ended with 0.
    pub fn success(&self) -> bool {
        self.status.success()
    }
}

/// Runs `command` to its end and returns its output, for any exit status. At the deadline the
/// command is killed, and the call fails.
pub fn output(command: &mut Command, deadline: Deadline) -> Result<Output> {
    output_with_input(command, None, deadline)
}

/// Like [`output`], with `input` on its standard input.
pub fn output_with_input(
    command: &mut Command,
    input: Option<Box<dyn Read + Send>>,
    deadline: Deadline,
) -> Result<Output> {
    let what = describe(command);
    // A command over ssh follows "--".
    let words = || what.rsplit(" -- ").next().unwrap_or(&what).to_owned();
    step(words, || to_its_end(command, &what, input, deadline))
}

fn to_its_end(
    command: &mut Command,
    what: &str,
    input: Option<Box<dyn Read + Send>>,
    deadline: Deadline,
) -> Result<Output> {
    command.stdin(if input.is_some() {
        Stdio::piped()
    } else {
        Stdio::null()
    });
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {what}"))?;
    let feeder = match (input, child.stdin.take()) {
        (Some(mut input), Some(mut stdin)) => Some(std::thread::spawn(move || -> Result<()> {
            std::io::copy(&mut input, &mut stdin)?;
            stdin.flush()?;
            Ok(())
        })),
        _ => None,
    };
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let ended = match Process::open(child.id())? {
        Some(process) => process.wait_exit(deadline)?,
        None => true,
    };
    if !ended {
        kill(&mut child);
        let printed = gather(stdout)? + &gather(stderr)?;
        bail!(
            "{what} did not end within {deadline}; it printed:\n{}",
            tail(&printed, 40)
        );
    }
    let status = child.wait().with_context(|| format!("wait for {what}"))?;
    let output = Output {
        status,
        stdout: gather(stdout)?,
        stderr: gather(stderr)?,
    };
    if let Some(feeder) = feeder {
        let fed = feeder
            .join()
            .map_err(|_| anyhow::anyhow!("the thread feeding {what} panicked"))?;
        if output.success() {
            fed.with_context(|| format!("write to {what}"))?;
        }
    }
    Ok(output)
}

/// Runs `command` and fails unless it ends with 0. Returns its standard output.
pub fn check(command: &mut Command, deadline: Deadline) -> Result<String> {
    let what = describe(command);
    let output = output(command, deadline)?;
    if !output.success() {
        bail!(
            "{what} ended with {}:\n{}",
            output.status,
            tail(&format!("{}{}", output.stdout, output.stderr), 40)
        );
    }
    Ok(output.stdout)
}

/// The command line as a person would type it.
pub fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

fn kill(child: &mut Child) {
    // Both fail only when it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

fn collect(stream: Option<impl Read + Send + 'static>) -> Option<JoinHandle<std::io::Result<Vec<u8>>>> {
    stream.map(|mut stream| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).map(|_| bytes)
        })
    })
}

fn gather(reader: Option<JoinHandle<std::io::Result<Vec<u8>>>>) -> Result<String> {
    let Some(reader) = reader else {
        return Ok(String::new());
    };
    let bytes = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the thread reading a program's output panicked"))??;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_program_past_its_deadline_is_killed_and_reported() {
        let error = output(
            Command::new("sleep").arg("60"),
            Deadline::after(Duration::from_millis(50)),
        )
        .expect_err("the deadline");
        assert!(
            error.to_string().contains("sleep 60 did not end within 50ms"),
            "{error}"
        );
    }

    #[test]
    fn input_and_output_go_through() {
        let input = Box::new(std::io::Cursor::new(b"hello".to_vec()));
        let output =
            output_with_input(&mut Command::new("cat"), Some(input), Deadline::seconds(10)).expect("cat");
        assert!(output.success());
        assert_eq!(output.stdout, "hello");
    }

    #[test]
    fn a_failure_names_the_command_and_its_words() {
        let error = check(
            Command::new("sh").args(["-c", "echo broken >&2; exit 3"]),
            Deadline::seconds(10),
        )
        .expect_err("exit 3");
        let text = error.to_string();
        assert!(text.contains("exit 3") && text.contains("broken"), "{text}");
    }
}
