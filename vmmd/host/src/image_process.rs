//! Runs `vmm-image` in an unprivileged process. The parser of an image has only open descriptors,
//! and a user id of its own for its run.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use crate::{
    cgroup::{Parent, plan::Limits},
    failure::{Failure, file_failed},
    ledger::Ledger,
    process::{Process, open_program},
    sys::clone::{self, Network, Program},
    text,
};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    net::unix::pipe,
    task::spawn_blocking,
    time::timeout,
};

/// Longest line, and longest text of errors, that is read, in bytes.
const MAX_OUTPUT: u64 = 64 << 10;
/// Most lines that are read.
const MAX_LINES: usize = 1 << 20;

/// Cgroup of the processes, beside those of the VMs.
const GROUP: &str = "images";
/// Limits of all these processes together. Each process has 2 GiB of address space, most of it for tables and dictionaries that ordinary images do not need. Files that
/// they write count too, and are written back earlier then. Each has up to four threads.
const LIMITS: Limits = Limits {
    memory: 2 << 30,
    tasks: 4096,
};

/// A run of `vmm-image`.
#[derive(Debug)]
pub struct Job {
    /// `create`: what follows `vmm-image`.
    pub command: &'static str,
    /// What follows that.
    pub arguments: Vec<String>,
    /// Its descriptors, from [`clone::FIRST_FD`] on.
    pub fds: Vec<OwnedFd>,
    /// How long it may take.
    pub deadline: Duration,
}

/// The program `vmm-image`, and what its processes get.
#[derive(Debug)]
pub struct ImageProcesses {
    /// Path of the program.
    pub program: PathBuf,
    /// Has user ids for the processes.
    pub ledger: Arc<Ledger>,
    /// Where their cgroup is made; `None` for processes without one.
    pub cgroups: Option<Parent>,
}

impl ImageProcesses {
    /// Runs the job. Returns the last line that the process wrote; `line` receives the others as they
    /// arrive. The process ends when the caller drops the future.
    pub async fn run(&self, job: Job, mut line: impl FnMut(&str) + Send) -> Result<String, Failure> {
        let claim = self.ledger.claim("vmm-image")?;
        let (command, deadline) = (job.command, job.deadline);
        let failed = |error: &io::Error| file_failed("run `vmm-image`", error);
        let (output, output_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(&errno.into()))?;
        let (errors, errors_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(&errno.into()))?;
        let (program, cgroups, user) = (self.program.clone(), self.cgroups.clone(), claim.user());
        let child = spawn_blocking(move || {
            let executable = open_program(&program, "vmm-image")?;
            let words = ["vmm-image", job.command].into_iter().map(str::to_owned);
            let arguments: Vec<_> = words
                .chain(job.arguments)
                .filter_map(|argument| CString::new(argument).ok())
                .collect();
            let fds: Vec<_> = job.fds.iter().map(AsFd::as_fd).collect();
            let group = cgroups.as_ref().and_then(|parent| {
                let made = parent.for_helpers(GROUP, LIMITS);
                let warn =
                    |error: &io::Error| tracing::warn!(%error, "`vmm-image` stays in the daemon's cgroup");
                made.inspect_err(warn).ok()
            });
            let child = Program {
                executable: executable.as_fd(),
                arguments: &arguments,
                fds: &fds,
                output: Some(output_end.as_fd()),
                log: errors_end.as_fd(),
                uid: user,
                network: Network::Empty,
                cgroup: group.as_ref().map(AsFd::as_fd),
                namespaces: None,
            };
            clone::spawn(&child).map_err(|error| failed(&error))
        });
        let child = child
            .await
            .unwrap_or_else(|error| Err(failed(&io::Error::other(error))))?;
        let child = Child(Some(child.watched(Process::new).map_err(|error| failed(&error))?));
        let (output, errors) = (
            pipe::Receiver::from_owned_fd(output).map_err(|error| failed(&error))?,
            pipe::Receiver::from_owned_fd(errors).map_err(|error| failed(&error))?,
        );
        let all = async { tokio::join!(lines(output, &mut line), read(errors), child.status()) };
        let Ok((last, errors, exit)) = timeout(deadline, all).await else {
            let message = format!(
                "`vmm-image {command}` did not end within {} s",
                deadline.as_secs()
            );
            return Err(Failure::internal(message));
        };
        if exit == Some(0) {
            return Ok(last);
        }
        tracing::warn!(command, ?exit, errors, "vmm-image");
        Err(refused(command, &errors))
    }
}

/// The last line that the child wrote, in the words of the API.
fn refused(command: &str, errors: &str) -> Failure {
    let line = errors.lines().rev().find(|line| !line.trim().is_empty());
    let message = match line {
        Some(line) => text::brief_line(line.strip_prefix("vmm-image: ").unwrap_or(line)),
        None => {
            format!(
                "`vmm-image {command}` failed without a word; is the installed vmm-image the daemon's version?"
            )
        }
    };
    // The child's words for ENOSPC and EFBIG are those of strerror(3).
    if message.contains("No space left") || message.contains("File too large") {
        let kind = if message.contains("No space left") {
            io::ErrorKind::StorageFull
        } else {
            io::ErrorKind::FileTooLarge
        };
        return file_failed("make the image", &kind.into());
    }
    Failure::precondition("IMAGE_UNUSABLE", message)
}

/// Returns the last line.
async fn lines(pipe: pipe::Receiver, line: &mut (impl FnMut(&str) + Send)) -> String {
    let mut reader = BufReader::new(pipe);
    let mut last = String::new();
    for _ in 0..MAX_LINES {
        let mut bytes = Vec::new();
        let count = (&mut reader).take(MAX_OUTPUT).read_until(b'\n', &mut bytes).await;
        if !count.is_ok_and(|count| count > 0) {
            break;
        }
        if !last.is_empty() {
            line(&last);
        }
        last = String::from_utf8_lossy(&bytes).trim_end().to_owned();
    }
    last
}

async fn read(pipe: pipe::Receiver) -> String {
    let mut bytes = Vec::new();
    // When this end closes, the child's further writes fail.
    let _ = pipe.take(MAX_OUTPUT).read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Ends the child when it is dropped before it has ended.
struct Child(Option<Process>);

impl Child {
    /// Its exit code, if it has one.
    async fn status(&self) -> Option<i32> {
        self.0.as_ref()?.status().await?.exit_status()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(process) = self.0.take() {
            // Both do nothing when it has ended and was reaped.
            process.kill();
            tokio::spawn(async move { process.status().await.is_some() });
        }
    }
}
