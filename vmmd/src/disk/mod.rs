//! Disks of the DiskService. Each has a record in the store, a file
//! `<state_dir>/disks/<uid>.{raw,qcow2}`, and `<uid>.json` beside it with a copy of the record
//! ([`crate::paths::sidecar`]).
//!
//! ```text
//!  (none) ──record──▶ Creating ──file whole and synced──▶ Ready ──record──▶ Deleting ──file gone──▶ (none)
//! ```
//!
//! Invariants: a file exists only while its record exists. The next start therefore finds the
//! remains of an interrupted create or delete by the record. The daemon never touches a file
//! without a record. No VM that writes to a disk may name a disk with overlays, and such a disk is
//! deleted only after its overlays ([`crate::registry`] keeps both under one lock).

mod adopt;
mod copy;
mod create;
pub mod describe;
mod image;
pub mod moved;
mod operation;
mod resize;
mod room;
mod update;

use std::{path::PathBuf, sync::Arc};

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmmd_api::v1;

pub use copy::{copy, extent};
pub use create::{create, take_in};
pub use resize::{Growing, block_device, grow, grow_record, note, reserve_growth, shrink_refused};
pub use update::update;

use vmmd_host::{failure::Failure, text};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::{Type, interrupted},
    request,
};
use vmmd_store::store_failure;
use vmmd_store::{DiskRecord, DiskStage};

use crate::{host::Host, paths::sidecar::Sidecar};

/// Most files that are named in one event.
const NAMED: usize = 5;

/// Deletes a disk and its content.
pub async fn delete(host: &Arc<Host>, name: &str, context: &Context) -> Result<(), Failure> {
    let record = begin_removal(host, name, context, |record| update::expected(record, context)).await?;
    finish(host, &record).await;
    tell(
        host,
        &record,
        "DiskDeleted",
        "the disk was deleted with what was on it",
    );
    Ok(())
}

/// Takes a disk out of use for good, and writes that; `check` may refuse it. [`finish`] follows.
async fn begin_removal(
    host: &Arc<Host>,
    name: &str,
    context: &Context,
    check: impl FnOnce(&DiskRecord) -> Result<(), Failure>,
) -> Result<DiskRecord, Failure> {
    if let Some(snapshot) = host
        .disks
        .get(name)
        .ok()
        .and_then(|disk| host.snapshots.needs(&disk.uid))
    {
        let message = format!("snapshot \"{snapshot}\" has an overlay of disk \"{name}\": delete that first");
        return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
    }
    let _edit = host.disks.edit().await;
    let mut record = host.disks.begin_delete(name, check)?;
    record.stage = DiskStage::Deleting.into();
    record.stage_ms = text::now_ms();
    if let Err(failure) = retire(host, &record, context).await {
        record.stage = DiskStage::Ready.into();
        host.disks.registry.settle(record);
        return Err(failure);
    }
    Ok(record)
}

/// Stores the deletion of the disk together with the response to the delete request. The next
/// daemon continues a deletion that this daemon has begun. The function also stores the response to
/// a CreateDisk request that an earlier daemon did not answer: its retry must not create another
/// disk.
async fn retire(host: &Arc<Host>, record: &DiskRecord, context: &Context) -> Result<(), Failure> {
    let mark = host.requests.mark(context);
    let mut answered: Vec<_> = mark
        .map(|mark| request::done(mark, &v1::DeleteDiskResponse::default()))
        .into_iter()
        .collect();
    let creation = request::unanswered(host, &record.begun, "CreateDisk").await;
    if let Some(mark) = creation.map_err(store_failure)? {
        let disk = describe::by_uid(host, &record.uid).await.transpose()?;
        let response = v1::CreateDiskResponse {
            disk,
            operation: None,
        };
        answered.push(request::done(mark, &response));
    }
    host.store
        .put_with(record, None, answered)
        .await
        .map_err(store_failure)
}

/// Emits an event of a disk.
fn tell(host: &Host, record: &DiskRecord, reason: &str, message: impl Into<String>) {
    host.events.emit(Draft::normal(object(record), reason, message));
}

/// A disk, as events and operations are about it.
fn object(record: &DiskRecord) -> Object {
    let uid = Uuid::from_slice(&record.uid).unwrap_or_default();
    Object::Disk(record.name.clone(), uid)
}

/// Removes a disk's file, then its record. The daemon's next start retries the steps that failed.
async fn finish(host: &Arc<Host>, record: &DiskRecord) {
    let (folder, of) = (host.disk_folder(), record.clone());
    let paths = [folder.root()];
    let removed = host.pools.bulk.run(&paths, move || folder.remove(&of)).await;
    let tombstone = host.disks.registry.bury(record);
    match removed {
        Ok(Ok(())) => {
            if let Err(error) = host
                .store
                .remove::<DiskRecord>(&record.uid, Some(tombstone.clone()), None)
                .await
            {
                tracing::error!(disk = record.name, %error, "the disk's record could not be removed");
            }
        }
        Ok(Err(error)) => tracing::error!(disk = record.name, %error, "the disk's file could not be removed"),
        Err(error) => tracing::error!(disk = record.name, %error, "remove a disk"),
    }
    host.disks.forget(&record.uid, tombstone);
}

