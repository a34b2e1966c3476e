//! Makes a disk.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use proto::{
    model::disk::{Cache, Content, Format, MAX_SIZE, NewDisk, Preallocation},
    v1,
};
use rustix::fs::{FallocateFlags, fallocate};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{copy::copy, file, finish, image, tell};
use crate::{
    context::Context,
    failure::{Failure, Kind},
    host::Host,
    store::{DiskRecord, DiskStage},
    text,
    vm::{
        files::{self, Locks, Use},
        store_failure,
    },
};

/// Makes the disk that is asked for; returns when it is whole and durable. `cancel` ends the attempt; whatever fails,
/// nothing is left.
pub async fn create(
    host: &Arc<Host>,
    request: v1::CreateDiskRequest,
    context: &Context,
    cancel: CancellationToken,
) -> Result<v1::Disk, Failure> {
    if let Some(made) = host.requests.made_disk(context)
        && let Some(record) = host.disks.list().into_iter().find(|disk| disk.uid == made)
    {
        return describe(host, record).await;
    }
    let new = NewDisk::try_from(&request)?;
    let wire = request.disk.unwrap_or_default();
    let format = if new.format == Format::Qcow2 {
        v1::DiskFormat::Qcow2
    } else {
        v1::DiskFormat::Raw
    };
    let preallocation = match new.preallocation {
        Preallocation::Off => v1::DiskPreallocation::Off,
        Preallocation::Metadata => v1::DiskPreallocation::Metadata,
        Preallocation::Full => v1::DiskPreallocation::Full,
    };
    let record = DiskRecord {
        uid: Uuid::new_v4().as_bytes().to_vec(),
        name: new.name.to_string(),
        created_ms: text::now_ms(),
        labels: wire.labels,
        format: format.into(),
        size_bytes: new.size.unwrap_or_default(),
        preallocation: preallocation.into(),
        backing: Vec::new(),
        stage: DiskStage::Creating.into(),
        begun: host.requests.mark(context).into_iter().collect(),
    };
    let below = match &new.content {
        Content::OverlayOf(below) => Some(below.as_str()),
        Content::Empty | Content::RawFile(_) => None,
    };
    let mut record = host.disks.reserve(record, below)?;
    // From here on the name is taken: every way out settles or forgets it.
    let made = match host.store.put_disk(&record).await {
        Ok(()) => make(host, &new, &mut record, &cancel).await,
        Err(error) => {
            host.disks.forget(&record.name);
            return Err(store_failure(error));
        }
    };
    let made = match made {
        Ok(()) if cancel.is_cancelled() => Err(cancelled()),
        Ok(()) => {
            record.stage = DiskStage::Ready.into();
            host.store.put_disk(&record).await.map_err(store_failure)
        }
        Err(failure) => Err(failure),
    };
    if let Err(failure) = made {
        finish(host, &record).await;
        return Err(failure);
    }
    host.disks.settle(record.clone());
    tell(
        host,
        &record,
        "DiskCreated",
        format!("the disk was made, {} bytes", record.size_bytes),
    );
    describe(host, record).await
}

pub async fn describe(host: &Arc<Host>, record: DiskRecord) -> Result<v1::Disk, Failure> {
    let (of, folder) = (Arc::clone(host), host.disk_folder());
    let describing = host
        .pools
        .files
        .run(&[folder.root()], move || of.disks.describe(&folder, &record));
    describing.await
}

fn cancelled() -> Failure {
    Failure::new(
        Kind::Aborted,
        "CANCELLED",
        "the request was cancelled: nothing was made",
    )
}

async fn make(
    host: &Arc<Host>,
    new: &NewDisk,
    record: &mut DiskRecord,
    cancel: &CancellationToken,
) -> Result<(), Failure> {
    match (&new.content, new.format) {
        (Content::RawFile(path), _) => {
            let (of, path, new, record_of, stop) = (
                Arc::clone(host),
                path.clone(),
                new.clone(),
                record.clone(),
                cancel.clone(),
            );
            let paths = [path.clone(), host.disk_folder().root()];
            let copying = host
                .pools
                .bulk
                .run(&paths, move || copy_file(&of, &path, &new, &record_of, &stop));
            record.size_bytes = copying.await??;
            Ok(())
        }
        (_, Format::Qcow2) => make_qcow2(host, new, record, cancel).await,
        (_, Format::Raw | Format::Iso) => {
            let (of, new, record) = (Arc::clone(host), new.clone(), record.clone());
            let paths = [host.disk_folder().root()];
            host.pools
                .bulk
                .run(&paths, move || make_raw(&of, &new, &record))
                .await?
        }
    }
}

