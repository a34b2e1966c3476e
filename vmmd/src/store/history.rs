//! What is remembered beyond the life of its object: that VMs were deleted, how requests were answered, and which runs
//! of the daemon there have been. All of it is bounded; what is oldest goes first.

use std::collections::BTreeMap;

use prost::Message;
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata, WriteTransaction,
};

use super::{Error, META, Table, readable, readable_if_there, stored::Metadata, write};
use crate::text;

/// Deletions that are remembered.
pub const MAX_TOMBSTONES: u64 = 4096;
/// Answered requests that are remembered, beside those of the last [`REQUEST_PROMISE_MS`].
const MAX_REQUESTS: u64 = 100_000;
/// For how long each is remembered, in milliseconds: an hour, as the API promises.
pub(super) const REQUEST_PROMISE_MS: u64 = 3600 * 1000;
/// For how long they are, in milliseconds: a day.
pub const REQUEST_AGE_MS: u64 = 24 * 3600 * 1000;
/// Most answers that are forgotten together with the arrival of another.
const FORGOTTEN_AT_ONCE: usize = 16;
/// Runs of the daemon that are remembered.
const MAX_RUNS: u64 = 1024;

/// By run and revision, both big-endian.
const TOMBSTONES: Table = Table::new("tombstones");
/// By id.
pub(super) const REQUESTS: Table = Table::new("requests");
/// By a big-endian number that grows: the time of the answer (Unix time in milliseconds, big-endian), then the id.
const REQUEST_ORDER: Table = Table::new("request_order");
const RUN: &str = "run";
const TRIMMED_RUN: &str = "trimmed_run";
const TRIMMED_REVISION: &str = "trimmed_revision";
/// The greatest generation of an object that was deleted.
const GENERATION_FLOOR: &str = "generation_floor";

/// The same of disks.
const DISK_TOMBSTONES: Table = Table::new("disk_tombstones");
const DISK_TRIMMED_RUN: &str = "disk_trimmed_run";
const DISK_TRIMMED_REVISION: &str = "disk_trimmed_revision";

/// The same of images.
const IMAGE_TOMBSTONES: Table = Table::new("image_tombstones");
const IMAGE_TRIMMED_RUN: &str = "image_trimmed_run";
const IMAGE_TRIMMED_REVISION: &str = "image_trimmed_revision";

/// The same of networks.
const NETWORK_TOMBSTONES: Table = Table::new("network_tombstones");
const NETWORK_TRIMMED_RUN: &str = "network_trimmed_run";
const NETWORK_TRIMMED_REVISION: &str = "network_trimmed_revision";

/// A VM that was deleted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tombstone {
    /// Run of the daemon that deleted it.
    #[prost(uint64, tag = "1")]
    pub run: u64,
    /// Revision in that run, not later than that of the deletion; unique.
    #[prost(uint64, tag = "2")]
    pub revision: u64,
    /// What was last known of it.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<Metadata>,
    /// Of a VM: the last migration up to which it was this node's. 0 when it never was.
    #[prost(uint64, tag = "4")]
    pub owned: u64,
}

impl Tombstone {
    fn generation(&self) -> u64 {
        self.metadata.as_ref().map_or(0, |metadata| metadata.generation)
    }
}

/// A request that has been begun.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestMark {
    /// As the client gave it.
    #[prost(string, tag = "1")]
    pub id: String,
    /// "CreateVm".
    #[prost(string, tag = "2")]
    pub method: String,
    /// What earlier releases wrote in the place of the fingerprint: SHA-256 of the request without its id. Nothing once the store is open.
    #[prost(bytes = "vec", tag = "3")]
    pub plain_hash: Vec<u8>,
    /// Of the request without its id: [`Key::fingerprint`](super::Key::fingerprint) of its SHA-256.
    #[prost(bytes = "vec", tag = "6")]
    pub fingerprint: Vec<u8>,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "4")]
    pub begun_ms: u64,
    /// Who gave it: "uid:0", "cert:alice". Empty in what an earlier release wrote, where an id was for everybody.
    #[prost(string, tag = "5")]
    pub caller: String,
}

