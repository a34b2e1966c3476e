//! A disk as the API shows it.

use std::{io, os::unix::fs::MetadataExt, sync::Arc};

use vmmd_api::v1::{self, ConditionStatus};
use vmmd_host::{failure::Failure, text};
use vmmd_store::DiskStage;

use crate::{
    host::Host,
    paths::disk::Folder,
    registry::disks::{Seen, shown},
};

/// Adds the state of the disk's file. Blocking.
pub fn look(folder: &Folder, seen: &Seen) -> v1::Disk {
    let (record, mut disk) = (&seen.record, shown::disk(folder, seen));
    let Some(status) = &mut disk.status else {
        return disk;
    };
    match std::fs::metadata(folder.path(record)) {
        // stat(2): blocks of 512 bytes.
        Ok(metadata) => status.allocated_bytes = metadata.blocks().saturating_mul(512),
        Err(error) if record.stage() == DiskStage::Ready => {
            for condition in &mut status.conditions {
                condition.status = ConditionStatus::False.into();
                let missing = error.kind() == io::ErrorKind::NotFound;
                let reason = if missing { "FileMissing" } else { "FileUnusable" };
                condition.reason = reason.to_owned();
                condition.message = format!("the disk's file: {}", text::words(&error));
                // The time of this change is unknown.
                condition.transition_time = None;
            }
        }
        Err(_) => {}
    }
    disk
}

/// [`look`] for many, from an async task.
pub async fn look_at(host: &Arc<Host>, seen: Vec<Arc<Seen>>) -> Result<Vec<v1::Disk>, Failure> {
    let folder = host.disk_folder();
    let paths = [folder.root()];
    let looking = host.pools.files.run(&paths, move || {
        seen.iter().map(|seen| look(&folder, seen)).collect()
    });
    looking.await
}

/// The disk with this UUID, as it is now.
pub async fn by_uid(host: &Arc<Host>, uid: &[u8]) -> Option<Result<v1::Disk, Failure>> {
    let seen = host.disks.registry.find(uid)?;
    let looked = look_at(host, vec![seen]).await;
    Some(looked.map(|mut disks| disks.pop().unwrap_or_default()))
}
