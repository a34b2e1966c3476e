//! The size of a disk and the room in the file system of the daemon's state. A disk without preallocation takes room when the guest writes to it.
//! So it may exceed the free space, with a warning, but not the whole file system.

use std::{io, os::unix::fs::MetadataExt, path::Path, sync::Arc};

use vmmd_host::failure::{Failure, Kind, file_failed};
use vmmd_objects::event::Draft;
use vmmd_store::DiskRecord;

use super::object;
use crate::{host::Host, paths::disk::free_bytes};

/// Refused as NODE_DISK_FULL when `size` bytes are more than the whole file system has: no guest can fill such a disk.
pub async fn could_hold(host: &Arc<Host>, name: &str, size: u64) -> Result<(), Failure> {
    let folder = host.disk_folder();
    let paths = [folder.root()];
    let looked = host.pools.files.run(&paths, move || {
        folder.make()?;
        let stat = rustix::fs::statvfs(folder.root())?;
        Ok((
            stat.f_blocks.saturating_mul(stat.f_frsize),
            free_bytes(&folder.root())?,
        ))
    });
    let looked: io::Result<(u64, u64)> = looked.await?;
    let (all, free) = looked.map_err(|error| file_failed(&format!("make disk \"{name}\""), &error))?;
    if size <= all {
        return Ok(());
    }
    let message = format!(
        "disk \"{name}\": {size} bytes are more than the whole file system of the daemon's state has, which is {all} bytes with {free} \
         bytes free: ask for less, or use a file of another file system by its path"
    );
    Err(Failure::new(Kind::Exhausted, "NODE_DISK_FULL", message))
}

/// Emits an event when a disk may take more than the free space: writes of its guest fail then.
pub async fn warn(host: &Arc<Host>, record: &DiskRecord) {
    let folder = host.disk_folder();
    let (paths, path, size) = ([folder.root()], folder.path(record), record.size_bytes);
    let looked = host.pools.files.run(&paths, move || {
        Ok((missing(&path, size)?, free_bytes(&folder.root())?))
    });
    let looked: Result<io::Result<(u64, u64)>, Failure> = looked.await;
    let (more, free) = match looked {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return tracing::debug!(disk = record.name, %error, "look for room"),
        Err(failure) => return tracing::debug!(disk = record.name, %failure, "look for room"),
    };
    if more <= free {
        return;
    }
    let message = format!(
        "the disk may take {more} bytes more, and the file system of the daemon's state has {free} bytes free: writes of the guest fail \
         when it is full; make room before, or use a smaller disk"
    );
    host.events
        .emit(Draft::warning(object(record), "DiskLargerThanFree", message));
    // vmmctl reads the event after the answer.
    host.events.told().await;
}

/// Bytes of a disk of `size` bytes that its file does not have yet.
fn missing(path: &Path, size: u64) -> io::Result<u64> {
    // stat(2): blocks of 512 bytes.
    let there = path.metadata()?.blocks().saturating_mul(512);
    Ok(size.saturating_sub(there))
}
