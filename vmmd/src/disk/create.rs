//! Makes a disk.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::fs::{FallocateFlags, fallocate};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, file_failed},
    roots::Within,
    text,
};
use vmmd_objects::{
    context::Context,
    operation::{Begun, Control, Handle, Type, cancelled, follow},
};
use vmmd_spec::disk::{Cache, Content, Format, MAX_SIZE, NewDisk, Preallocation};
use vmmd_store::store_failure;
use vmmd_store::{DiskImage, DiskRecord, DiskSource, DiskStage, ImageRecord, disk_source::Source};

use super::{adopt, copy::copy, finish, image, operation, room, tell};
use crate::{
    files::{self, Locks, Use, signature},
    host::Host,
    paths::{disk::enough_room, sidecar::Sidecar},
};

/// Reserved between two looks at whether it is still wanted, in bytes.
const RESERVED_AT_ONCE: u64 = 1 << 30;
/// Interval between size checks of an image while its child process reports no progress.
const LOOK: Duration = Duration::from_secs(1);

/// Begins to make the disk that is asked for. The operation leaves nothing when it fails or is cancelled.
pub async fn create(
    host: &Arc<Host>,
    request: &v1::CreateDiskRequest,
    context: &Context,
) -> Result<Begun, Failure> {
    if let Some(uid) = host.requests.made(context, "CreateDisk")
        && host.disks.registry.find(&uid).is_some()
    {
        return Ok(Begun { uid, pending: None });
    }
    let new = NewDisk::try_from(request)?;
    if let Content::Adopted(path) = &new.content {
        return adopt::adopt(host, &new, path, context).await;
    }
    if let Some(size) = new.size
        && new.preallocation != Preallocation::Full
    {
        let name = new.name.as_ref().map_or("", |name| name.as_str());
        room::could_hold(host, name, size).await?;
    }
    let mut record = record(host, &new, context);
    let image = match &new.content {
        Content::Image { name, overlay } => {
            let image = host.images.get(name.as_str())?;
            of_image(&mut record, &image, *overlay)?;
            Some(image)
        }
        _ => None,
    };
    let below = match &new.content {
        Content::OverlayOf(below) => Some(below.as_str()),
        _ => None,
    };
    let record = host.disks.reserve(record, below)?;
    // From here on the name is taken: every way out settles or forgets it.
    if let Some(image) = &image {
        match host.images.take(image) {
            Ok(used) => {
                if let Err(error) = host.store.put(&used).await {
                    tracing::warn!(image = used.name, %error, "note when an image was used");
                }
            }
            Err(failure) => {
                forget(host, &record);
                return Err(failure);
            }
        }
    }
    let handle = match operation::begin(host, Type::DiskCreate, &record, context) {
        Ok(handle) => handle,
        Err(failure) => {
            forget(host, &record);
            return Err(failure);
        }
    };
    if let Err(error) = host.store.put(&record).await {
        forget(host, &record);
        let failure = store_failure(error);
        handle.fail(&failure);
        return Err(failure);
    }
    let begun = Begun {
        uid: record.uid.clone(),
        pending: Some(handle.pending()),
    };
    tokio::spawn(carry_out(Arc::clone(host), new, record, handle));
    Ok(begun)
}

/// The record of a disk that is to be made.
pub fn record(host: &Host, new: &NewDisk, context: &Context) -> DiskRecord {
    let format = match new.format {
        Some(Format::Qcow2) => v1::DiskFormat::Qcow2,
        _ => v1::DiskFormat::Raw,
    };
    let preallocation = match new.preallocation {
        Preallocation::Off => v1::DiskPreallocation::Off,
        Preallocation::Metadata => v1::DiskPreallocation::Metadata,
        Preallocation::Full => v1::DiskPreallocation::Full,
    };
    let source = match &new.content {
        Content::Empty => None,
        Content::RawFile(path) => Some(Source::RawFile(path.display().to_string())),
        Content::OverlayOf(below) => Some(Source::OverlayOf(below.to_string())),
        Content::Adopted(path) => Some(Source::Adopt(path.display().to_string())),
        Content::Image { name, overlay } => Some(Source::Image(DiskImage {
            name: name.to_string(),
            clone: match overlay {
                true => v1::DiskClone::Overlay.into(),
                false => v1::DiskClone::Copy.into(),
            },
        })),
    };
    let now = text::now_ms();
    DiskRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        name: new.name.as_ref().map(ToString::to_string).unwrap_or_default(),
        created_ms: now,
        stage_ms: now,
        labels: new.labels.clone(),
        annotations: new.annotations.clone(),
        owner: new.owner.clone(),
        format: format.into(),
        size_bytes: new.size.unwrap_or_default(),
        preallocation: preallocation.into(),
        source: source.map(|source| DiskSource {
            source: Some(source),
            any_content: new.any_content,
        }),
        stage: DiskStage::Creating.into(),
        begun: host.requests.mark(context).into_iter().collect(),
        ..DiskRecord::default()
    }
}

