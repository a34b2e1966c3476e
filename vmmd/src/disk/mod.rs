//! Disks of the DiskService: a record in the store and a file `<state_dir>/disks/<uid>.{raw,qcow2}` each.
//!
//! ```text
//!  (none) ──record──▶ Creating ──file whole and synced──▶ Ready ──record──▶ Deleting ──file gone──▶ (none)
//! ```
//!
//! Always: a file exists only while its record does, so that what an interrupted create or delete leaves is found by
//! its record at the next start; a file without a record is never touched. A disk with overlays is named by no VM that
//! writes to it, and is deleted after its overlays only ([`registry`] keeps both under one lock).

mod copy;
mod create;
mod file;
mod image;
mod registry;
mod resize;

use std::sync::Arc;

use proto::v1;
use tokio::task::spawn_blocking;
use uuid::Uuid;

pub use create::create;
pub use file::{Folder, failed as file_failed};
pub use registry::Registry;
pub use resize::{Growing, block_device, grow, grow_record, note, reserve_growth, resize, shrink_refused};

use crate::{
    context::Context,
    event::{Draft, Object},
    failure::Failure,
    host::Host,
    request,
    store::{DiskRecord, DiskStage},
    vm::store_failure,
};

/// Deletes a disk and its content.
pub async fn delete(host: &Arc<Host>, name: &str, context: &Context) -> Result<(), Failure> {
    let mut record = host.disks.begin_delete(name)?;
    record.stage = DiskStage::Deleting.into();
    if let Err(failure) = retire(host, &record, context).await {
        record.stage = DiskStage::Ready.into();
        host.disks.settle(record);
        return Err(failure);
    }
    finish(host, &record).await;
    tell(
        host,
        &record,
        "DiskDeleted",
        "the disk was deleted with what was on it",
    );
    Ok(())
}

/// Writes that the disk goes, together with the answer to who asked for that: the next daemon carries on with what this
/// one has begun. Who asked an earlier daemon for the disk's creation is answered as well: its retry must not make
/// another one.
async fn retire(host: &Arc<Host>, record: &DiskRecord, context: &Context) -> Result<(), Failure> {
    let mark = host.requests.mark(context);
    let mut answered: Vec<_> = mark
        .map(|mark| request::done(mark, &v1::DeleteDiskResponse::default()))
        .into_iter()
        .collect();
    let creation = request::unanswered(host, &record.begun, "CreateDisk").await;
    if let Some(mark) = creation.map_err(store_failure)? {
        let disk = create::describe(host, record.clone()).await?;
        answered.push(request::done(mark, &v1::CreateDiskResponse { disk: Some(disk) }));
    }
    host.store
        .retire_disk(record, answered)
        .await
        .map_err(store_failure)
}

/// Tells an event of a disk.
fn tell(host: &Host, record: &DiskRecord, reason: &str, message: impl Into<String>) {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    let object = Object::Disk(record.name.clone(), uid);
    host.events.emit(Draft::normal(object, reason, message));
}

/// Removes a disk's file, then its record. What fails here is done at the daemon's next start.
async fn finish(host: &Arc<Host>, record: &DiskRecord) {
    let (folder, of) = (host.disk_folder(), record.clone());
    let removed = spawn_blocking(move || folder.remove(&of)).await;
    match removed {
        Ok(Ok(())) => {
            if let Err(error) = host.store.remove_disk(&record.uid).await {
                tracing::error!(disk = record.name, %error, "the disk's record could not be removed");
            }
        }
        Ok(Err(error)) => tracing::error!(disk = record.name, %error, "the disk's file could not be removed"),
        Err(error) => tracing::error!(disk = record.name, %error, "remove a disk"),
    }
    host.disks.forget(&record.name);
}

/// Takes over the disks of the store at the daemon's start, and ends what was interrupted.
pub async fn restore(host: &Arc<Host>, records: Vec<DiskRecord>) {
    for mut record in records {
        if Uuid::from_slice(&record.uid).is_err() {
            tracing::error!(disk = record.name, "record without a valid uid ignored");
            continue;
        }
        if record.stage() != DiskStage::Ready {
            let what = if record.stage() == DiskStage::Deleting {
                "deletion"
            } else {
                "creation"
            };
            let message =
                format!("the disk's {what} had been interrupted: what was left of the disk is removed");
            tell(host, &record, "Repaired", message);
            finish(host, &record).await;
            continue;
        }
        // It may have grown in the moment before the last daemon ended.
        let (folder, of) = (host.disk_folder(), record.clone());
        match spawn_blocking(move || folder.size(&of)).await {
            Ok(Ok(size)) if size > record.size_bytes => {
                let message = format!("the disk has become larger while no daemon noted it: {size} bytes");
                tell(host, &record, "Repaired", message);
                record.size_bytes = size;
                if let Err(error) = host.store.put_disk(&record).await {
                    tracing::warn!(disk = record.name, %error, "note the disk's size");
                }
            }
            Ok(Err(error)) => tracing::warn!(disk = record.name, %error, "look at the disk's file"),
            _ => {}
        }
        host.requests.adopt_disk(&record);
        host.disks.settle(record);
    }
}
