//! Snapshots of VMs. Each has a record in the store and a file
//! `<state_dir>/snapshots/<uid>.snapshot` in the format of `vmm`.
//!
//! ```text
//!  (none) ──record──▶ Partial ──files complete and durable──▶ Ready ──record──▶ Partial ──file gone──▶ (none)
//! ```
//!
//! Invariant: a file exists only while its record exists. The next start of the daemon finds the
//! remains of an interrupted creation or deletion by the record, and removes them.
//!
//! An export and a restore read the files while the registry prevents the deletion of the snapshot.
//! An import creates the files from a client's archive.
//!
//! The configuration bounds the space of the files. Each record has the space of its snapshot:
//! during creation the reserved maximum, and then the allocated space.
//!
//! The `vmm` of the VM writes the file and reads it; the daemon never parses it. The file is empty
//! in a snapshot of the disks alone. It belongs to root. A `vmm` gets a descriptor of it, read-only
//! for a restore, so that no `vmm` can change the data from which other VMs are restored.

mod archive;
mod create;
mod described;
mod disks;
mod export;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod import;
mod restore;
mod retention;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::task::spawn_blocking;
use uuid::Uuid;
use vmmd_api::v1;

pub use create::create;
pub use export::{Stream, export};
pub use import::import;
pub use restore::restore;

use vmmd_host::{
    dirs::private_dir,
    failure::{Failure, file_failed},
    text,
};
use vmmd_objects::{
    context::Context,
    event::{Draft, Object},
    operation::Handle,
    registry::Record as _,
    request,
};
use vmmd_store::{Key, RequestRecord, SnapshotRecord, SnapshotStage, store_failure};

use crate::host::Host;

/// `<state_dir>/snapshots`, for root only. Blocking.
#[derive(Clone, Debug)]
struct Folder(PathBuf);

impl Folder {
    fn of(state_dir: &Path) -> Self {
        Self(state_dir.join("snapshots"))
    }

    fn path(&self, record: &SnapshotRecord) -> PathBuf {
        self.0.join(format!("{}.snapshot", uid(record)))
    }

    /// Makes the file of a new snapshot, empty.
    fn create(&self, record: &SnapshotRecord) -> io::Result<File> {
        self.make(&self.path(record))
    }

    fn make(&self, path: &Path) -> io::Result<File> {
        private_dir(&self.0)?;
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    }

    /// The copy of a disk in a snapshot, by its number in the record.
    fn disk(&self, record: &SnapshotRecord, number: usize) -> PathBuf {
        self.0.join(format!("{}.{number}.disk", uid(record)))
    }

    /// Makes the file of a disk's copy, empty.
    fn create_disk(&self, record: &SnapshotRecord, number: usize) -> io::Result<File> {
        self.make(&self.disk(record, number))
    }

    /// Room that the files of a snapshot take, in bytes.
    fn allocated(&self, record: &SnapshotRecord) -> io::Result<u64> {
        let disks = (0..record.disks.len()).map(|number| self.disk(record, number));
        disks.chain([self.path(record)]).try_fold(0_u64, |sum, path| {
            Ok(sum.saturating_add(allocated(&fs::metadata(path)?)))
        })
    }

    /// Makes the names in it durable.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    /// Removes the files of a snapshot; they may be gone already.
    fn remove(&self, record: &SnapshotRecord) -> io::Result<()> {
        let disks = (0..record.disks.len()).map(|number| self.disk(record, number));
        for path in disks.chain([self.path(record)]) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        match self.sync() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            synced => synced,
        }
    }
}

/// Room that a file takes, in bytes. Blocks that it shares with others count.
fn allocated(metadata: &fs::Metadata) -> u64 {
    metadata.blocks().saturating_mul(512)
}

fn folder(host: &Host) -> Folder {
    Folder::of(&host.config.state_dir)
}

/// Does something with the folder of snapshots that may block.
async fn blocking<T: Send + 'static>(
    host: &Arc<Host>,
    work: impl FnOnce(Folder) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let folder = folder(host);
    let done = spawn_blocking(move || work(folder)).await;
    done.unwrap_or_else(|error| Err(Failure::internal(error.to_string())))
}

/// UUID of the VM that a snapshot is of.
fn vm_uid(record: &SnapshotRecord) -> Uuid {
    Uuid::from_slice(&record.vm_uid).unwrap_or_default()
}

fn uid(record: &SnapshotRecord) -> Uuid {
    Uuid::from_slice(&record.uid).unwrap_or_default()
}

/// Guard that prevents the deletion of a snapshot.
struct Held {
    host: Arc<Host>,
    record: SnapshotRecord,
}

