//! Disks of vmmd for a run: from images, which the node keeps, or of zeroes. They have the label of
//! the pod's uid, and are deleted after the VM. Disks of forcibly removed pods are deleted later.

use tonic::{Code, Status};
use vmmd_api::{v1, well_known};

use super::{Error, Lack, MAKING_DISK, Objects, Provisioner, RunPod, images::NoImage};
use crate::{
    daemon::{self, CALL, Daemon, within},
    names,
    sources::{self, SecretName, Volume},
};

/// How long an image of which no disk is made is kept, in seconds: a week.
const KEEP_IMAGES: i64 = 7 * 24 * 3600;

/// Why a run has no disk.
pub enum NoDisk {
    /// The disk cannot be created yet.
    Lacks(Lack),
    /// vmmd does not make it.
    Refused(Box<Status>),
}

impl Provisioner {
    /// The name of the disk for a volume of a pod's run, which is made when it is not there.
    pub async fn disk(
        &self,
        pod: &RunPod,
        volume: &Volume,
        secrets: &[SecretName],
        objects: &impl Objects,
    ) -> Result<Result<String, NoDisk>, Error> {
        let name = names::disk_name(&volume.name, &pod.uid);
        let making = || {
            let message = format!("the disk of volume {} is being made", volume.name);
            Ok(Err(NoDisk::Lacks(Lack::new(MAKING_DISK, message))))
        };
        if let Some(disk) = self.daemon.disk(&name).await? {
            let phase = disk.status.map(|status| status.phase()).unwrap_or_default();
            return match phase {
                v1::DiskPhase::Ready | v1::DiskPhase::Resizing => Ok(Ok(name)),
                _ => making(),
            };
        }
        let mut spec = v1::VolumeSpec::default();
        if let Some(disk) = &volume.container_disk {
            let image = match self.image(pod, &disk.image, secrets, objects).await? {
                Ok(image) => image,
                Err(NoImage::Lacks(lack)) => return Ok(Err(NoDisk::Lacks(lack))),
                Err(NoImage::Refused(status)) => return Ok(Err(NoDisk::Refused(status))),
            };
            spec.source = Some(v1::volume_spec::Source::Image(v1::ImageClone {
                name: image,
                clone: v1::DiskClone::Overlay.into(),
            }));
            // The controller has checked it.
            let size = disk.size.as_ref().map(sources::bytes);
            spec.size_bytes = size.and_then(Result::ok).unwrap_or_default();
        }
        if let Some(disk) = &volume.empty_disk {
            spec.size_bytes = sources::bytes(&disk.size).unwrap_or_default();
        }
        let request = v1::CreateDiskRequest {
            disk: Some(v1::Disk {
                metadata: Some(self.metadata(name.clone(), pod, &volume.name)),
                spec: Some(spec),
                status: None,
            }),
            ..v1::CreateDiskRequest::default()
        };
        match within(CALL, self.daemon.disks.clone().create_disk(request)).await {
            Ok(_) => Ok(Ok(name)),
            Err(status) if status.code() == Code::AlreadyExists => making(),
            Err(status) if daemon::refused(&status) => Ok(Err(NoDisk::Refused(Box::new(status)))),
            Err(status) => Err(status.into()),
        }
    }

    fn metadata(&self, name: String, pod: &RunPod, volume: &str) -> v1::ObjectMetadata {
        let pair = |key: &str, value: String| (key.to_owned(), value);
        v1::ObjectMetadata {
            name,
            labels: pod.labels(&self.node).into(),
            annotations: [
                pair(names::POD, pod.path()),
                pair(names::VOLUME, volume.to_owned()),
            ]
            .into(),
            owner: names::MANAGER.to_owned(),
            ..v1::ObjectMetadata::default()
        }
    }

    /// Deletes the disks that were made for a pod whose VM is gone.
    pub async fn delete_disks(&self, uid: &str) -> Result<(), Error> {
        for disk in list(&self.daemon, names::POD_UID, uid).await? {
            delete(&self.daemon, &disk).await?;
        }
        Ok(())
    }

    /// All disks that the agent of this node has made for runs.
    pub async fn disks(&self) -> Result<Vec<v1::Disk>, Error> {
        Ok(list(&self.daemon, names::AGENT, &self.node).await?)
    }

    /// Deletes the images of which no disk was made for a week.
    pub async fn prune_images(&self) -> Result<(), Error> {
        let request = v1::PruneImagesRequest {
            filter: Some(v1::ObjectFilter {
                labels: vec![format!("{}={}", names::AGENT, self.node)],
                ..v1::ObjectFilter::default()
            }),
            older_than: Some(well_known::Duration {
                seconds: KEEP_IMAGES,
                nanos: 0,
            }),
            ..v1::PruneImagesRequest::default()
        };
        within(CALL, self.daemon.images.clone().prune_images(request)).await?;
        Ok(())
    }
}

async fn list(daemon: &Daemon, label: &str, value: &str) -> Result<Vec<v1::Disk>, Status> {
    let mut found = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = v1::ListDisksRequest {
            filter: Some(v1::ObjectFilter {
                labels: vec![format!("{label}={value}")],
                ..v1::ObjectFilter::default()
            }),
            page_token,
            ..v1::ListDisksRequest::default()
        };
        let page = within(CALL, daemon.disks.clone().list_disks(request)).await?;
        found.extend(page.disks);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(found);
        }
    }
}

/// Deletes a disk. vmmd refuses to delete a disk of a VM.
pub async fn delete(daemon: &Daemon, disk: &v1::Disk) -> Result<(), Status> {
    let metadata = disk.metadata.clone().unwrap_or_default();
    let request = v1::DeleteDiskRequest {
        name: metadata.name,
        preconditions: Some(v1::Preconditions {
            uid: metadata.uid,
            generation: None,
        }),
        ..v1::DeleteDiskRequest::default()
    };
    match within(CALL, daemon.disks.clone().delete_disk(request)).await {
        Err(status) if status.code() != Code::NotFound => Err(status),
        _ => Ok(()),
    }
}
