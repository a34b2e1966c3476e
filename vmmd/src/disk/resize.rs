//! Makes a disk larger.

use std::{fs::File, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use tokio::sync::oneshot;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind, file_failed},
    roots::Within,
};
use vmmd_objects::{
    context::Context,
    operation::{Control, Pending, Type, cancelled, follow},
};
use vmmd_spec::{
    Violations,
    disk::{self, Cache, Format, Preallocation},
};
use vmmd_store::DiskRecord;
use vmmd_store::store_failure;

use super::{create::reserve, image, operation, room, tell};
use crate::{
    files::{self, Locks, Use},
    host::Host,
    paths::disk::{enough_room, format},
    registry::vms::command::{Command, DiskRequest},
};

/// Where a request to the DiskService has the size.
const SIZE_FIELD: &str = "disk.spec.sizeBytes";

/// An image that no process has open.
#[derive(Clone, Debug)]
pub struct Growing {
    /// Name of the image in messages.
    pub name: String,
    /// Its file or block device.
    pub path: PathBuf,
    /// It is the file of a disk of the DiskService.
    pub own: bool,
    /// See [`Source::Path`](vmmd_spec::disk::Source::Path).
    pub beneath: Option<PathBuf>,
    /// How that is to be read.
    pub format: Format,
    /// Its present size where that is not in the file's length.
    pub size: Option<u64>,
    /// Preallocation of the added space.
    pub preallocation: Preallocation,
    /// Backing files, nearest first.
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

/// Whether a disk may become as large as `size`; false when it is so already.
pub fn may_grow(host: &Host, record: &DiskRecord, size: u64) -> Result<bool, Failure> {
    let name = &record.name;
    let mut found = Violations::default();
    disk::size(&mut found, SIZE_FIELD, size);
    found.or(())?;
    if size < record.size_bytes {
        let failure = shrink_refused(name, record.size_bytes, size);
        let mut violations = failure.violations.clone();
        for violation in &mut violations.0 {
            SIZE_FIELD.clone_into(&mut violation.field);
        }
        return Err(Failure {
            violations,
            ..failure
        });
    }
    let overlays = host.disks.overlays(record);
    if !overlays.is_empty() {
        let message = format!("disk \"{name}\" has overlays ({overlays}) and can't be changed any more");
        return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
    }
    let uses = host.disks.uses(name);
    if let Some(reader) = uses.iter().find(|user| !user.writes && runs(host, &user.vm)) {
        let message = format!(
            "disk \"{name}\" is attached read-only to VM \"{}\", which runs: stop it or detach the disk there first",
            reader.vm
        );
        return Err(Failure::precondition("DISK_IN_USE", message));
    }
    Ok(size > record.size_bytes)
}

/// Begins to make a disk larger, wherever it is used.
pub fn begin(host: &Arc<Host>, record: DiskRecord, size: u64, context: &Context) -> Result<Pending, Failure> {
    let handle = operation::begin(host, Type::DiskResize, &record, context)?;
    let pending = handle.pending();
    let (host, context) = (Arc::clone(host), context.clone());
    tokio::spawn(async move {
        let message = format!("making the disk larger, {size} bytes");
        let growing = follow(&host.stopping, &handle, &message, |control| {
            grow_wherever(&host, &record, size, &context, control)
        });
        let grown = growing.await;
        host.disks.end(&record.uid);
        match (grown, handle.cause()) {
            (Ok(()), _) => {
                if let Ok(grown) = host.disks.get(&record.name) {
                    room::warn(&host, &grown).await;
                }
                handle.complete(format!("the disk has {size} bytes"));
            }
            (Err(failure), Some(_)) if failure.reason == "CANCELLED" => {
                handle.cancelled("the disk has the size that it had");
            }
            (Err(failure), _) => handle.fail(&failure),
        }
    });
    Ok(pending)
}

/// Whether a VM has a process.
fn runs(host: &Host, vm: &str) -> bool {
    let entry = host.vms.get(vm);
    entry.is_some_and(|entry| {
        let state = entry.state.borrow();
        state
            .status
            .as_ref()
            .is_some_and(|status| status.instance.is_some())
    })
}

async fn grow_wherever(
    host: &Arc<Host>,
    record: &DiskRecord,
    size: u64,
    context: &Context,
    control: Control,
) -> Result<(), Failure> {
    let mut uses = host.disks.uses(&record.name);
    // The one that runs, if any, has it open.
    uses.sort_by_key(|user| !runs(host, &user.vm));
    match uses.into_iter().find(|user| user.writes) {
        Some(user) => ask_vm(host, &user.vm, user.disk, size, context).await,
        None => grow_record(host, record, size, control).await.map(drop),
    }
}

/// The VM's actor keeps it from being started meanwhile, or knows how to reach the `vmm`.
async fn ask_vm(
    host: &Arc<Host>,
    vm: &str,
    disk: String,
    size: u64,
    context: &Context,
) -> Result<(), Failure> {
    let entry = host.vms.get(vm).ok_or_else(|| Failure::no_vm(vm))?;
    let (reply, answer) = oneshot::channel();
    let command = Command::Disk {
        context: Context {
            // They were the disk's.
            preconditions: v1::Preconditions::default(),
            ..context.clone()
        },
        request: DiskRequest::Resize { disk, size },
        reply,
    };
    entry
        .mailbox
        .send(command)
        .await
        .map_err(|_| Failure::unavailable(vm))?;
    answer.await.map_err(|_| Failure::unavailable(vm))?.map(drop)
}

/// Grows the file of a disk that no process has open, and stores the new size. Returns the size.
pub async fn grow_record(
    host: &Arc<Host>,
    record: &DiskRecord,
    size: u64,
    control: Control,
) -> Result<u64, Failure> {
    let resolved = host.disks.resolve(&host.disk_folder(), &record.name)?;
    let growing = Growing {
        name: record.name.clone(),
        path: resolved.path,
        own: true,
        beneath: None,
        format: resolved.format,
        size: Some(record.size_bytes),
        preallocation: preallocation(record),
        backing: resolved.backing,
    };
    let size = grow(host, growing, size, control).await?;
    note(host, &record.name, size).await?;
    Ok(size)
}

/// Notes the size that a disk has by now.
pub async fn note(host: &Arc<Host>, name: &str, size: u64) -> Result<(), Failure> {
    let _edit = host.disks.edit().await;
    let mut record = host.disks.get(name)?;
    if size <= record.size_bytes {
        return Ok(());
    }
    record.size_bytes = size;
    record.generation = record.generation.max(1) + 1;
    host.disks.registry.settle(record.clone());
    // The file says the same at the next start.
    host.store.put(&record).await.map_err(store_failure)?;
    tell(
        host,
        &record,
        "DiskResized",
        format!("the disk has {size} bytes now"),
    );
    Ok(())
}

/// Preallocation that the creation requested.
pub fn preallocation(record: &DiskRecord) -> Preallocation {
    match record.preallocation() {
        v1::DiskPreallocation::Full => Preallocation::Full,
        _ => Preallocation::Off,
    }
}

/// Reserves the added space of a raw disk of a running VM, if its preallocation is full.
pub async fn reserve_growth(host: &Arc<Host>, record: &DiskRecord, size: u64) -> Result<(), Failure> {
    if preallocation(record) != Preallocation::Full || format(record) != Format::Raw {
        return Ok(());
    }
    let (path, start) = (host.disk_folder().path(record), record.size_bytes);
    let (paths, folder) = ([path.clone()], host.disk_folder().root());
    let operation = format!("make disk \"{}\" larger", record.name);
    let length = size.saturating_sub(start);
    let reserved = host.pools.bulk.run(&paths, move || {
        enough_room(&operation, &folder, length)?;
        let file = File::options().write(true).open(path);
        let reserved =
            file.and_then(|file| reserve(&file, start, length, Preallocation::Full, &Control::default()));
        reserved.map_err(|error| file_failed(&operation, &error))
    });
    reserved.await?
}

/// Grows an image that no process has open. Returns the size. With `size` 0, the size of a block
/// device is the new size.
pub async fn grow(host: &Arc<Host>, growing: Growing, size: u64, control: Control) -> Result<u64, Failure> {
    let (blocking_host, of, of_control) = (Arc::clone(host), growing.clone(), control.clone());
    let growing_raw = host.pools.bulk.run(std::slice::from_ref(&growing.path), move || {
        grow_raw(&blocking_host, &of, size, &of_control)
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
    // Its tables are written at once, and it can be used whenever it is ended.
    tokio::select! {
        done = image::run(host, task) => done?,
        () = control.cancel().cancelled() => return Err(cancelled(&host.stopping)),
    }
    Ok(size)
}

enum Grown {
    /// It has this size.
    Done(u64),
    /// It is locked and its tables must be changed.
    Image(OwnedFd, Vec<(OwnedFd, Format)>),
}

/// Blocking.
fn grow_raw(host: &Host, growing: &Growing, size: u64, control: &Control) -> Result<Grown, Failure> {
    let Growing { name, path, .. } = growing;
    let operation = format!("make disk \"{name}\" larger");
    let failed = |error: io::Error| file_failed(&operation, &error);
    let field = format!("disk \"{name}\"");
    let within = match growing.own {
        true => Within::Own,
        false => host.config.roots.of_disk(growing.beneath.as_deref()),
    };
    let open = files::open_image_file(&field, path, within, Cache::Writeback, Use::Write)?;
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
    let more = size - present;
    if growing.preallocation == Preallocation::Full {
        enough_room(&operation, path.parent().unwrap_or(path), more)?;
    }
    if let Err(error) = reserve(&file, present, more, growing.preallocation, control) {
        // Frees the space reserved beyond the old end.
        let _ = file.set_len(present);
        return Err(match control.wanted() {
            Ok(()) => failed(error),
            Err(_) => cancelled(&host.stopping),
        });
    }
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