/// Blocking.
fn make_raw(host: &Host, new: &NewDisk, record: &DiskRecord) -> Result<(), Failure> {
    let folder = host.disk_folder();
    let made = folder.create(record).and_then(|file| {
        file.set_len(record.size_bytes)?;
        reserve(&file, 0, record.size_bytes, new.preallocation)?;
        folder.sync(&file)
    });
    made.map_err(|error| file::failed(&format!("make disk \"{}\"", new.name), &error))
}

/// Reserves `length` bytes from `start` on where that is asked for. Does not change the file's length.
pub fn reserve(file: &File, start: u64, length: u64, preallocation: Preallocation) -> io::Result<()> {
    if preallocation != Preallocation::Full || length == 0 {
        return Ok(());
    }
    let reserved = rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, start, length));
    Ok(reserved?)
}

/// Blocking; returns the size of the disk.
fn copy_file(
    host: &Host,
    path: &Path,
    new: &NewDisk,
    record: &DiskRecord,
    cancel: &CancellationToken,
) -> Result<u64, Failure> {
    let label = format!("rawFile: \"{}\"", path.display());
    let source = files::open_image_file(&label, path, Cache::Writeback, Use::Read)?;
    if !files::lock(&source, Locks::Take, true, &host.ledger).map_err(|error| file::failed("lock", &error))? {
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
        return Err(Failure::field("disk.sizeBytes", problem));
    }
    let wanted = new.size.unwrap_or(size);
    let folder = host.disk_folder();
    let full = new.preallocation == Preallocation::Full;
    let from = File::from(source.fd);
    let copied = folder.create(record).and_then(|file| {
        reserve(&file, 0, wanted, new.preallocation)?;
        // Shared blocks would have to be taken when they are written to.
        copy(&from, &file, size, !full, cancel)?;
        file.set_len(wanted)?;
        folder.sync(&file)
    });
    match copied {
        Ok(()) => Ok(wanted),
        Err(_) if cancel.is_cancelled() => Err(cancelled()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Failure::precondition(
            "DISK_UNUSABLE",
            format!("rawFile: {error}"),
        )),
        Err(error) => Err(file::failed(&format!("copy into disk \"{}\"", new.name), &error)),
    }
}

async fn make_qcow2(
    host: &Arc<Host>,
    new: &NewDisk,
    record: &DiskRecord,
    cancel: &CancellationToken,
) -> Result<(), Failure> {
    let folder = host.disk_folder();
    let mut below: Vec<(PathBuf, Format)> = Vec::new();
    if let Content::OverlayOf(name) = &new.content {
        let base = host.disks.resolve(&folder, name.as_str())?;
        below.push((base.path, base.format));
        below.extend(base.backing);
    }
    let operation = format!("make disk \"{}\"", new.name);
    let (of, folder_of) = (record.clone(), folder.clone());
    let opened = host.pools.bulk.run(
        &[folder.root()],
        move || -> io::Result<(File, Vec<(OwnedFd, Format)>)> {
            let backing = below
                .into_iter()
                .map(|(path, format)| Ok((File::open(path)?.into(), format)));
            let backing = backing.collect::<io::Result<_>>()?;
            Ok((folder_of.create(&of)?, backing))
        },
    );
    let (image, backing) = opened.await?.map_err(|error| file::failed(&operation, &error))?;
    let own = image
        .try_clone()
        .map_err(|error| file::failed(&operation, &error))?;
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
        () = cancel.cancelled() => return Err(cancelled()),
    }
    let syncing = host.pools.bulk.run(&[folder.root()], move || folder.sync(&own));
    syncing.await?.map_err(|error| file::failed(&operation, &error))
}
