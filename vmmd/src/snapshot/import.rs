//! Makes a snapshot of the archive that a client sends.

use std::{fs::File, io, os::unix::fs::FileExt as _, sync::Arc};

use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use vmmd_api::v1::{self, import_snapshot_request::Message};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_images::{has_room, room};
use vmmd_objects::{
    context::Context,
    event::Object,
    operation::{Progress, Type},
};
use vmmd_spec::disk::MAX_SIZE;
use vmmd_store::store_failure;
use vmmd_store::{DiskImage, SnapshotRecord};

use super::{
    Folder, allocated,
    archive::{Damaged, Part, Reader},
    blocking, describe,
    described::Described,
    disks, end, failed,
};
use crate::host::Host;

/// Longest file of an archive in bytes: a disk of the largest size with the tables of its image.
const MAX_FILE: u64 = MAX_SIZE + (MAX_SIZE >> 6);

/// Makes a snapshot of what `stream` brings behind `open`; returns when it is complete and durable. `cancel` ends the attempt. An attempt
/// that fails leaves nothing.
pub async fn import<S>(
    host: &Arc<Host>,
    open: v1::ImportSnapshotOpen,
    stream: S,
    context: &Context,
    cancel: CancellationToken,
) -> Result<v1::Snapshot, Failure>
where
    S: Stream<Item = Result<v1::ImportSnapshotRequest, Status>> + Unpin + Send,
{
    if let Some(made) = host.requests.made(context, "ImportSnapshot")
        && let Some(seen) = host.snapshots.registry.find(&made)
    {
        return Ok(describe(&seen.record, host.store.key()));
    }
    let mut archive = Archive {
        stream,
        reader: Reader::new(),
        bytes: Vec::new(),
        cancel: [cancel, CancellationToken::new()],
    };
    let described = archive.described().await?;
    let most = described.allocated_bytes();
    let mut record = described.record(&open.name)?;
    record.begun = host.requests.mark(context).into_iter().collect();
    find_images(host, &mut record)?;
    record.allocated_bytes = most;
    host.snapshots.reserve(&record, &host.config.snapshots)?;
    let object = Object::Snapshot(record.name.clone(), super::uid(&record));
    let operation = host
        .operations
        .begin(Type::SnapshotImport, &object, context, None);
    operation.progress(Progress::bytes(0, open.size_bytes), "receiving the archive");
    let reporter = operation.reporter();
    let progress = |done| reporter.advance(Progress::bytes(done, open.size_bytes));
    archive.cancel[1] = operation.token().clone();
    let made = make(host, &record, archive, progress).await;
    let made = made.map(|size_bytes| record.size_bytes = size_bytes);
    end(host, record, made, operation, ("SnapshotImported", "imported")).await
}

fn cancelled() -> Failure {
    let message = "the import was cancelled: nothing was made";
    Failure::new(Kind::Aborted, "CANCELLED", message)
}

/// Archive that a client sends.
struct Archive<S> {
    stream: S,
    reader: Reader,
    /// Unread bytes of the last message.
    bytes: Vec<u8>,
    /// Tokens of the caller and of the operation. They are checked only between file operations, so
    /// that no operation is running when the files are removed.
    cancel: [CancellationToken; 2],
}

impl<S: Stream<Item = Result<v1::ImportSnapshotRequest, Status>> + Unpin> Archive<S> {
    /// Its first part.
    async fn described(&mut self) -> Result<Described, Failure> {
        loop {
            let mut bytes = self.bytes.as_slice();
            let part = self.reader.next(&mut bytes).map_err(|it| damaged(&it))?;
            self.bytes = bytes.to_vec();
            match part {
                Some(Part::Record(record)) => return Described::read(&record),
                Some(_) => return Err(Failure::internal("the archive has no record")),
                None if self.more().await? => {}
                None => self.reader.finish().map_err(|it| damaged(&it))?,
            }
        }
    }

