//! Operations in the store: the state of each as clients see it, as long as it is kept.
//!
//! No caller waits for these records. They are noted here, and written with the next change of
//! another record, or alone after [`DELAY`]. The record of a start is in the same transaction as
//! the VM's record, before the process is forked.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use prost::Message as _;
use redb::{ReadTransaction, WriteTransaction};
use vmmd_api::v1::Operation;

use super::{Error, Table, load_table};

/// Longest time that a note waits for a transaction to go along with.
pub const DELAY: Duration = Duration::from_millis(200);

/// By id.
const OPERATIONS: Table = Table::new("operations");

/// An operation, under way or ended.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OperationRecord {
    /// When it began, in milliseconds of Unix time.
    #[prost(uint64, tag = "1")]
    pub began_ms: u64,
    /// When it ended; 0 when it has not.
    #[prost(uint64, tag = "2")]
    pub ended_ms: u64,
    /// Encoded [`Operation`] for clients.
    #[prost(bytes = "vec", tag = "3")]
    pub operation: Vec<u8>,
}

impl OperationRecord {
    /// Returns the operation for clients; `None` if it is undecodable.
    pub fn decoded(&self) -> Option<Operation> {
        Operation::decode(self.operation.as_slice()).ok()
    }
}

/// Notes to write: records, or `None` for removals.
pub type Notes = BTreeMap<String, (u64, Option<Vec<u8>>)>;

/// Notes that wait for a transaction. A newer note of an operation replaces the older one, which
/// bounds the number of notes.
#[derive(Clone, Debug, Default)]
pub struct Pending(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    notes: Notes,
    /// Somebody comes for them.
    awaited: bool,
}

impl Pending {
    /// Adds a note. Returns true if no write is scheduled yet.
    pub fn add(&self, id: &str, record: Option<&OperationRecord>) -> bool {
        let mut inner = self.lock();
        inner.last += 1;
        let note = (inner.last, record.map(OperationRecord::encode_to_vec));
        inner.notes.insert(id.to_owned(), note);
        !std::mem::replace(&mut inner.awaited, true)
    }

    /// All notes. They stay until they are [`written`](Self::written).
    pub fn get(&self) -> Notes {
        let mut inner = self.lock();
        inner.awaited = false;
        inner.notes.clone()
    }

    /// Removes notes that are durable; newer notes stay.
    pub fn written(&self, notes: &Notes) {
        let newer = |id: &String, number: u64| notes.get(id).is_none_or(|(written, _)| *written != number);
        self.lock().notes.retain(|id, (number, _)| newer(id, *number));
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes notes.
pub fn write(transaction: &WriteTransaction, notes: &Notes) -> Result<(), Error> {
    if notes.is_empty() {
        return Ok(());
    }
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let mut table = transaction
        .open_table(OPERATIONS)
        .map_err(|error| Error::of("open the store", error))?;
    for (id, (_, record)) in notes {
        match record {
            Some(record) => drop(table.insert(id.as_bytes(), record.as_slice()).map_err(failed)?),
            None => drop(table.remove(id.as_bytes()).map_err(failed)?),
        }
    }
    Ok(())
}

/// Returns all records, the oldest first.
pub fn load(transaction: &ReadTransaction) -> Result<Vec<OperationRecord>, Error> {
    let (mut records, bad): (Vec<OperationRecord>, _) = load_table(transaction, OPERATIONS)?;
    if !bad.is_empty() {
        tracing::error!(
            count = bad.len(),
            "records of operations can't be read and are left out"
        );
    }
    records.sort_by_key(|record| record.began_ms);
    Ok(records)
}
