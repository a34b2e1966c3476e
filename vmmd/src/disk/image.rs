//! `vmm-image` on the images of disks: a child without rights makes and changes them ([`vmmd_host::image_process`]).

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use vmmd_host::{failure::Failure, image_process::Job, sys::clone::FIRST_FD};
use vmmd_spec::disk::{Format, Preallocation};

use crate::host::Host;

/// How long work on tables may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to reserve all space, which some file systems do by writing it.
const DEADLINE_FULL: Duration = Duration::from_secs(3600);

/// Operation on an image file.
#[derive(Debug)]
pub struct Task {
    /// `create` or `resize`.
    pub command: &'static str,
    /// The image, open for reading and writing.
    pub image: OwnedFd,
    /// How it is to be read.
    pub format: Format,
    /// Virtual size in bytes.
    pub size: u64,
    /// Space to be reserved.
    pub preallocation: Preallocation,
    /// Backing files, nearest first, open for reading.
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
        let mut arguments = Vec::new();
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
    let deadline = if task.preallocation == Preallocation::Full {
        DEADLINE_FULL
    } else {
        DEADLINE
    };
    let arguments = task.arguments();
    let backing = task.backing.into_iter().map(|(fd, _)| fd);
    let job = Job {
        command: task.command,
        arguments,
        fds: std::iter::once(task.image).chain(backing).collect(),
        deadline,
    };
    host.image_processes.run(job, |_| {}).await.map(drop)
}
