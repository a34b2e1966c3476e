//! Makes a disk larger.

use std::{fs::File, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use proto::{
    model::{
        Violations,
        disk::{self, Cache, Format, Preallocation},
    },
    v1,
};
use tokio::sync::oneshot;

use super::{
    create::{describe, reserve},
    file, image, tell,
};
use crate::{
    context::Context,
    failure::{Failure, Kind},
    host::Host,
    store::DiskRecord,
    vm::{
        Command, DiskRequest,
        files::{self, Locks, Use},
        store_failure,
    },
};

/// An image that nobody has open.
#[derive(Clone, Debug)]
pub struct Growing {
    /// What the request calls it, for messages.
    pub name: String,
    /// Its file or block device.
    pub path: PathBuf,
    /// How that is to be read.
    pub format: Format,
    /// Its present size where that is not in the file's length.
    pub size: Option<u64>,
    /// What is to be reserved.
    pub preallocation: Preallocation,
    /// What is below it, the nearest first.
    pub backing: Vec<(PathBuf, Format)>,
}

/// The answer to a wish for less than there is.
pub fn shrink_refused(name: &str, present: u64, wanted: u64) -> Failure {
    let problem = format_args!(
        "is {wanted}, less than the {present} bytes that disk \"{name}\" has: a disk can't be made smaller"
    );
    Failure {
        reason: "SHRINK_REFUSED",
        ..Failure::field("sizeBytes", problem)
    }
}

/// Makes a disk of the DiskService larger, wherever it is used.
pub async fn resize(host: &Arc<Host>, name: &str, size: u64, context: &Context) -> Result<v1::Disk, Failure> {
    let mut found = Violations::default();
    disk::size(&mut found, "sizeBytes", size);
    found.or(())?;
    let record = host.disks.get(name)?;
    if size < record.size_bytes {
        return Err(shrink_refused(name, record.size_bytes, size));
    }
    let overlays = host.disks.overlays(&record);
    if !overlays.is_empty() {
        let message = format!("disk \"{name}\" has overlays ({overlays}) and can't be changed any more");
        return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
    }
    let mut uses = host.disks.uses(name);
    let runs = |vm: &str| {
        let entry = host.table.get(vm);
        entry.is_some_and(|entry| {
            let state = entry.state.borrow();
            state
                .status
                .as_ref()
                .is_some_and(|status| status.instance.is_some())
        })
    };
    // The one that runs, if any, has it open; those that only read must not.
    uses.sort_by_key(|user| !runs(&user.vm));
    if let Some(reader) = uses.iter().find(|user| !user.writes && runs(&user.vm)) {
        let message = format!(
            "disk \"{name}\" is attached read-only to VM \"{}\", which runs: stop it or detach the disk there first",
            reader.vm
        );
        return Err(Failure::precondition("DISK_IN_USE", message));
    }
    match uses.into_iter().find(|user| user.writes) {
        Some(user) => ask_vm(host, &user.vm, user.disk, size, context).await?,
        None => grow_record(host, &record, size).await.map(drop)?,
    }
    let record = host.disks.get(name)?;
    describe(host, record).await
}

/// The VM's actor keeps it from being started meanwhile, or knows how to reach the `vmm`.
async fn ask_vm(
    host: &Arc<Host>,
    vm: &str,
    disk: String,
    size: u64,
    context: &Context,
) -> Result<(), Failure> {
    let entry = host.table.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let (reply, answer) = oneshot::channel();
    let command = Command::Disk {
        context: context.clone(),
        request: DiskRequest::Resize { disk, size },
        reply,
    };
    entry
        .mailbox
        .send(command)
        .await
        .map_err(|_| Failure::stopping())?;
    answer.await.map_err(|_| Failure::stopping())?.map(drop)
}

/// Makes the file of a disk that nobody has open larger, and notes that; returns the size.
pub async fn grow_record(host: &Arc<Host>, record: &DiskRecord, size: u64) -> Result<u64, Failure> {
    let resolved = host.disks.resolve(&host.disk_folder(), &record.name)?;
    let growing = Growing {
        name: record.name.clone(),
        path: resolved.path,
        format: resolved.format,
        size: Some(record.size_bytes),
        preallocation: preallocation(record),
        backing: resolved.backing,
    };
    let size = grow(host, growing, size).await?;
    note(host, &record.name, size).await?;
    Ok(size)
}

/// Notes the size that a disk has by now.
pub async fn note(host: &Arc<Host>, name: &str, size: u64) -> Result<(), Failure> {
    let mut record = host.disks.get(name)?;
    if size <= record.size_bytes {
        return Ok(());
    }
    record.size_bytes = size;
    host.disks.settle(record.clone());
    // The file says the same at the next start.
    host.store.put_disk(&record).await.map_err(store_failure)?;
    tell(
        host,
        &record,
        "DiskResized",
        format!("the disk has {size} bytes now"),
    );
    Ok(())
}

/// What was asked for at its creation.
pub fn preallocation(record: &DiskRecord) -> Preallocation {
    match record.preallocation() {
        v1::DiskPreallocation::Full => Preallocation::Full,
        _ => Preallocation::Off,
    }
}

/// Reserves what a raw disk is about to grow by, when all of it is to be reserved.
pub async fn reserve_growth(host: &Arc<Host>, record: &DiskRecord, size: u64) -> Result<(), Failure> {
    if preallocation(record) != Preallocation::Full || file::format(record) != Format::Raw {
        return Ok(());
    }
    let (path, start) = (host.disk_folder().path(record), record.size_bytes);
    let paths = [path.clone()];
    let reserved = host.pools.bulk.run(&paths, move || {
        let file = File::options().write(true).open(path)?;
        reserve(&file, start, size.saturating_sub(start), Preallocation::Full)
    });
    reserved
        .await?
        .map_err(|error| file::failed(&format!("make disk \"{}\" larger", record.name), &error))
}

/// Makes an image that nobody has open larger; returns the size. `size` 0 takes what a block device has.
pub async fn grow(host: &Arc<Host>, growing: Growing, size: u64) -> Result<u64, Failure> {
    let blocking_host = Arc::clone(host);
    let of = growing.clone();
    let growing_raw = host.pools.bulk.run(std::slice::from_ref(&growing.path), move || {
        grow_raw(&blocking_host, &of, size)
    });
    let (image, backing) = match growing_raw.await?? {
        Grown::Done(size) => return Ok(size),
        Grown::Image(image, backing) => (image, backing),
    };
    let task = image::Task {
        command: "resize",
        image,
        format: growing.format,
        size,
        preallocation: Preallocation::Off,
        backing,
    };
    image::run(host, task).await?;
    Ok(size)
}

enum Grown {
    /// It has this size.
    Done(u64),
    /// It is locked and its tables must be changed.
    Image(OwnedFd, Vec<(OwnedFd, Format)>),
}

/// Blocking.
fn grow_raw(host: &Host, growing: &Growing, size: u64) -> Result<Grown, Failure> {
    let Growing { name, path, .. } = growing;
    let operation = format!("make disk \"{name}\" larger");
    let failed = |error: io::Error| file::failed(&operation, &error);
    let field = format!("disk \"{name}\"");
    let open = files::open_image_file(&field, path, Cache::Writeback, Use::Write)?;
    if !files::lock(&open, Locks::Take, false, &host.ledger).map_err(failed)? {
        let user = files::user(&open, &host.ledger);
        let message = format!("disk \"{name}\" is in use by {user}");
        return Err(Failure::precondition("DISK_IN_USE", message));
    }
    if open.block_device {
        return if size == 0 || size == open.size {
            Ok(Grown::Done(open.size))
        } else {
            Err(block_device(name, open.size))
        };
    }
    let mut found = Violations::default();
    disk::size(&mut found, "sizeBytes", size);
    found.or(())?;
    let present = match growing.format {
        Format::Raw => open.size,
        Format::Iso => {
            let message = format!("disk \"{name}\" is an ISO image, which never changes");
            return Err(Failure::precondition("DISK_READ_ONLY", message));
        }
        // A foreign image's own size is known to the child, which refuses less.
        Format::Qcow2 => growing.size.unwrap_or(0),
    };
    if size < present {
        return Err(shrink_refused(name, present, size));
    }
    if growing.format == Format::Qcow2 {
        let backing = growing.backing.iter();
        let backing = backing.map(|(path, format)| Ok((File::open(path)?.into(), *format)));
        return Ok(Grown::Image(
            open.fd,
            backing.collect::<io::Result<_>>().map_err(failed)?,
        ));
    }
    let file = File::from(open.fd);
    reserve(&file, present, size - present, growing.preallocation).map_err(failed)?;
    file.set_len(size)
        .and_then(|()| file.sync_all())
        .map_err(failed)?;
    Ok(Grown::Done(size))
}

/// The answer to a wish for a size of a block device.
pub fn block_device(name: &str, size: u64) -> Failure {
    let problem = format_args!(
        "must be 0: disk \"{name}\" is a block device of {size} bytes; grow that on the node, then ask with 0"
    );
    Failure {
        kind: Kind::Invalid,
        ..Failure::field("sizeBytes", problem)
    }
}
