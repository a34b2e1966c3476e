//! Durable state: one redb file with a record per VM and per disk, the history of deleted VMs and
//! answered requests ([`history`]), and operations ([`operation`]).
//!
//! One thread owns the file. It writes all waiting changes in one transaction, which is durable
//! (two phases, fsync) before any caller is answered. A failed write changes nothing: the file is
//! closed and reopened before the next one, because redb refuses to continue after an I/O error.

mod answers;
mod change;
mod failure;
pub mod handover;
mod history;
mod kept;
mod migration;
mod network;
mod operation;
mod record;
mod seal;
mod snapshot;
mod stop;
mod stored;
mod version;

use std::{
    cell::RefCell,
    fs::File,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use change::Change;
use migration::{OLDEST, migrate, schema};
use prost::Message;
use redb::{
    Database, Durability, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition,
    TableHandle as _, WriteTransaction,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use vmmd_host::fault;

pub use answers::{REQUEST_AGE_MS, RequestKey, RequestMark, RequestRecord};
pub use failure::store_failure;
pub use history::{Deleted, DeletionRecords, HistoryRecords, MAX_TOMBSTONES, Tombstone};
pub use kept::Kept;
pub use migration::SCHEMA;
pub use network::{FloatingRecord, LEASE_RETENTION_MS, LeaseRecord, NetworkRecord, PortRecord};
pub use operation::OperationRecord;
pub use record::{
    AbortRecord, AccessKeysRecord, ConditionRecord, DiskImage, DiskRecord, DiskSource, DiskStage, FileRecord,
    HandoverRecord, HandoverStage, Hardware, ImageRecord, ImageSource, ImageStage, InstanceRecord,
    NicHardware, NodeRecord, OciLayoutSource, OciSource, ProcessorRecord, RegistryCredentials, ReplacedImage,
    ReplacingRecord, SourceVersion, StopRecord, VmRecord, disk_source, image_source,
};
pub use seal::Key;
pub use snapshot::{RetentionRecord, SnapshotDisk, SnapshotRecord, SnapshotStage};
pub use vm_lifecycle::{policy::Intent, restart::RestartRecord};

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const VMS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("vms");
const DISKS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("disks");
const SNAPSHOTS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("snapshots");
const NETWORKS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("networks");
const IMAGES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("images");
const NODE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("node");
/// Key of the one record in [`NODE`].
const SELF: &[u8] = b"self";
const FILE: &str = "vmmd.redb";
/// Pages kept in memory, in bytes: records are read once, at start.
const CACHE: usize = 1 << 20;
/// Most changes in one transaction.
const BATCH: usize = 64;

/// Why the store can't do something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system is full.
    #[error("the file system of the daemon's state is full")]
    Full,
    /// The file could not be opened, read or written.
    #[error("{0}: {1}")]
    Failed(&'static str, String),
    /// A newer daemon has been at work.
    #[error("the store has schema {0}, this daemon knows up to {SCHEMA}: install the newer vmmd again")]
    Newer(u64),
    /// A daemon whose schema has no migration has been at work.
    #[error(
        "the store has schema {0}, this daemon knows {OLDEST} and later: install the older vmmd again, or remove the store"
    )]
    Older(u64),
    /// The thread has ended.
    #[error("the store is closed")]
    Closed,
}

impl Error {
    fn of(operation: &'static str, error: impl Into<redb::Error>) -> Self {
        let error = error.into();
        if let redb::Error::Io(cause) = &error
            && matches!(
                cause.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
            )
        {
            return Self::Full;
        }
        Self::Failed(operation, error.to_string())
    }
}

