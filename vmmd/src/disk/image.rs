//! `vmm image`: what has to understand an image is done by a child without rights, which gets open descriptors only
//! and a user id of its own for as long as it runs.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use proto::model::disk::{Format, Preallocation};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{io::AsyncReadExt, net::unix::pipe, task::spawn_blocking, time::timeout};

use super::file;
use crate::{
    failure::Failure,
    host::Host,
    sys::clone::{self, FIRST_FD, Program},
    text,
    vm::Process,
};

/// Longest output that is read, in bytes.
const MAX_OUTPUT: u64 = 64 << 10;
/// How long work on tables may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to reserve all space, which some file systems do by writing it.
const DEADLINE_FULL: Duration = Duration::from_secs(3600);

/// What is to be done with an image.
#[derive(Debug)]
pub struct Task {
    /// `create` or `resize`.
    pub command: &'static str,
    /// The image, open for reading and writing.
    pub image: OwnedFd,
    /// How it is to be read.
    pub format: Format,
    /// What the guest is to see, in bytes.
    pub size: u64,
    /// Space to be reserved.
    pub preallocation: Preallocation,
    /// What is below it, the nearest first, open for reading.
    pub backing: Vec<(OwnedFd, Format)>,
}

impl Task {
    fn arguments(&self) -> Vec<String> {
        let word = |format| match format {
            Format::Qcow2 => "qcow2",
            Format::Raw | Format::Iso => "raw",
        };
        let preallocation = match self.preallocation {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Full => "full",
        };
        let mut arguments = vec!["vmm".to_owned(), "image".to_owned(), self.command.to_owned()];
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("--fd", FIRST_FD.to_string());
        add("--format", word(self.format).to_owned());
        add("--size", self.size.to_string());
        if self.preallocation != Preallocation::Off {
            add("--preallocation", preallocation.to_owned());
        }
        for (number, (_, format)) in (FIRST_FD + 1..).zip(&self.backing) {
            add("--backing-fd", number.to_string());
            add("--backing-format", word(*format).to_owned());
        }
        arguments
    }
}

/// Does it. When the caller goes away, the child is ended.
pub async fn run(host: &Arc<Host>, task: Task) -> Result<(), Failure> {
    let claim = host.ledger.claim("vmm image")?;
    let deadline = if task.preallocation == Preallocation::Full {
        DEADLINE_FULL
    } else {
        DEADLINE
    };
    let failed = |error: &io::Error| file::failed("run `vmm image`", error);
    let (output, output_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(&errno.into()))?;
    let (errors, errors_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(&errno.into()))?;
    let (blocking_host, uid, command) = (Arc::clone(host), claim.uid(), task.command);
    let child = spawn_blocking(move || {
        let executable = blocking_host.open_vmm()?;
        let arguments: Vec<_> = task
            .arguments()
            .into_iter()
            .filter_map(|argument| CString::new(argument).ok())
            .collect();
        let backing = task.backing.iter().map(|(fd, _)| fd.as_fd());
        let fds: Vec<_> = std::iter::once(task.image.as_fd()).chain(backing).collect();
        let program = Program {
            executable: executable.as_fd(),
            arguments: &arguments,
            fds: &fds,
            output: Some(output_end.as_fd()),
            log: errors_end.as_fd(),
            uid,
            cgroup: None,
            namespaces: None,
        };
        clone::spawn(&program).map_err(|error| failed(&error))
    });
    let child = child
        .await
        .unwrap_or_else(|error| Err(failed(&io::Error::other(error))))?;
    let child = Child(Some(child.watched(Process::new).map_err(|error| failed(&error))?));
    let (output, errors) = (
        pipe::Receiver::from_owned_fd(output).map_err(|error| failed(&error))?,
        pipe::Receiver::from_owned_fd(errors).map_err(|error| failed(&error))?,
    );
    let all = async { tokio::join!(read(output), read(errors), child.status()) };
    let Ok((_, errors, exit)) = timeout(deadline, all).await else {
        let message = format!(
            "`vmm image {command}` did not end within {} s",
            deadline.as_secs()
        );
        return Err(Failure::internal(message));
    };
    if exit == Some(0) {
        return Ok(());
    }
    tracing::warn!(command, ?exit, errors, "vmm image");
    Err(refused(command, &errors))
}

/// The last line that the child wrote, in the words of the API.
fn refused(command: &str, errors: &str) -> Failure {
    let line = errors.lines().rev().find(|line| !line.trim().is_empty());
    let message = match line {
        Some(line) => text::brief_line(line.strip_prefix("vmm: ").unwrap_or(line)),
        None => {
            format!("`vmm image {command}` failed without a word; is the installed vmm the daemon's version?")
        }
    };
    // The child's words for ENOSPC and EFBIG are those of strerror(3).
    if message.contains("No space left") || message.contains("File too large") {
        let kind = if message.contains("No space left") {
            io::ErrorKind::StorageFull
        } else {
            io::ErrorKind::FileTooLarge
        };
        return file::failed("make the image", &kind.into());
    }
    Failure::precondition("IMAGE_UNUSABLE", message)
}

async fn read(pipe: pipe::Receiver) -> String {
    let mut bytes = Vec::new();
    // What comes beyond that fails in the child, when this end is closed.
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