    /// Takes the next message; false when there is none.
    async fn more(&mut self) -> Result<bool, Failure> {
        let [caller, operation] = &self.cancel;
        let next = tokio::select! {
            next = self.stream.next() => next,
            () = caller.cancelled() => return Err(cancelled()),
            () = operation.cancelled() => return Err(cancelled()),
        };
        match next {
            Some(Ok(message)) => match message.message {
                Some(Message::Data(data)) => {
                    self.bytes = data;
                    Ok(true)
                }
                _ => Err(Failure::field("data", "must be in each message after the first")),
            },
            Some(Err(_)) => {
                let position = self.reader.position();
                let message =
                    format!("the client went away after {position} bytes of the archive: nothing was made");
                Err(Failure::new(Kind::Aborted, "IMPORT_CUT_OFF", message))
            }
            None => Ok(false),
        }
    }
}

fn damaged(damaged: &Damaged) -> Failure {
    Failure::new(Kind::Invalid, "ARCHIVE_DAMAGED", damaged.to_string())
}

/// Has overlays of images name the images of this node.
fn find_images(host: &Host, record: &mut SnapshotRecord) -> Result<(), Failure> {
    for disk in record
        .disks
        .iter_mut()
        .filter(|disk| !disk.image_digest.is_empty())
    {
        let Some(image) = host.images.with_digest(&disk.image_digest) else {
            let message = format!(
                "disk \"{}\" of the snapshot is an overlay of the image with the digest {}, which is not on this node: import that image first",
                disk.name,
                vmmd_spec::image::checksum_text(&disk.image_digest)
            );
            return Err(Failure::new(Kind::NotFound, "IMAGE_NOT_FOUND", message));
        };
        disk.source = Some(DiskImage {
            name: image.name,
            clone: v1::DiskClone::Overlay.into(),
        });
        disk.image = image.uid;
    }
    Ok(())
}

/// Makes the files of the snapshot; returns the length of that with the memory.
async fn make<S>(
    host: &Arc<Host>,
    record: &SnapshotRecord,
    mut archive: Archive<S>,
    progress: impl Fn(u64),
) -> Result<u64, Failure>
where
    S: Stream<Item = Result<v1::ImportSnapshotRequest, Status>> + Unpin,
{
    // The record prevents a deletion of the images from here on. They may have been deleted before.
    if let Some(gone) = record.disks.iter().find(|disk| {
        let image = &disk.image;
        !image.is_empty()
            && host
                .images
                .with_digest(&disk.image_digest)
                .is_none_or(|it| it.uid != *image)
    }) {
        let message = format!("the image below disk \"{}\" was deleted meanwhile", gone.name);
        return Err(Failure::new(Kind::NotFound, "IMAGE_NOT_FOUND", message));
    }
    host.store.put(record).await.map_err(store_failure)?;
    let mut charged = record.clone();
    let of = record.clone();
    let mut target = blocking(host, move |folder| Target::create(folder, of)).await?;
    loop {
        let (bytes, mut reader) = (std::mem::take(&mut archive.bytes), archive.reader);
        (archive.reader, target) = blocking(host, move |_| {
            let mut bytes = bytes.as_slice();
            while let Some(part) = reader.next(&mut bytes).map_err(|it| damaged(&it))? {
                target.take(part)?;
            }
            Ok((reader, target))
        })
        .await?;
        progress(archive.reader.position());
        // An archive may have more than it says.
        if host.config.snapshots.max_bytes.is_some() {
            let taken = target.allocated()?;
            if taken > charged.allocated_bytes {
                charged.allocated_bytes = taken;
                host.snapshots.charge(&charged, &host.config.snapshots)?;
            }
        }
        if !archive.more().await? {
            break;
        }
    }
    archive.reader.finish().map_err(|it| damaged(&it))?;
    blocking(host, move |_| target.finish()).await
}