/// All that is in the store.
#[derive(Debug, Default, PartialEq)]
pub struct Records {
    /// VMs.
    pub vms: Vec<VmRecord>,
    /// VMs with undecodable records.
    pub unreadable: Vec<Unreadable>,
    /// Disks of the DiskService.
    pub disks: Vec<DiskRecord>,
    /// Snapshots of VMs.
    pub snapshots: Vec<SnapshotRecord>,
    /// Networks of the NetworkService.
    pub networks: Vec<NetworkRecord>,
    /// Images of the ImageService.
    pub images: Vec<ImageRecord>,
    /// What is remembered.
    pub history: HistoryRecords,
    /// The node.
    pub node: NodeRecord,
    /// Operations, the oldest first.
    pub operations: Vec<OperationRecord>,
    /// Migrations that were taken back and whose targets have not confirmed that.
    pub aborts: Vec<AbortRecord>,
}

/// A VM of which no more is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unreadable {
    /// The record's key: the VM's UUID.
    pub uid: Vec<u8>,
    /// As far as it can be read; empty when it can't.
    pub name: String,
    /// User id of its process, as far as it can be read.
    pub user: Option<u32>,
    /// What is wrong.
    pub error: String,
}

type Table = TableDefinition<'static, &'static [u8], &'static [u8]>;

enum Job {
    /// Changes that are made together or not at all.
    Write(Vec<Change>, oneshot::Sender<Result<(), Error>>),
    /// A VM's record, by its key.
    Vm(Vec<u8>, oneshot::Sender<Result<Option<VmRecord>, Error>>),
    /// Record of an answered request.
    Read(RequestKey, oneshot::Sender<Result<Option<RequestRecord>, Error>>),
}

/// The store; clones are the same.
#[derive(Clone, Debug)]
pub struct Store {
    jobs: mpsc::Sender<Job>,
    key: Key,
    commits: Arc<AtomicU64>,
    failures: watch::Receiver<u64>,
    notes: operation::Pending,
}

impl Store {
    /// The file of the store in `dir`; locked while it is open.
    pub fn file(dir: &Path) -> PathBuf {
        dir.join(FILE)
    }