/// Records that the VM of these disks exists. From then on the disks survive the daemon.
pub async fn keep(host: &Arc<Host>, names: &[String]) -> Result<(), Failure> {
    let _edit = host.disks.edit().await;
    for name in names {
        let mut record = host.disks.get(name)?;
        record.for_vm.clear();
        host.store.put(&record).await.map_err(store_failure)?;
        host.disks.registry.settle(record);
    }
    Ok(())
}

/// Loads the disks of the store at the daemon's start, and cleans up after interrupted operations.
/// `has_vm` says whether the store has a VM of this name.
pub async fn restore(host: &Arc<Host>, records: Vec<DiskRecord>, has_vm: impl Fn(&str) -> bool) {
    let known: Vec<_> = records
        .iter()
        .filter_map(|record| Uuid::from_slice(&record.uid).ok())
        .collect();
    for mut record in records {
        if Uuid::from_slice(&record.uid).is_err() {
            tracing::error!(disk = record.name, "record without a valid uid ignored");
            continue;
        }
        if let Some(what) = interruption(&record, &has_vm) {
            let message = format!("{what} had been interrupted: what was left of the disk is removed");
            tell(host, &record, "Repaired", message);
            finish(host, &record).await;
            for operation in host.operations.left(&object(&record)) {
                operation.fail(&interrupted(
                    "the daemon was restarted: nothing is left of the disk",
                ));
            }
            continue;
        }
        if !record.for_vm.is_empty() {
            record.for_vm.clear();
            if let Err(error) = host.store.put(&record).await {
                tracing::error!(disk = record.name, %error, "note that the disk's VM is there");
            }
        }
        // It may have grown in the moment before the last daemon ended.
        let (folder, of) = (host.disk_folder(), record.clone());
        match spawn_blocking(move || folder.size(&of)).await {
            Ok(Ok(size)) if size > record.size_bytes => {
                let message = format!("the disk has become larger while no daemon noted it: {size} bytes");
                tell(host, &record, "Repaired", message);
                record.size_bytes = size;
                record.generation = record.generation.max(1) + 1;
                if let Err(error) = host.store.put(&record).await {
                    tracing::warn!(disk = record.name, %error, "note the disk's size");
                }
            }
            Ok(Err(error)) => tracing::warn!(disk = record.name, %error, "look at the disk's file"),
            _ => {}
        }
        for operation in host.operations.left(&object(&record)) {
            if operation.kind() == Some(Type::DiskCreate) {
                operation.complete("the disk can be used");
            } else {
                let message = format!(
                    "the daemon was restarted: the disk has {} bytes",
                    record.size_bytes
                );
                operation.fail(&interrupted(message));
            }
        }
        host.requests.adopt(&record.begun, &record.uid);
        host.disks.restore(record);
    }
    complete_folder(host, known).await;
}

/// Why a disk of the store can't stay; `None` for one that can.
fn interruption(record: &DiskRecord, has_vm: impl Fn(&str) -> bool) -> Option<String> {
    match record.stage() {
        DiskStage::Deleting => Some("the disk's deletion".to_owned()),
        DiskStage::Creating => Some("the disk's creation".to_owned()),
        DiskStage::Ready if record.for_vm.is_empty() || has_vm(&record.for_vm) => None,
        DiskStage::Ready => Some(format!("the restore of VM \"{}\"", record.for_vm)),
    }
}

/// Writes missing sidecar files, and reports files without a disk.
async fn complete_folder(host: &Arc<Host>, known: Vec<Uuid>) {
    let folder = host.disk_folder();
    for seen in host.disks.registry.after(None).objects {
        let path = folder.path(&seen.record);
        let there = spawn_blocking(move || !matches!(Sidecar::read(&path), Ok(None))).await;
        if !there.unwrap_or(true)
            && let Err(failure) = create::write_beside(host, &seen.record).await
        {
            tracing::warn!(disk = seen.record.name, %failure, "write beside the disk's file");
        }
    }
    match spawn_blocking(move || adopt::left(&folder, &known)).await {
        Ok(Ok(left)) if !left.is_empty() => tell_left(host, &left),
        Ok(Err(error)) => tracing::warn!(%error, "look for files that no disk has"),
        _ => {}
    }
}

fn tell_left(host: &Host, left: &[(PathBuf, String)]) {
    let named = left.iter().take(NAMED).map(|(path, name)| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        match name.as_str() {
            "" => file.into_owned(),
            name => format!("{file} (\"{}\")", text::brief(name)),
        }
    });
    let named: Vec<_> = named.collect();
    let more = if left.len() > NAMED { " and others" } else { "" };
    let message = format!(
        "{} files in the folder of disks belong to no disk: {}{more}; adopt them as disks, or remove them",
        left.len(),
        named.join(", ")
    );
    host.events
        .emit(Draft::warning(Object::Node, "DisksWithoutRecord", message));
}