impl RequestMark {
    /// What tells the request from those of others: ids are of their callers.
    pub fn key(&self) -> RequestKey {
        RequestKey::new(&self.caller, &self.id)
    }
}

/// A request's caller and id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey(String);

impl RequestKey {
    /// Of an id that a caller gave. Neither has a NUL in it; without a caller it is as earlier releases have it.
    pub fn new(caller: &str, id: &str) -> Self {
        Self(if caller.is_empty() {
            id.to_owned()
        } else {
            format!("{caller}\0{id}")
        })
    }

    /// As earlier releases have it.
    fn of_everybody(&self) -> &str {
        self.0.rsplit('\0').next().unwrap_or_default()
    }

    fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// A request that was answered.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RequestRecord {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub mark: Option<RequestMark>,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "2")]
    pub ended_ms: u64,
    /// gRPC's code; 0 is success.
    #[prost(int32, tag = "3")]
    pub code: i32,
    /// Of a failure.
    #[prost(string, tag = "4")]
    pub message: String,
    /// Of a failure: an encoded `google.rpc.Status`.
    #[prost(bytes = "vec", tag = "5")]
    pub details: Vec<u8>,
    /// Of a success: the encoded response.
    #[prost(bytes = "vec", tag = "6")]
    pub response: Vec<u8>,
}

/// All that is remembered, but for the answers: those are read when they are asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistoryRecords {
    /// Number of this run of the daemon, from 1.
    pub run: u64,
    /// A random number for each run that is remembered, this one included: it tells a run from one of another store, and
    /// from one that is not in this store because an older copy of it was put back.
    pub nonces: BTreeMap<u64, u64>,
    /// Deletions, the oldest first.
    pub tombstones: Vec<Tombstone>,
    /// Run and revision of the last deletion that was forgotten.
    pub trimmed: (u64, u64),
    /// The greatest generation of an object that was deleted: what is made from now on begins above it.
    pub generation_floor: u64,
    /// Of disks.
    pub disks: BuriedRecords,
    /// Of images.
    pub images: BuriedRecords,
    /// Of networks.
    pub networks: BuriedRecords,
}

/// What is remembered of deleted disks, images, or networks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BuriedRecords {
    /// Deletions, the oldest first.
    pub tombstones: Vec<Tombstone>,
    /// Run and revision of the last deletion that was forgotten.
    pub trimmed: (u64, u64),
    /// As [`HistoryRecords::generation_floor`].
    pub generation: u64,
}

fn failed(error: impl Into<redb::Error>) -> Error {
    Error::of("read the store", error)
}

/// Schema 3: deletions and requests, of which an older store has none.
pub fn add(transaction: &WriteTransaction) -> Result<(), Error> {
    for table in [TOMBSTONES, REQUESTS, REQUEST_ORDER] {
        transaction
            .open_table(table)
            .map_err(|error| Error::of("make the store", error))?;
    }
    Ok(())
}

pub fn load(transaction: &ReadTransaction) -> Result<HistoryRecords, Error> {
    let meta = transaction.open_table(META).map_err(failed)?;
    let number = |key: &str| -> Result<u64, Error> {
        Ok(meta.get(key).map_err(failed)?.map_or(0, |value| value.value()))
    };
    let mut nonces = BTreeMap::new();
    for row in meta.iter().map_err(failed)? {
        let (key, value) = row.map_err(failed)?;
        let run = key.value().strip_prefix("run.").and_then(|run| run.parse().ok());
        nonces.extend(run.map(|run| (run, value.value())));
    }
    let tombstones: Vec<Tombstone> = readable(transaction, TOMBSTONES)?;
    // Earlier releases noted no floor.
    let floor = tombstones.iter().map(Tombstone::generation).max().unwrap_or(0);
    let generation_floor = number(GENERATION_FLOOR)?.max(floor);
    Ok(HistoryRecords {
        run: number(RUN)?,
        nonces,
        trimmed: (number(TRIMMED_RUN)?, number(TRIMMED_REVISION)?),
        generation_floor,
        tombstones,
        disks: BuriedRecords {
            tombstones: readable_if_there(transaction, DISK_TOMBSTONES)?,
            trimmed: (number(DISK_TRIMMED_RUN)?, number(DISK_TRIMMED_REVISION)?),
            generation: generation_floor,
        },
        images: BuriedRecords {
            tombstones: readable_if_there(transaction, IMAGE_TOMBSTONES)?,
            trimmed: (number(IMAGE_TRIMMED_RUN)?, number(IMAGE_TRIMMED_REVISION)?),
            generation: generation_floor,
        },
        networks: BuriedRecords {
            tombstones: readable_if_there(transaction, NETWORK_TOMBSTONES)?,
            trimmed: (number(NETWORK_TRIMMED_RUN)?, number(NETWORK_TRIMMED_REVISION)?),
            generation: generation_floor,
        },
    })
}