/// Copies the image's properties to the record of a disk.
fn of_image(record: &mut DiskRecord, image: &ImageRecord, overlay: bool) -> Result<(), Failure> {
    if record.size_bytes == 0 {
        record.size_bytes = image.size_bytes;
    } else if record.size_bytes < image.size_bytes {
        let problem = format_args!(
            "is {}, less than the {} of image \"{}\"",
            record.size_bytes, image.size_bytes, image.name
        );
        return Err(Failure::field("disk.spec.sizeBytes", problem));
    }
    record.logical_block = image.logical_block;
    if overlay {
        (record.image, record.image_digest) = (image.uid.clone(), image.digest.clone());
    }
    Ok(())
}

/// Lets go of the name of a disk of which nothing is in the store.
pub fn forget(host: &Host, record: &DiskRecord) {
    let tombstone = host.disks.registry.bury(record);
    host.disks.forget(&record.uid, tombstone);
}

async fn carry_out(host: Arc<Host>, new: NewDisk, mut record: DiskRecord, handle: Handle) {
    let making = follow(&host.stopping, &handle, "making the disk", |control| {
        make(&host, &new, &record, control)
    });
    let made = match making.await {
        Ok(size) if handle.commit() => {
            record.size_bytes = size;
            settle(&host, &mut record).await
        }
        Ok(_) => Err(cancelled(&host.stopping)),
        Err(failure) => Err(failure),
    };
    match made {
        Ok(()) => {
            let message = format!("the disk was made, {} bytes", record.size_bytes);
            tell(&host, &record, "DiskCreated", message);
            room::warn(&host, &record).await;
            handle.complete("the disk can be used");
        }
        Err(failure) => {
            finish(&host, &record).await;
            match handle.cause() {
                Some(_) => handle.cancelled("the disk was not made: nothing is left of it"),
                None => handle.fail(&failure),
            }
        }
    }
}

/// Notes durably that a disk is whole.
pub async fn settle(host: &Arc<Host>, record: &mut DiskRecord) -> Result<(), Failure> {
    write_beside(host, record).await?;
    record.stage = DiskStage::Ready.into();
    record.stage_ms = text::now_ms();
    host.store.put(record).await.map_err(store_failure)?;
    host.disks.registry.settle(record.clone());
    host.disks.end(&record.uid);
    Ok(())
}

/// Writes the disk's record to its sidecar file.
pub async fn write_beside(host: &Arc<Host>, record: &DiskRecord) -> Result<(), Failure> {
    let folder = host.disk_folder();
    let backing = host.disks.registry.find(&record.backing);
    let backing = backing.map(|seen| seen.record.name.clone()).unwrap_or_default();
    let (sidecar, path) = (Sidecar::of(record, &backing), folder.path(record));
    let paths = [folder.root()];
    let written = host.pools.files.run(&paths, move || sidecar.write(&path)).await?;
    written.map_err(|error| file_failed(&format!("note the name of disk \"{}\"", record.name), &error))
}