    /// Opens or makes the store in `dir`, whose secrets are sealed with `key`, migrates it, and returns it with all records.
    pub fn open(dir: &Path, key: &Key) -> Result<(Self, Records), Error> {
        let path = Self::file(dir);
        let database = open(&path, key)?;
        let mut records = load(&database, key)?;
        let run = history::Run::next(&mut records.history);
        let begun = write(&database, |transaction| {
            run.write(transaction)?;
            answers::prune(transaction)
        });
        let (database, run) = match begun {
            Ok(()) => (Some(database), None),
            // VMs run, and clients must be able to look at them and to make room.
            Err(Error::Full) => {
                tracing::error!(
                    "the file system of the daemon's state is full: make room; until then nothing can be changed"
                );
                (None, Some(run))
            }
            Err(error) => return Err(error),
        };
        let (jobs, receiver) = mpsc::channel(BATCH);
        let commits = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&commits);
        let (failed, failures) = watch::channel(0);
        let notes = operation::Pending::default();
        let thread = Thread {
            path,
            key: key.clone(),
            notes: notes.clone(),
            commits: counter,
            run: RefCell::new(run),
        };
        thread::Builder::new()
            .name("store".into())
            .spawn(move || supervise(&thread, database, receiver, &failed))
            .map_err(|error| Error::Failed("start the store's thread", error.to_string()))?;
        let store = Self {
            jobs,
            key: key.clone(),
            commits,
            failures,
            notes,
        };
        Ok((store, records))
    }

    /// Transactions that were made durable since it was opened.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Counter of the panics of the store's thread, after which it continues. Requests at that
    /// moment have failed.
    pub fn failures(&self) -> watch::Receiver<u64> {
        self.failures.clone()
    }

    /// Returns when the store answers; whether it can be written it does not say.
    pub async fn ping(&self) -> Result<(), Error> {
        self.vm(&[]).await.map(drop)
    }

    /// Returns the record of a VM, if it exists. An undecodable record is an error.
    pub async fn vm(&self, uid: &[u8]) -> Result<Option<VmRecord>, Error> {
        let (sender, receiver) = oneshot::channel();
        self.jobs
            .send(Job::Vm(uid.to_vec(), sender))
            .await
            .map_err(|_| Error::Closed)?;
        receiver.await.map_err(|_| Error::Closed)?
    }

    /// Writes a record, new or changed. Durable on return.
    pub async fn put<R: Kept>(&self, record: &R) -> Result<(), Error> {
        self.put_with(record, None, None).await
    }

    /// Writes a record as [`Self::put`] does, and stores the tombstone of an object that clients no longer see and the
    /// answers of `answered`, except for requests with an existing answer. Durable on return.
    pub async fn put_with<R: Kept>(
        &self,
        record: &R,
        tombstone: Option<Tombstone>,
        answered: impl IntoIterator<Item = RequestRecord>,
    ) -> Result<(), Error> {
        let put = Change::Put(R::TABLE, record.uid().to_vec(), record.encoded(&self.key)?);
        self.change_with::<R>(put, tombstone, answered).await
    }

    /// Removes the record with this UUID, and stores the tombstone and the answers as [`Self::put_with`] does. Durable on
    /// return.
    pub async fn remove<R: Kept>(
        &self,
        uid: &[u8],
        tombstone: Option<Tombstone>,
        answered: impl IntoIterator<Item = RequestRecord>,
    ) -> Result<(), Error> {
        let remove = Change::Remove(R::TABLE, uid.to_vec());
        self.change_with::<R>(remove, tombstone, answered).await
    }

    async fn change_with<R: Kept>(
        &self,
        change: Change,
        tombstone: Option<Tombstone>,
        answered: impl IntoIterator<Item = RequestRecord>,
    ) -> Result<(), Error> {
        let deletion = R::DELETED.zip(tombstone);
        let deletion = deletion.map(|(kind, tombstone)| Change::Bury(kind, tombstone));
        let answers = answered.into_iter().map(Change::Presume);
        self.changes([change].into_iter().chain(deletion).chain(answers).collect())
            .await
    }

    /// Writes a VM's record unless `cancelled` is set at the time of the write. A caller that
    /// cancels first and then writes the record itself is thus not overwritten. Durable on return;
    /// false if the record was not written.
    pub async fn put_unless(&self, cancelled: &CancellationToken, record: &VmRecord) -> Result<bool, Error> {
        let (key, value) = (record.uid.clone(), record.encoded(&self.key)?);
        self.change(Change::PutUnless(cancelled.clone(), key, value))
            .await?;
        Ok(!cancelled.is_cancelled())
    }

    /// Remembers the answer of a request. Durable on return.
    pub async fn complete(&self, record: RequestRecord) -> Result<(), Error> {
        self.change(Change::Complete(record)).await
    }

    /// The answer of a request, if it is remembered.
    pub async fn request(&self, key: RequestKey) -> Result<Option<RequestRecord>, Error> {
        let (sender, receiver) = oneshot::channel();
        self.jobs
            .send(Job::Read(key, sender))
            .await
            .map_err(|_| Error::Closed)?;
        receiver.await.map_err(|_| Error::Closed)?
    }

    /// Returns the key of the secrets.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Seals a secret, for the record with this UUID.
    pub fn seal(&self, uid: &[u8], secret: Vec<u8>) -> Result<Vec<u8>, Error> {
        self.key.close(uid, secret)
    }

    /// A secret that [`Self::seal`] has sealed; nothing when that was done with another key or for another record.
    pub fn unseal(&self, uid: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        self.key.plain(uid, sealed)
    }

    /// Writes the node's record. Durable on return.
    pub async fn put_node(&self, record: &NodeRecord) -> Result<(), Error> {
        self.change(Change::Put(NODE, SELF.to_vec(), record.encode_to_vec()))
            .await
    }

    /// Notes the record of an operation, or its removal. The note is written with the next change,
    /// or soon after.
    pub fn note(&self, id: &str, record: Option<&OperationRecord>) {
        if !self.notes.add(id, record) {
            return;
        }
        // Without a runtime, as in tests, it waits for the next change.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let store = self.clone();
            runtime.spawn(async move {
                tokio::time::sleep(operation::DELAY).await;
                // An error is logged where it happens, and the note stays.
                let _ = store.flush().await;
            });
        }
    }

    /// Writes the notes of operations. Durable on return.
    pub async fn flush(&self) -> Result<(), Error> {
        self.changes(Vec::new()).await
    }

    async fn change(&self, change: Change) -> Result<(), Error> {
        self.changes(vec![change]).await
    }

    async fn changes(&self, changes: Vec<Change>) -> Result<(), Error> {
        let (sender, receiver) = oneshot::channel();
        self.jobs
            .send(Job::Write(changes, sender))
            .await
            .map_err(|_| Error::Closed)?;
        receiver.await.map_err(|_| Error::Closed)?
    }
}