/// Notes that another run of the daemon begins.
pub fn begin_run(database: &Database, mut history: HistoryRecords) -> Result<HistoryRecords, Error> {
    let run = history.run + 1;
    let (nonce, _) = uuid::Uuid::new_v4().as_u64_pair();
    let oldest = run.saturating_sub(MAX_RUNS);
    let later = history.nonces.split_off(&(oldest + 1));
    let forgotten = std::mem::replace(&mut history.nonces, later);
    write(database, |transaction| {
        let failed = |error: redb::StorageError| Error::of("write the store", error);
        let mut meta = transaction
            .open_table(META)
            .map_err(|error| Error::of("open the store", error))?;
        meta.insert(RUN, run).map_err(failed)?;
        meta.insert(format!("run.{run}").as_str(), nonce)
            .map_err(failed)?;
        for run in forgotten.keys() {
            meta.remove(format!("run.{run}").as_str()).map_err(failed)?;
        }
        Ok(())
    })?;
    history.run = run;
    history.nonces.insert(run, nonce);
    Ok(history)
}

/// Notes that an object of this generation is deleted.
pub fn raise_floor(transaction: &WriteTransaction, generation: u64) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let mut meta = transaction
        .open_table(META)
        .map_err(|error| Error::of("open the store", error))?;
    let floor = meta
        .get(GENERATION_FLOOR)
        .map_err(failed)?
        .map_or(0, |value| value.value());
    if generation > floor {
        meta.insert(GENERATION_FLOOR, generation).map_err(failed)?;
    }
    Ok(())
}

/// Remembers the deletion of a VM.
pub fn bury(transaction: &WriteTransaction, tombstone: &Tombstone) -> Result<(), Error> {
    add_tombstone(
        transaction,
        TOMBSTONES,
        (TRIMMED_RUN, TRIMMED_REVISION),
        tombstone,
    )
}

/// Remembers the deletion of a disk.
pub fn bury_disk(transaction: &WriteTransaction, tombstone: &Tombstone) -> Result<(), Error> {
    let trimmed = (DISK_TRIMMED_RUN, DISK_TRIMMED_REVISION);
    add_tombstone(transaction, DISK_TOMBSTONES, trimmed, tombstone)
}

/// Remembers the deletion of an image.
pub fn bury_image(transaction: &WriteTransaction, tombstone: &Tombstone) -> Result<(), Error> {
    let trimmed = (IMAGE_TRIMMED_RUN, IMAGE_TRIMMED_REVISION);
    add_tombstone(transaction, IMAGE_TOMBSTONES, trimmed, tombstone)
}

/// Remembers the deletion of a network.
pub fn bury_network(transaction: &WriteTransaction, tombstone: &Tombstone) -> Result<(), Error> {
    let trimmed = (NETWORK_TRIMMED_RUN, NETWORK_TRIMMED_REVISION);
    add_tombstone(transaction, NETWORK_TOMBSTONES, trimmed, tombstone)
}