/// Creates a disk from a copy of an image. Returns when the disk is complete and durable. A failure
/// leaves no files.
pub async fn take_in(host: &Arc<Host>, record: DiskRecord, image: PathBuf) -> Result<(), Failure> {
    let mut record = host.disks.reserve(record, None)?;
    if let Err(error) = host.store.put(&record).await {
        forget(host, &record);
        return Err(store_failure(error));
    }
    let made = match copy_image(host, &record, image).await {
        Ok(()) => settle(host, &mut record).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = made {
        finish(host, &record).await;
        return Err(failure);
    }
    tell(host, &record, "DiskCreated", "the disk was made of a copy");
    Ok(())
}

async fn copy_image(host: &Arc<Host>, record: &DiskRecord, image: PathBuf) -> Result<(), Failure> {
    let (folder, of) = (host.disk_folder(), record.clone());
    let copying = host.pools.bulk.run(&[folder.root()], move || {
        let from = File::open(image)?;
        let to = folder.create(&of)?;
        copy(&from, &to, from.metadata()?.len(), true, &Control::default())?;
        folder.sync(&to)
    });
    let copied: io::Result<()> = copying.await?;
    copied.map_err(|error| file_failed(&format!("make disk \"{}\"", record.name), &error))
}

/// Makes the file of a disk without content.
pub async fn empty(host: &Arc<Host>, new: &NewDisk, record: &DiskRecord) -> Result<(), Failure> {
    make(host, new, record, Control::default()).await.map(drop)
}

/// Returns the size of the disk.
async fn make(
    host: &Arc<Host>,
    new: &NewDisk,
    record: &DiskRecord,
    control: Control,
) -> Result<u64, Failure> {
    match (&new.content, new.format) {
        (Content::RawFile(path), _) => {
            let paths = [path.clone(), host.disk_folder().root()];
            let (of, path, new, record) = (Arc::clone(host), path.clone(), new.clone(), record.clone());
            let copying = host
                .pools
                .bulk
                .run(&paths, move || copy_file(&of, &path, &new, &record, &control));
            copying.await?
        }
        (Content::Image { name, overlay: false }, _) => {
            let image = host.images.get(name.as_str())?;
            let content = host.image_folder().content(&image.digest);
            let paths = [host.disk_folder().root()];
            let (of, new, record) = (Arc::clone(host), new.clone(), record.clone());
            let copying = host.pools.bulk.run(&paths, move || {
                let label = format!("image \"{}\"", image.name);
                let source = File::open(&content)
                    .map_err(|error| file_failed(&format!("open the file of {label}"), &error))?;
                copy_into(
                    &of,
                    &label,
                    (&source, image.size_bytes),
                    record.size_bytes,
                    &new,
                    &record,
                    &control,
                )
            });
            copying.await?
        }
        (_, Some(Format::Qcow2)) => make_qcow2(host, new, record, &control).await,
        _ => {
            let paths = [host.disk_folder().root()];
            let (of, new, record) = (Arc::clone(host), new.clone(), record.clone());
            let making = host
                .pools
                .bulk
                .run(&paths, move || make_raw(&of, &new, &record, &control));
            making.await?
        }
    }
}

fn operation_of(record: &DiskRecord) -> String {
    format!("make disk \"{}\"", record.name)
}

/// Blocking.
fn make_raw(host: &Host, new: &NewDisk, record: &DiskRecord, control: &Control) -> Result<u64, Failure> {
    let folder = host.disk_folder();
    let failed = |error: io::Error| match control.wanted() {
        Ok(()) => file_failed(&operation_of(record), &error),
        Err(_) => cancelled(&host.stopping),
    };
    let size = record.size_bytes;
    let file = folder.create(record).map_err(failed)?;
    if new.preallocation == Preallocation::Full {
        enough_room(&operation_of(record), &folder.root(), size)?;
    }
    file.set_len(size)
        .and_then(|()| reserve(&file, 0, size, new.preallocation, control))
        .and_then(|()| folder.sync(&file))
        .map_err(failed)?;
    Ok(size)
}

/// Reserves `length` bytes from `start` on where that is asked for. Does not change the file's length.
pub fn reserve(
    file: &File,
    start: u64,
    length: u64,
    preallocation: Preallocation,
    control: &Control,
) -> io::Result<()> {
    if preallocation != Preallocation::Full {
        return Ok(());
    }
    let mut done = 0;
    while done < length {
        control.wanted()?;
        control.progress(done, length);
        let step = RESERVED_AT_ONCE.min(length - done);
        let reserved =
            rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, start + done, step));
        reserved?;
        done += step;
    }
    Ok(())
}

/// Blocking; returns the size of the disk.
fn copy_file(
    host: &Host,
    path: &Path,
    new: &NewDisk,
    record: &DiskRecord,
    control: &Control,
) -> Result<u64, Failure> {
    let label = format!("rawFile: \"{}\"", path.display());
    let source = files::open_image_file(
        &label,
        path,
        Within::Roots(&host.config.roots.disks),
        Cache::Writeback,
        Use::Read,
    )?;
    if !files::lock(&source, Locks::Take, true, &host.ledger).map_err(|error| file_failed("lock", &error))? {
        let user = files::user(&source, &host.ledger);
        let message = format!("{label} is in use by {user}, which may write to it");
        return Err(Failure::precondition("DISK_IN_USE", message));
    }
    let size = source.size;
    if size == 0 || !size.is_multiple_of(512) || size > MAX_SIZE {
        let message =
            format!("{label} has {size} bytes, which is not a multiple of 512 above 0 and up to 64 TiB");
        return Err(Failure::precondition("DISK_SIZE_INVALID", message));
    }
    if let Some(wanted) = new.size.filter(|wanted| *wanted < size) {
        let problem = format_args!(
            "is {wanted}, less than the {size} of the file: leave it out, or give at least that"
        );
        return Err(Failure::field("disk.spec.sizeBytes", problem));
    }
    let wanted = new.size.unwrap_or(size);
    let from = File::from(source.fd);
    if !new.any_content {
        signature::refuse(&label, &from)?;
    }
    copy_into(host, "rawFile", (&from, size), wanted, new, record, control)
}

