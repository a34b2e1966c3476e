//! The kernel that is installed on a disk of the VM, for a VM that boots that one. A process without rights looks for it, and copies it and its
//! initial RAM disk into files without names: the guest may write to the disk again while the machine is still to be reset with them.

use std::{fs::File, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::task::spawn_blocking;
use vmmd_host::failure::Failure;
use vmmd_spec::vm::{Boot, MAX_CMDLINE, VmSpec};

use super::{disk_job, failures::failed};
use crate::{files::Files, host::Host};

/// How long it may take to find and copy it. From a slow disk 100 MiB take a while.
const DEADLINE: Duration = Duration::from_secs(60);

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
    let (kernel, initrd) = scratch(host).await?;
    let block = position.and_then(|position| spec.disks.get(position));
    let block = block.map_or(512, |disk| disk.logical_block);
    let again = |file: &File| file.try_clone().map(OwnedFd::from);
    let further = [("--kernel-fd", again(&kernel)), ("--initrd-fd", again(&initrd))];
    let further = further.into_iter().map(|(option, fd)| Ok((option, fd?)));
    let job = further
        .collect::<io::Result<_>>()
        .and_then(|further| disk_job("boot", opened, block, further, DEADLINE))
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