/// Serves until all senders are gone. After a panic, the requests under way fail and the file is
/// reopened.
fn supervise(
    thread: &Thread,
    mut database: Option<Database>,
    mut jobs: mpsc::Receiver<Job>,
    failed: &watch::Sender<u64>,
) {
    loop {
        let mut served = database.take();
        let ended = catch_unwind(AssertUnwindSafe(|| thread.serve(&mut served, &mut jobs)));
        if ended.is_ok() {
            return;
        }
        tracing::error!("the store's thread has panicked: the file is opened again");
        failed.send_modify(|failures| *failures += 1);
    }
}

/// State of the store's thread.
struct Thread {
    path: PathBuf,
    key: Key,
    notes: operation::Pending,
    commits: Arc<AtomicU64>,
    /// This run of the daemon, when there was no room to note it: the first change that has room does.
    run: RefCell<Option<history::Run>>,
}

impl Thread {
    fn serve(&self, database: &mut Option<Database>, jobs: &mut mpsc::Receiver<Job>) {
        let mut batch = Vec::new();
        while jobs.blocking_recv_many(&mut batch, BATCH) > 0 {
            fault::stall(self.path.parent().unwrap_or(&self.path), "store-hangs");
            let (mut changes, mut replies, mut reads) = (Vec::new(), Vec::new(), Vec::new());
            let mut vms = Vec::new();
            for job in batch.drain(..) {
                match job {
                    Job::Write(more, reply) => {
                        changes.extend(more);
                        replies.push(reply);
                    }
                    Job::Read(id, reply) => reads.push((id, reply)),
                    Job::Vm(uid, reply) => vms.push((uid, reply)),
                }
            }
            if !replies.is_empty() {
                self.write(database, &changes, replies);
            }
            for (id, reply) in reads {
                let found = self
                    .reopened(database)
                    .and_then(|database| answers::request(database, &id));
                let _ = reply.send(found);
            }
            for (uid, reply) in vms {
                let found = self
                    .reopened(database)
                    .and_then(|database| vm(database, &uid, &self.key));
                let _ = reply.send(found);
            }
        }
    }

    /// Writes the changes and the notes, and answers the waiting callers.
    fn write(
        &self,
        database: &mut Option<Database>,
        changes: &[Change],
        replies: Vec<oneshot::Sender<Result<(), Error>>>,
    ) {
        let notes = self.notes.get();
        let nothing = changes.is_empty() && notes.is_empty();
        let written = if nothing {
            Ok(())
        } else {
            self.commit(database, changes, &notes)
        };
        match written {
            Ok(()) => {
                self.notes.written(&notes);
                self.commits.fetch_add(u64::from(!nothing), Ordering::Relaxed);
                replies.into_iter().for_each(|reply| drop(reply.send(Ok(()))));
            }
            Err(error) => {
                tracing::error!(%error, "the store could not be written");
                *database = None;
                for reply in replies {
                    let same = match &error {
                        Error::Failed(operation, cause) => Error::Failed(operation, cause.clone()),
                        _ => Error::Full,
                    };
                    let _ = reply.send(Err(same));
                }
            }
        }
    }

