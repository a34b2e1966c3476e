//! Volumes of a VM's pod: the launcher has passed a descriptor of each. The link of procfs to the descriptor (proc(5)) is the path by
//! which the volume is opened, so all checks of paths apply.

use std::{
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{OFlags, Stat};
use vmmd_host::{
    failure::Failure,
    roots::{self, Within},
};
use vmmd_spec::pod::PodVolume;

use super::{PATH_NOT_ALLOWED, Sources};
use crate::registry::pods::{NOT_CONNECTED, Pod, Volume};

/// The disk in a volume that is a directory.
const IMAGE: &str = "disk.img";

/// A volume of a connected pod. Its path is valid as long as this lives.
#[derive(Debug)]
pub(super) struct OpenVolume {
    /// Begin of messages about the disk.
    pub label: String,
    /// It is a block device.
    pub block_device: bool,
    path: PathBuf,
    /// The folder and the roots of a directory.
    beneath: Option<(PathBuf, [PathBuf; 1])>,
    /// Has the descriptor.
    _pod: Arc<Pod>,
}

/// The connected pod that has a volume.
pub(super) fn pod_of(volume: &PodVolume, sources: &Sources<'_>) -> Result<Arc<Pod>, Failure> {
    match &volume.pod {
        Some(uid) => sources.pods.connected(uid.as_str()),
        None => Err(Failure::precondition(
            NOT_CONNECTED,
            "the VM has no pod: give it a spec.pod",
        )),
    }
}

/// The path of a volume's descriptor.
fn link_of(volume: &Volume) -> PathBuf {
    format!("/proc/self/fd/{}", volume.fd.as_raw_fd()).into()
}

/// Finds the disk of a volume; `field` begins messages. Refused as POD_NOT_CONNECTED or POD_VOLUME_NOT_FOUND.
pub(super) fn open_volume(
    field: &str,
    volume: &PodVolume,
    sources: &Sources<'_>,
) -> Result<OpenVolume, Failure> {
    let pod = pod_of(volume, sources)?;
    let found = pod.volume(volume.name.as_str())?;
    let link = link_of(found);
    let block_device = found.block_device;
    let (path, beneath, what) = match block_device {
        true => (link, None, "the block device of"),
        false => (
            link.join(IMAGE),
            Some((link, [PathBuf::from("/")])),
            "disk.img in",
        ),
    };
    Ok(OpenVolume {
        label: format!("{field}: {what} volume \"{}\"", volume.name),
        block_device,
        path,
        beneath,
        _pod: pod,
    })
}

impl OpenVolume {
    /// The path of the disk, and where it may lead.
    pub fn path(&self) -> (&Path, Within<'_>) {
        let within = match &self.beneath {
            Some((folder, roots)) => Within::Beneath { folder, roots },
            None => Within::Own,
        };
        (&self.path, within)
    }

    /// The file or device, without opening it.
    pub fn stat(&self) -> Option<Stat> {
        let (path, within) = self.path();
        let found = roots::open(path, within, OFlags::PATH | OFlags::CLOEXEC).ok()?;
        rustix::fs::fstat(found).ok()
    }

    /// Refusal of a link or a special file in the volume.
    pub fn not_allowed(&self) -> Failure {
        let message = format!(
            "{} must be a regular file: it is a link or a special file, and neither is opened in a volume",
            self.label
        );
        Failure::precondition(PATH_NOT_ALLOWED, message)
    }
}

/// The directory of a share.
pub(super) fn share_folder(
    volume: &PodVolume,
    sources: &Sources<'_>,
) -> Result<(Arc<Pod>, PathBuf), Failure> {
    let pod = pod_of(volume, sources)?;
    let link = link_of(pod.volume(volume.name.as_str())?);
    Ok((pod, link))
}