/// The files of a snapshot that is being imported. Blocking.
struct Target {
    folder: Folder,
    record: SnapshotRecord,
    /// Memory file, then disk files.
    files: Vec<File>,
    /// The file that data is of.
    current: Option<File>,
    /// How many files the archive has had.
    seen: usize,
}

impl Target {
    /// Makes the files, empty. Refused when the file system has not as much room as the archive says that they take.
    fn create(folder: Folder, record: SnapshotRecord) -> Result<Self, Failure> {
        let made: io::Result<Vec<File>> = (|| {
            let mut files = vec![folder.create(&record)?];
            for number in 0..record.disks.len() {
                files.push(folder.create_disk(&record, number)?);
            }
            folder.sync()?;
            let enough = files.first().map(room).transpose()?;
            match enough.is_none_or(|room| room > record.allocated_bytes) {
                true => Ok(files),
                false => Err(io::ErrorKind::StorageFull.into()),
            }
        })();
        Ok(Self {
            files: made.map_err(|error| failed("make the snapshot's files", &error))?,
            folder,
            record,
            current: None,
            seen: 0,
        })
    }

    /// Room that the files take by now, in bytes.
    fn allocated(&self) -> Result<u64, Failure> {
        self.files.iter().try_fold(0_u64, |sum, file| {
            let looked = file.metadata();
            let looked = looked.map_err(|error| failed("look at the snapshot's files", &error))?;
            Ok(sum.saturating_add(allocated(&looked)))
        })
    }

    fn take(&mut self, part: Part) -> Result<(), Failure> {
        let written = match part {
            Part::File { number, length } => return self.begin(number, length),
            Part::Data { offset, bytes } => match &self.current {
                Some(file) => write(file, offset, &bytes),
                None => Err(io::ErrorKind::NotFound.into()),
            },
            Part::Record(_) | Part::End => Ok(()),
        };
        written.map_err(|error| failed("write the snapshot's files", &error))
    }

    fn begin(&mut self, number: u32, length: u64) -> Result<(), Failure> {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let file = self.files.get(number);
        let file = file.ok_or_else(|| invalid("has more files than its record has disks"))?;
        if length > MAX_FILE {
            return Err(invalid("has a file that is longer than one can be"));
        }
        let disk = number
            .checked_sub(1)
            .and_then(|number| self.record.disks.get(number));
        if let Some(disk) = disk
            && disk.format == i32::from(v1::DiskFormat::Raw)
            && disk.capacity_bytes != length
        {
            return Err(invalid(
                "has a raw disk whose file is not as long as the disk is large",
            ));
        }
        if number == 0 && length > 0 && !self.record.has_machine() {
            return Err(invalid("has memory in a snapshot of disks alone"));
        }
        let made = file.set_len(length).and_then(|()| file.try_clone());
        self.current = Some(made.map_err(|error| failed("make the snapshot's files", &error))?);
        self.seen += 1;
        Ok(())
    }

    /// Makes all of it durable; returns the length of the file with the memory.
    fn finish(self) -> Result<u64, Failure> {
        if self.seen != self.files.len() {
            return Err(invalid("has fewer files than its record has disks"));
        }
        let synced: io::Result<u64> = (|| {
            let memory = self.files.first().ok_or(io::ErrorKind::NotFound)?;
            memory.sync_all()?;
            disks::sync(&self.folder, &self.record)?;
            Ok(memory.metadata()?.len())
        })();
        synced.map_err(|error| failed("make the snapshot's files durable", &error))
    }
}

/// Some room of the file system stays free, as when an image is made.
fn write(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    if !has_room(file)? {
        return Err(io::ErrorKind::StorageFull.into());
    }
    file.write_all_at(bytes, offset)
}

fn invalid(problem: &str) -> Failure {
    let message = format!("the archive {problem}");
    Failure::new(Kind::Invalid, "ARCHIVE_INVALID", text::one_line(&message, 300))
}