    /// The database, opened again when it had to be closed.
    fn reopened<'a>(&self, database: &'a mut Option<Database>) -> Result<&'a Database, Error> {
        Ok(match database {
            Some(database) => database,
            none => none.insert(open(&self.path, &self.key)?),
        })
    }

    fn commit(
        &self,
        database: &mut Option<Database>,
        changes: &[Change],
        notes: &operation::Notes,
    ) -> Result<(), Error> {
        let folder = self.path.parent().unwrap_or(&self.path);
        fault::point(folder, "store");
        if !changes.is_empty() && fault::is_set(folder, "store-full") {
            return Err(Error::Full);
        }
        let database = self.reopened(database)?;
        fault::step("write the store");
        let run = self.run.borrow().clone();
        write(database, |transaction| {
            if let Some(run) = &run {
                run.write(transaction)?;
            }
            changes.iter().try_for_each(|change| change.make(transaction))?;
            operation::write(transaction, notes)
        })?;
        self.run.take();
        // As when the disk fails after the kernel's write.
        if !changes.is_empty() && fault::is_set(folder, "store-unsure") {
            return Err(Error::Failed("write the store", "a fault of a test".to_owned()));
        }
        Ok(())
    }
}

/// Runs `work` in a durable transaction of its own.
fn write(
    database: &Database,
    work: impl FnOnce(&WriteTransaction) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut transaction = database
        .begin_write()
        .map_err(|error| Error::of("write the store", error))?;
    transaction
        .set_durability(Durability::Immediate)
        .map_err(|error| Error::Failed("write the store", error.to_string()))?;
    transaction.set_two_phase_commit(true);
    // Reopening after a crash or a failed write must not read the whole file.
    transaction.set_quick_repair(true);
    work(&transaction)?;
    transaction
        .commit()
        .map_err(|error| Error::of("write the store", error))
}

fn open(path: &Path, key: &Key) -> Result<Database, Error> {
    let database = Database::builder()
        .set_cache_size(CACHE)
        .create(path)
        .map_err(|error| Error::of("open the store", error))?;
    let schema = schema(&database)?;
    if schema > SCHEMA {
        return Err(Error::Newer(schema));
    }
    if schema < SCHEMA {
        migrate(&database, schema, key)?;
        sync_folder(path);
    }
    Ok(database)
}

/// Makes the new file's name durable.
fn sync_folder(path: &Path) {
    let folder = path.parent().map(PathBuf::from).unwrap_or_default();
    if let Err(error) = File::open(folder).and_then(|folder| folder.sync_all()) {
        tracing::warn!(%error, "sync the store's folder");
    }
}

fn load(database: &Database, key: &Key) -> Result<Records, Error> {
    let transaction = database
        .begin_read()
        .map_err(|error| Error::of("read the store", error))?;
    let (vms, mut unreadable) = load_table::<stored::Vm>(&transaction, VMS)?;
    let vms = opened(vms, key, &mut unreadable);
    Ok(Records {
        vms: vms.into_iter().map(VmRecord::from).collect(),
        unreadable: unreadable.into_iter().map(salvage).collect(),
        disks: readable(&transaction, DISKS)?,
        snapshots: snapshots(&transaction, key)?,
        networks: readable(&transaction, NETWORKS)?,
        images: readable(&transaction, IMAGES)?,
        history: history::load(&transaction)?,
        node: readable(&transaction, NODE)?.pop().unwrap_or_default(),
        operations: operation::load(&transaction)?,
        aborts: readable(&transaction, handover::ABORTS)?,
    })
}

/// Returns the records whose secrets could be opened, and adds the others to `bad`.
fn opened<R: seal::Secretive>(records: Vec<R>, key: &Key, bad: &mut Vec<BadRow>) -> Vec<R> {
    let mut good = Vec::new();
    for mut record in records {
        let value = record.encode_to_vec();
        match key.open(&mut record) {
            Ok(()) => good.push(record),
            Err(error) => bad.push(BadRow {
                key: record.uid().to_vec(),
                value,
                error: error.to_string(),
            }),
        }
    }
    good
}