/// Creates a disk of `wanted` bytes from the content of a file. Blocking. Returns the size of the
/// disk.
fn copy_into(
    host: &Host,
    label: &str,
    (from, size): (&File, u64),
    wanted: u64,
    new: &NewDisk,
    record: &DiskRecord,
    control: &Control,
) -> Result<u64, Failure> {
    let folder = host.disk_folder();
    let full = new.preallocation == Preallocation::Full;
    if full {
        folder
            .make()
            .map_err(|error| file_failed(&operation_of(record), &error))?;
        enough_room(&operation_of(record), &folder.root(), wanted)?;
    }
    let copied = folder.create(record).and_then(|file| {
        // Its progress is not that of the copy.
        reserve(&file, 0, wanted, new.preallocation, &control.silent())?;
        // Shared blocks would have to be taken when they are written to.
        copy(from, &file, size, !full, control)?;
        file.set_len(wanted)?;
        folder.sync(&file)
    });
    match copied {
        Ok(()) => Ok(wanted),
        Err(_) if control.wanted().is_err() => Err(cancelled(&host.stopping)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Failure::precondition(
            "DISK_UNUSABLE",
            format!("{label}: {error}"),
        )),
        Err(error) => Err(file_failed(
            &format!("copy into disk \"{}\"", record.name),
            &error,
        )),
    }
}

async fn make_qcow2(
    host: &Arc<Host>,
    new: &NewDisk,
    record: &DiskRecord,
    control: &Control,
) -> Result<u64, Failure> {
    let folder = host.disk_folder();
    let mut below: Vec<(PathBuf, Format)> = Vec::new();
    if let Content::OverlayOf(name) = &new.content {
        let base = host.disks.resolve(&folder, name.as_str())?;
        below.push((base.path, base.format));
        below.extend(base.backing);
    } else if !record.image_digest.is_empty() {
        below.push((folder.image(record), Format::Raw));
    }
    let operation = operation_of(record);
    let full = new.preallocation == Preallocation::Full;
    let (of, folder_of, words) = (record.clone(), folder.clone(), operation.clone());
    let opened = host.pools.bulk.run(&[folder.root()], move || {
        let failed = |error: io::Error| file_failed(&words, &error);
        let backing = below
            .into_iter()
            .map(|(path, format)| Ok((File::open(path)?.into(), format)));
        let backing = backing
            .collect::<io::Result<Vec<(OwnedFd, Format)>>>()
            .map_err(failed)?;
        let image = folder_of.create(&of).map_err(failed)?;
        if full {
            enough_room(&words, &folder_of.root(), of.size_bytes)?;
        }
        Ok::<_, Failure>((image, backing))
    });
    let (image, backing) = opened.await??;
    let own = image
        .try_clone()
        .map_err(|error| file_failed(&operation, &error))?;
    let task = image::Task {
        command: "create",
        image: image.into(),
        format: Format::Qcow2,
        size: record.size_bytes,
        preallocation: new.preallocation,
        backing,
    };
    tokio::select! {
        made = image::run(host, task) => made?,
        () = control.cancel().cancelled() => return Err(cancelled(&host.stopping)),
        () = watch_growth(host, &own, record.size_bytes, control), if full => {}
    }
    let syncing = host.pools.bulk.run(&[folder.root()], move || folder.sync(&own));
    syncing.await?.map_err(|error| file_failed(&operation, &error))?;
    Ok(record.size_bytes)
}

/// Reports the allocated size of an image as progress, because its child process reports none.
/// Never returns.
async fn watch_growth(host: &Arc<Host>, image: &File, size: u64, control: &Control) {
    let mut clock = tokio::time::interval(LOOK);
    loop {
        clock.tick().await;
        let Ok(image) = image.as_fd().try_clone_to_owned() else {
            continue;
        };
        let paths = [host.disk_folder().root()];
        let looking = host.pools.files.run(&paths, move || rustix::fs::fstat(image));
        if let Ok(Ok(stat)) = looking.await {
            // stat(2): blocks of 512 bytes.
            let there = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
            control.progress(there, size);
        }
    }
}