impl Held {
    fn new(host: &Arc<Host>, name: &str) -> Result<Self, Failure> {
        let record = host.snapshots.begin_reading(name)?;
        Ok(Self {
            host: Arc::clone(host),
            record,
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.host.snapshots.end_reading(&self.record.name);
    }
}

/// Ends the creation of a snapshot. On success the snapshot is complete and durable, and an event
/// reports `done`. On failure all remains are removed.
async fn end(
    host: &Arc<Host>,
    mut record: SnapshotRecord,
    made: Result<(), Failure>,
    operation: Handle,
    (reason, done): (&'static str, &str),
) -> Result<v1::Snapshot, Failure> {
    let within = match made {
        Ok(()) => measure(host, &mut record).await,
        Err(failure) => Err(failure),
    };
    let noted = match within {
        Ok(()) => {
            record.stage = SnapshotStage::Ready.into();
            host.store.put(&record).await.map_err(store_failure)
        }
        Err(failure) => Err(failure),
    };
    if let Err(failure) = noted {
        discard(host, &record).await;
        operation.fail(&failure);
        return Err(failure);
    }
    host.snapshots.put(record.clone());
    operation.complete("the snapshot is complete");
    let message = format!("a snapshot of VM \"{}\" was {done}", record.vm_name);
    tell(host, &record, reason, message);
    Ok(describe(&record, host.store.key()))
}

/// Finds out what room the files of a snapshot take. Refused when that is more than was reserved and more than is left.
async fn measure(host: &Arc<Host>, record: &mut SnapshotRecord) -> Result<(), Failure> {
    record.allocated_bytes = room(host, record).await?;
    host.snapshots.charge(record, &host.config.snapshots)
}

/// Room that the files of a snapshot take, in bytes.
async fn room(host: &Arc<Host>, record: &SnapshotRecord) -> Result<u64, Failure> {
    let of = record.clone();
    blocking(host, move |folder| {
        let room = folder.allocated(&of);
        room.map_err(|error| failed("look at the snapshot's files", &error))
    })
    .await
}

/// A snapshot as the API shows it.
pub fn describe(record: &SnapshotRecord, key: &Key) -> v1::Snapshot {
    v1::Snapshot {
        metadata: Some(record.metadata()),
        spec: Some(v1::SnapshotSpec {
            vm: record.vm_name.clone(),
            kind: match record.has_machine() {
                true => v1::SnapshotKind::Full.into(),
                false => v1::SnapshotKind::Disks.into(),
            },
        }),
        status: Some(v1::SnapshotStatus {
            vm_uid: vm_uid(record).to_string(),
            vm_spec: crate::vm::shown(record.vm_spec.as_ref(), key),
            complete_time: text::timestamp(record.completed_ms),
            size_bytes: record.size_bytes,
            written_bytes: record.written_bytes,
            pause_duration: Some(Duration::from_nanos(record.pause_ns).into()),
            disks: record.disks.iter().map(|disk| disk.name.clone()).collect(),
            allocated_bytes: record.allocated_bytes,
            retention: record.retention.as_ref().map(retention::describe),
            consistency: record.consistency,
            consistency_message: record.consistency_message.clone(),
        }),
    }
}

/// Deletes a snapshot.
pub async fn delete(host: &Arc<Host>, name: &str, context: &Context) -> Result<(), Failure> {
    let record = host.snapshots.begin_delete(name)?;
    let answered = host.requests.mark(context);
    let answered = answered.map(|mark| request::done(mark, &v1::DeleteSnapshotResponse::default()));
    retire(
        host,
        record,
        answered,
        ("SnapshotDeleted", "the snapshot was deleted"),
    )
    .await
}

/// Deletes a snapshot that is out of use, stores the response to the request, and emits an event
/// with the reason.
async fn retire(
    host: &Arc<Host>,
    record: SnapshotRecord,
    answered: Option<RequestRecord>,
    (reason, message): (&'static str, &str),
) -> Result<(), Failure> {
    let going = SnapshotRecord {
        stage: SnapshotStage::Partial.into(),
        ..record.clone()
    };
    // From here on the next daemon completes the deletion if this one ends.
    if let Err(error) = host.store.put_with(&going, None, answered).await {
        host.snapshots.put(record);
        return Err(store_failure(error));
    }
    if let Err(failure) = remove(host, &going).await {
        tracing::error!(snapshot = record.name, %failure, "remove a snapshot that was deleted");
    }
    tell(host, &record, reason, message);
    Ok(())
}

/// Removes a snapshot's file, then its record.
async fn remove(host: &Arc<Host>, record: &SnapshotRecord) -> Result<(), Failure> {
    let (folder, of) = (folder(host), record.clone());
    let removed = spawn_blocking(move || folder.remove(&of)).await;
    let removed = removed.unwrap_or_else(|error| Err(io::Error::other(error)));
    removed.map_err(|error| failed("remove the snapshot's file", &error))?;
    let removed = host.store.remove::<SnapshotRecord>(&record.uid, None, None).await;
    removed.map_err(store_failure)?;
    host.snapshots.forget(&record.uid);
    Ok(())
}

/// Removes the remains of an incomplete snapshot.
async fn discard(host: &Arc<Host>, record: &SnapshotRecord) {
    if let Err(failure) = remove(host, record).await {
        tracing::error!(snapshot = record.name, %failure, "remove the remains of a snapshot");
        host.snapshots.forget(&record.uid);
    }
}

/// Loads the snapshots of the store at the daemon's start, and completes interrupted deletions.
pub async fn adopt(host: &Arc<Host>, records: Vec<SnapshotRecord>) {
    for mut record in records {
        if record.stage() == SnapshotStage::Ready {
            host.requests.adopt(&record.begun, &record.uid);
            if record.allocated_bytes == 0 {
                // A record of an earlier daemon. Limits do not apply to existing snapshots.
                match room(host, &record).await {
                    Ok(bytes) => record.allocated_bytes = bytes,
                    Err(failure) => {
                        tracing::warn!(snapshot = record.name, %failure, "find out what room a snapshot takes");
                    }
                }
            }
            host.snapshots.put(record);
            continue;
        }
        match remove(host, &record).await {
            Ok(()) => {
                let message = "the snapshot's creation or deletion had been interrupted: what was left of it is removed";
                tell(host, &record, "Repaired", message);
            }
            Err(failure) => {
                tracing::error!(snapshot = record.name, %failure, "remove the remains of a snapshot");
            }
        }
    }
    retention::converge(host, None).await;
}

fn tell(host: &Host, record: &SnapshotRecord, reason: &str, message: impl Into<String>) {
    let object = Object::Snapshot(record.name.clone(), uid(record));
    host.events.emit(Draft::normal(object, reason, message));
}

/// Refusal for a failed access to a snapshot's file.
fn failed(operation: &str, error: &io::Error) -> Failure {
    file_failed(operation, error)
}