fn snapshots(transaction: &ReadTransaction, key: &Key) -> Result<Vec<SnapshotRecord>, Error> {
    let (records, mut bad) = load_table::<stored::Snapshot>(transaction, SNAPSHOTS)?;
    let records = opened(records, key, &mut bad);
    log_unreadable(SNAPSHOTS, bad);
    Ok(records.into_iter().map(SnapshotRecord::from).collect())
}

fn vm(database: &Database, uid: &[u8], key: &Key) -> Result<Option<VmRecord>, Error> {
    let failed = |error: redb::Error| Error::of("read the store", error);
    let transaction = database.begin_read().map_err(|error| failed(error.into()))?;
    let table = transaction
        .open_table(VMS)
        .map_err(|error| failed(error.into()))?;
    let value = table.get(uid).map_err(|error| failed(error.into()))?;
    let record = value.map(|value| decode::<stored::Vm>(value.value()));
    let Some(mut record) = record.transpose()? else {
        return Ok(None);
    };
    key.open(&mut record)?;
    Ok(Some(VmRecord::from(record)))
}

/// Reads the decodable part of a VM's record: a field survives damage to later fields.
fn salvage(row: BadRow) -> Unreadable {
    /// Part of [`stored::Vm`].
    #[derive(Clone, PartialEq, prost::Message)]
    struct Known {
        #[prost(string, tag = "2")]
        name: String,
        #[prost(message, optional, tag = "9")]
        instance: Option<Process>,
    }
    /// Part of [`stored::Instance`].
    #[derive(Clone, PartialEq, prost::Message)]
    struct Process {
        #[prost(uint32, tag = "1")]
        user: u32,
    }
    let mut known = Known::default();
    let _ = known.merge(row.value.as_slice());
    Unreadable {
        uid: row.key,
        name: known.name,
        user: known.instance.map(|process| process.user),
        error: row.error,
    }
}

/// An undecodable record.
struct BadRow {
    key: Vec<u8>,
    value: Vec<u8>,
    error: String,
}

/// Returns the decodable records, and logs the others.
fn readable<R: Message + Default>(transaction: &ReadTransaction, table: Table) -> Result<Vec<R>, Error> {
    let (records, bad) = load_table(transaction, table)?;
    log_unreadable(table, bad);
    Ok(records)
}

fn log_unreadable(table: Table, bad: Vec<BadRow>) {
    for BadRow { key, error, .. } in bad {
        tracing::error!(
            table = table.name(),
            ?key,
            error,
            "a record of the store can't be read and is left out"
        );
    }
}

/// Returns the records of a table, and the undecodable ones. The first change makes the table: a missing table is empty.
fn load_table<R: Message + Default>(
    transaction: &ReadTransaction,
    table: Table,
) -> Result<(Vec<R>, Vec<BadRow>), Error> {
    let failed = |error: redb::Error| Error::of("read the store", error);
    let (mut records, mut bad) = (Vec::new(), Vec::new());
    let table = match transaction.open_table(table) {
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok((records, bad)),
        table => table.map_err(|error| failed(error.into()))?,
    };
    for row in table.iter().map_err(|error| failed(error.into()))? {
        let (key, value) = row.map_err(|error| failed(error.into()))?;
        match R::decode(value.value()) {
            Ok(record) => records.push(record),
            Err(error) => bad.push(BadRow {
                key: key.value().to_vec(),
                value: value.value().to_vec(),
                error: error.to_string(),
            }),
        }
    }
    Ok((records, bad))
}

fn decode<R: Message + Default>(value: &[u8]) -> Result<R, Error> {
    R::decode(value).map_err(|error| Error::Failed("read the store: undecodable record", error.to_string()))
}

#[cfg(test)]
mod tests;
