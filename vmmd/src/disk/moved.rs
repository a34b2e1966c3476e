//! Disks that migrate to or from another node with their VM.
//!
//! At the source the disks stay unchanged until the VM runs on the other node. The target creates
//! empty disks before the transfer. The `vmm` that receives the machine fills them. The record of
//! the VM names the disks by their UUIDs ([`HandoverRecord`](vmmd_store::HandoverRecord)): the
//! side that does not keep the VM removes its own disks together with the VM.

mod coming;

use std::{os::unix::fs::MetadataExt as _, sync::Arc};

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_spec::disk::Disk;

pub use coming::{Coming, along, check};

use vmmd_host::{
    failure::{Failure, Kind},
    fault, text,
};
use vmmd_objects::context::Context;
use vmmd_store::store_failure;
use vmmd_store::{DiskRecord, DiskStage};

use super::{begin_removal, create, finish, tell};
use crate::{host::Host, paths::disk::free_bytes};

/// Describes the disks that migrate with VM `vm`, for the target. Refused when another VM names one
/// of them.
pub async fn going(host: &Arc<Host>, vm: &str, disks: &[Disk]) -> Result<Vec<v1::PeerDisk>, Failure> {
    let mut going = Vec::new();
    for (_, name) in along(disks) {
        let record = host.disks.get(name)?;
        if let Some(other) = host.disks.uses(name).into_iter().find(|user| user.vm != vm) {
            let message = format!(
                "disk \"{name}\" would go to the other node with VM \"{vm}\", and VM \"{}\" of this node names it too: detach it there",
                other.vm
            );
            return Err(Failure::precondition("MIGRATION_DISKS", message));
        }
        let folder = host.disk_folder();
        let resolved = host.disks.resolve(&folder, name)?;
        let below = resolved.backing.into_iter().map(|(path, _)| path);
        let files: Vec<_> = std::iter::once(resolved.path).chain(below).collect();
        let looking = host.pools.files.run(&[folder.root()], move || {
            let blocks = files.iter().filter_map(|path| std::fs::metadata(path).ok());
            blocks.map(|it| it.blocks().saturating_mul(512)).sum::<u64>()
        });
        let allocated = looking.await?;
        going.push(v1::PeerDisk {
            name: name.to_owned(),
            uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
            labels: record.labels.clone().into_iter().collect(),
            annotations: record.annotations.clone().into_iter().collect(),
            owner: record.owner.clone(),
            format: record.format,
            size_bytes: record.size_bytes,
            preallocation: record.preallocation,
            allocated_bytes: allocated.min(record.size_bytes),
            logical_block_bytes: record.logical_block,
        });
    }
    Ok(going)
}

/// Makes the disks that come with VM `vm`, all of them or none, and keeps room for them; their UUIDs.
pub async fn make(
    host: &Arc<Host>,
    vm: &str,
    coming: &[Coming],
    context: &Context,
) -> Result<Vec<Vec<u8>>, Failure> {
    let mut made = Vec::new();
    for disk in coming {
        match make_one(host, vm, disk, context).await {
            Ok(uid) => made.push(uid),
            Err(failure) => {
                unmake(host, &made).await;
                return Err(failure);
            }
        }
    }
    Ok(made)
}

/// Removes disks that were made for a VM which does not come.
pub async fn unmake(host: &Arc<Host>, uids: &[Vec<u8>]) {
    for uid in uids {
        if let Some(seen) = host.disks.registry.find(uid) {
            finish(host, &seen.record).await;
        }
    }
}

async fn make_one(host: &Arc<Host>, vm: &str, disk: &Coming, context: &Context) -> Result<Vec<u8>, Failure> {
    let record = DiskRecord {
        uid: disk.uid.as_bytes().to_vec(),
        // Cleared when the VM exists. A daemon that starts before that removes the disk.
        for_vm: vm.to_owned(),
        logical_block: disk.logical_block,
        ..create::record(host, &disk.new, context)
    };
    let mut record = host.disks.adopt(record)?;
    if let Err(failure) = keep_room(host, disk).await {
        create::forget(host, &record);
        return Err(failure);
    }
    if let Err(error) = host.store.put(&record).await {
        create::forget(host, &record);
        return Err(store_failure(error));
    }
    let made = match create::empty(host, &disk.new, &record).await {
        Ok(()) => create::settle(host, &mut record).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = made {
        finish(host, &record).await;
        return Err(failure);
    }
    tell(
        host,
        &record,
        "DiskCreated",
        "the disk comes from another node with its VM",
    );
    Ok(record.uid)
}

/// Refused when the node has not as much room as the disk takes beside the others that come.
async fn keep_room(host: &Arc<Host>, disk: &Coming) -> Result<(), Failure> {
    let expected = host.disks.expect(disk.uid.as_bytes(), disk.needs());
    let folder = host.disk_folder();
    let looking = host.pools.files.run(&[folder.root()], move || {
        folder.make()?;
        free_bytes(&folder.root())
    });
    let looked = looking.await?;
    let free = looked.map_err(|error| {
        let message = format!(
            "look how much room there is for disk \"{}\": {}",
            disk.name(),
            text::words(&error)
        );
        Failure::new(Kind::Unavailable, "DISK_UNUSABLE", message)
    })?;
    let free = match fault::is_set(&host.config.run_dir, "no-room-for-disks") {
        true => 0,
        false => free,
    };
    if expected <= free {
        return Ok(());
    }
    let message = format!(
        "disk \"{}\" takes {} bytes, {expected} are to be kept for all disks that come from other nodes, and the file system of the daemon's \
         state has {free} bytes free",
        disk.name(),
        disk.needs()
    );
    Err(Failure::new(Kind::Exhausted, "NODE_DISK_FULL", message))
}

/// Removes the disks of a VM that runs on another node or that did not arrive. A disk that is still
/// in use stays. A missing disk is no error.
pub async fn remove(host: &Arc<Host>, vm: &str, uids: &[Vec<u8>], context: &Context) -> Result<(), Failure> {
    if uids.is_empty() {
        return Ok(());
    }
    host.disks.give_back(vm, None);
    for uid in uids {
        let Some(seen) = host.disks.registry.find(uid) else {
            continue;
        };
        if seen.record.stage() != DiskStage::Ready {
            continue;
        }
        match begin_removal(host, &seen.record.name, context, |_| Ok(())).await {
            Ok(record) => {
                finish(host, &record).await;
                tell(
                    host,
                    &record,
                    "DiskDeleted",
                    "the disk went to another node with its VM, or did not come from there",
                );
            }
            Err(failure) if failure.kind == Kind::Precondition => {
                tracing::warn!(disk = seen.record.name, %failure, "a disk of a VM that is on another node stays");
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(())
}
