//! The kernel that is installed on a disk of the VM, for a VM that boots that one. A process without rights looks for it, and copies it and its
//! initial RAM disk into files without names: the guest may write to the disk again while the machine is still to be reset with them.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use serde::Deserialize;
use tokio::task::spawn_blocking;
use vmmd_host::{failure::Failure, image_process::Job, sys::clone::FIRST_FD};
use vmmd_spec::{
    disk::Format,
    vm::{Boot, MAX_CMDLINE, VmSpec},
};

use super::failures::failed;
use crate::{
    files::{Files, OpenDisk},
    host::Host,
};

/// How long it may take to find and copy it. From a slow disk 100 MiB take a while.
const DEADLINE: Duration = Duration::from_secs(60);
/// Descriptors before those of the images below: disk, kernel, initial RAM disk.
const OWN_FDS: usize = 3;

/// What `vmm-image boot` says.
#[derive(Deserialize)]
struct Found {
    kernel: String,
    initrd_bytes: u64,
    cmdline: String,
    by: String,
}

/// Puts the kernel on the VM's disk among its files, if it boots that one.
///
/// # Errors
///
/// There is none that can be booted, with the reason.
pub(super) async fn find(
    host: &Arc<Host>,
    name: &str,
    spec: &VmSpec,
    files: &mut Files,
) -> Result<(), Failure> {
    let Boot::Disk { disk, append } = &spec.boot else {
        return Ok(());
    };
    let position = spec.disks.iter().position(|one| one.name == *disk);
    let opened = position.and_then(|position| files.disks.get(position));
    let opened = opened.ok_or_else(|| Failure::internal("the disk to boot from is not among the VM's"))?;
    let internal = |error: &io::Error| failed("look for the kernel on the disk", error);
    let sources = Sources::of(opened).map_err(|error| internal(&error))?;
    let (kernel, initrd) = scratch(host).await?;
    let block = position.and_then(|position| spec.disks.get(position));
    let block = block.map_or(512, |disk| disk.logical_block);
    let job = sources
        .job(opened, block, &kernel, &initrd)
        .map_err(|error| internal(&error))?;
    let said = host
        .image_processes
        .run(job, |_| ())
        .await
        .map_err(|failure| match failure.reason {
            "IMAGE_UNUSABLE" => {
                let message = format!(
                    "spec.boot.fromDisk: disk \"{disk}\": {}; firmware can boot it (spec.boot.firmware)",
                    failure.message
                );
                Failure::precondition("KERNEL_NOT_FOUND", message)
            }
            _ => failure,
        })?;
    let found: Found = serde_json::from_str(&said)
        .map_err(|error| Failure::internal(format!("`vmm-image boot` said something unexpected: {error}")))?;
    let cmdline = format!("{} {append}", found.cmdline);
    let cmdline = cmdline.trim();
    if cmdline.len() > MAX_CMDLINE {
        let message = format!(
            "spec.boot.fromDisk.cmdlineAppend: the command line of the disk and this are {} bytes together, at most {MAX_CMDLINE} can be",
            cmdline.len()
        );
        return Err(Failure::precondition("CMDLINE_TOO_LONG", message));
    }
    // A command line may have secrets, and more people read the log than the VM's spec.
    tracing::info!(
        vm = name,
        kernel = found.kernel,
        by = found.by,
        "the kernel is one of the disk"
    );
    files.kernel = Some(kernel.into());
    files.initrd = (found.initrd_bytes != 0).then(|| initrd.into());
    cmdline.clone_into(&mut files.cmdline);
    Ok(())
}

/// Gives a VM that boots the kernel on its disk empty files for what its `vmm` at the other node sends. The disk is still empty, too.
pub(super) async fn expect(host: &Arc<Host>, files: &mut Files) -> Result<(), Failure> {
    let (kernel, initrd) = scratch(host).await?;
    files.kernel = Some(kernel.into());
    files.initrd = Some(initrd.into());
    Ok(())
}

/// Two files without names.
async fn scratch(host: &Arc<Host>) -> Result<(File, File), Failure> {
    let folder = host.image_folder();
    let made = spawn_blocking(move || {
        folder.make()?;
        Ok((folder.scratch()?, folder.scratch()?))
    });
    let made = made.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    made.map_err(|error| failed("look for the kernel on the disk", &error))
}

/// Images of a disk, reopened for reading through the page cache, without the lock of the VM's own
/// descriptors.
struct Sources {
    disk: OwnedFd,
    below: Vec<OwnedFd>,
}

impl Sources {
    fn of(opened: &OpenDisk) -> io::Result<Self> {
        let again = |fd: &OwnedFd| {
            Ok::<_, io::Error>(File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?.into())
        };
        Ok(Self {
            disk: again(&opened.fd)?,
            below: opened
                .backing
                .iter()
                .map(|(fd, _)| again(fd))
                .collect::<io::Result<_>>()?,
        })
    }

    fn job(self, opened: &OpenDisk, block: u32, kernel: &File, initrd: &File) -> io::Result<Job> {
        let number = |index: usize| FIRST_FD.saturating_add(index).to_string();
        let mut arguments = vec![
            "--fd".to_owned(),
            number(0),
            "--format".to_owned(),
            word(opened.format).to_owned(),
            "--logical-block".to_owned(),
            block.to_string(),
            "--kernel-fd".to_owned(),
            number(1),
            "--initrd-fd".to_owned(),
            number(2),
        ];
        for (index, (_, format)) in opened.backing.iter().enumerate() {
            arguments.extend(["--backing-fd".to_owned(), number(OWN_FDS.saturating_add(index))]);
            arguments.extend(["--backing-format".to_owned(), word(*format).to_owned()]);
        }
        let mut fds = vec![self.disk, kernel.try_clone()?.into(), initrd.try_clone()?.into()];
        fds.extend(self.below);
        Ok(Job {
            command: "boot",
            arguments,
            fds,
            deadline: DEADLINE,
        })
    }
}

fn word(format: Format) -> &'static str {
    match format {
        Format::Raw | Format::Iso => "raw",
        Format::Qcow2 => "qcow2",
    }
}