fn add_tombstone(
    transaction: &WriteTransaction,
    table: Table,
    trimmed: (&str, &str),
    tombstone: &Tombstone,
) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let opened = |error: redb::TableError| Error::of("open the store", error);
    let mut table = transaction.open_table(table).map_err(opened)?;
    let key = [tombstone.run.to_be_bytes(), tombstone.revision.to_be_bytes()].concat();
    let value = tombstone.encode_to_vec();
    table.insert(key.as_slice(), value.as_slice()).map_err(failed)?;
    raise_floor(transaction, tombstone.generation())?;
    while table.len().map_err(failed)? > MAX_TOMBSTONES {
        let Some((_, oldest)) = table.pop_first().map_err(failed)? else {
            break;
        };
        let oldest = Tombstone::decode(oldest.value()).unwrap_or_default();
        let mut meta = transaction.open_table(META).map_err(opened)?;
        meta.insert(trimmed.0, oldest.run).map_err(failed)?;
        meta.insert(trimmed.1, oldest.revision).map_err(failed)?;
    }
    Ok(())
}

/// Remembers an answer that nobody has been told, unless the request has one by now: what its caller was told stays.
pub fn presume(transaction: &WriteTransaction, record: &RequestRecord) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let opened = |error: redb::TableError| Error::of("open the store", error);
    let Some(mark) = &record.mark else { return Ok(()) };
    let told = {
        let requests = transaction.open_table(REQUESTS).map_err(opened)?;
        requests.get(mark.key().as_bytes()).map_err(failed)?.is_some()
    };
    if told {
        Ok(())
    } else {
        complete(transaction, record)
    }
}

/// Remembers an answer.
pub fn complete(transaction: &WriteTransaction, record: &RequestRecord) -> Result<(), Error> {
    complete_among(transaction, record, MAX_REQUESTS)
}

/// The same, with at most so many answers beside those of the last [`REQUEST_PROMISE_MS`].
pub(super) fn complete_among(
    transaction: &WriteTransaction,
    record: &RequestRecord,
    most: u64,
) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let opened = |error: redb::TableError| Error::of("open the store", error);
    let Some(mark) = &record.mark else { return Ok(()) };
    let mut requests = transaction.open_table(REQUESTS).map_err(opened)?;
    let key = mark.key();
    let value = record.encode_to_vec();
    let before = requests
        .insert(key.as_bytes(), value.as_slice())
        .map_err(failed)?
        .is_some();
    if before {
        return Ok(());
    }
    let mut order = transaction.open_table(REQUEST_ORDER).map_err(opened)?;
    let last = order.last().map_err(failed)?;
    let last = last.and_then(|(key, _)| key.value().try_into().ok().map(u64::from_be_bytes));
    let next = last.map_or(0, |last| last + 1).to_be_bytes();
    let entry = [record.ended_ms.to_be_bytes().as_slice(), key.as_bytes()].concat();
    order.insert(next.as_slice(), entry.as_slice()).map_err(failed)?;
    let now = text::now_ms();
    for _ in 0..FORGOTTEN_AT_ONCE {
        let full = order.len().map_err(failed)? > most;
        let oldest = order.first().map_err(failed)?;
        let age = oldest.map_or(0, |(_, entry)| now.saturating_sub(ended(entry.value())));
        if age <= REQUEST_AGE_MS && !(full && age > REQUEST_PROMISE_MS) {
            break;
        }
        if let Some((_, entry)) = order.pop_first().map_err(failed)? {
            let id = entry.value().get(8..).unwrap_or_default();
            requests.remove(id).map_err(failed)?;
        }
    }
    Ok(())
}

fn ended(entry: &[u8]) -> u64 {
    let time = entry.get(..8).and_then(|time| time.try_into().ok());
    time.map_or(0, u64::from_be_bytes)
}

/// The answer of a request, if it is remembered.
pub fn request(database: &Database, key: &RequestKey) -> Result<Option<RequestRecord>, Error> {
    let transaction = database.begin_read().map_err(failed)?;
    let table = transaction.open_table(REQUESTS).map_err(failed)?;
    for key in [key.as_bytes(), key.of_everybody().as_bytes()] {
        if let Some(value) = table.get(key).map_err(failed)? {
            let record = RequestRecord::decode(value.value())
                .map_err(|error| Error::Failed("read the store: undecodable request", error.to_string()))?;
            return Ok(Some(record));
        }
    }
    Ok(None)
}
