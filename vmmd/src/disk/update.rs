//! Changes fields of a disk that a client may change.

use std::sync::Arc;

use vmmd_api::v1;
use vmmd_host::failure::Failure;
use vmmd_objects::{
    context::Context,
    operation::Begun,
    request::{masked::Masked, preconditions},
};
use vmmd_store::DiskRecord;
use vmmd_store::store_failure;

use super::{create::write_beside, resize, room, tell};
use crate::host::Host;

/// Path in an update mask, besides the metadata.
const SIZE: &str = "spec.size_bytes";

/// Changes a disk. A change of its size begins an operation.
pub async fn update(
    host: &Arc<Host>,
    request: &v1::UpdateDiskRequest,
    context: &Context,
) -> Result<Begun, Failure> {
    let disk = request.disk.clone().unwrap_or_default();
    let masked = Masked::new("disk", &[SIZE], disk.metadata, request.update_mask.as_ref())?;
    let size = masked
        .has(SIZE)
        .then(|| disk.spec.map_or(0, |spec| spec.size_bytes));
    let name = masked.metadata.name.as_str();
    let edit = host.disks.edit().await;
    let before = host.disks.get(name)?;
    expected(&before, context)?;
    let grows = match size {
        Some(size) if resize::may_grow(host, &before, size)? => {
            room::could_hold(host, name, size).await?;
            true
        }
        _ => false,
    };
    let mut record = before.clone();
    masked.change(&mut record.labels, &mut record.annotations, &mut record.owner);
    let changed = record != before;
    if changed {
        record.generation = record.generation.max(1) + 1;
    }
    if changed || grows {
        // With an id, a retry after the end of the daemon is known to have begun.
        host.requests.note(context, &mut record.begun);
        host.store.put(&record).await.map_err(store_failure)?;
        host.disks.registry.settle(record.clone());
    }
    drop(edit);
    if changed {
        let message = format!("the disk has generation {} now", record.generation);
        tell(host, &record, "DiskChanged", message);
        if let Err(failure) = write_beside(host, &record).await {
            tracing::warn!(disk = record.name, %failure, "the description beside the disk's file is out of date");
        }
    }
    let uid = record.uid.clone();
    let pending = match size.filter(|_| grows) {
        Some(size) => Some(resize::begin(host, record, size, context)?),
        None => None,
    };
    Ok(Begun { uid, pending })
}

/// Checks the preconditions of a request.
pub fn expected(record: &DiskRecord, context: &Context) -> Result<(), Failure> {
    let now = (record.uid.as_slice(), record.generation, record.begun.as_slice());
    preconditions::check_record("disk", &record.name, now, context)
}
