//! Deletions of objects, and the runs of the daemon. Both are bounded; the oldest are removed first.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;
use redb::{ReadTransaction, ReadableTable, ReadableTableMetadata, WriteTransaction};

use super::{Error, META, Table, readable, stored::Metadata};

/// Deletions that are remembered.
pub const MAX_TOMBSTONES: u64 = 4096;
/// Runs of the daemon that are remembered.
const MAX_RUNS: u64 = 1024;

const RUN: &str = "run";
/// The greatest generation of an object that was deleted.
const GENERATION_FLOOR: &str = "generation_floor";

/// Kind of objects whose deletions are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// VMs.
    Vm,
    /// Disks of the DiskService.
    Disk,
    /// Images of the ImageService.
    Image,
    /// Networks of the NetworkService.
    Network,
}

impl Deleted {
    /// The tombstones, by run and revision, both big-endian.
    fn table(self) -> Table {
        Table::new(match self {
            Self::Vm => "tombstones",
            Self::Disk => "disk_tombstones",
            Self::Image => "image_tombstones",
            Self::Network => "network_tombstones",
        })
    }

    /// Keys in [`META`] of the run and the revision of the last deletion that was forgotten.
    fn trimmed(self) -> [&'static str; 2] {
        match self {
            Self::Vm => ["trimmed_run", "trimmed_revision"],
            Self::Disk => ["disk_trimmed_run", "disk_trimmed_revision"],
            Self::Image => ["image_trimmed_run", "image_trimmed_revision"],
            Self::Network => ["network_trimmed_run", "network_trimmed_revision"],
        }
    }
}

/// An object that was deleted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tombstone {
    /// Run of the daemon that deleted it.
    #[prost(uint64, tag = "1")]
    pub run: u64,
    /// Revision in that run, not later than that of the deletion; unique.
    #[prost(uint64, tag = "2")]
    pub revision: u64,
    /// Last known metadata.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<Metadata>,
    /// Of a VM: the last migration up to which it was this node's. 0 when it never was.
    #[prost(uint64, tag = "4")]
    pub owned: u64,
    /// Of a VM: it runs on another node.
    #[prost(bool, tag = "5")]
    pub moved: bool,
    /// Uid of the pod that had a VM which has moved; empty without one.
    #[prost(string, tag = "6")]
    pub pod: String,
}

impl Tombstone {
    fn generation(&self) -> u64 {
        self.metadata.as_ref().map_or(0, |metadata| metadata.generation)
    }
}

/// History in the store, except the answers of requests: these are read on demand.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistoryRecords {
    /// Number of this run of the daemon, from 1.
    pub run: u64,
    /// Random nonce of each known run, including this one. It distinguishes a run from runs of
    /// other stores, and from runs that are missing because an older copy of the store was
    /// restored.
    pub nonces: BTreeMap<u64, u64>,
    /// Of VMs.
    pub vms: DeletionRecords,
    /// Of disks.
    pub disks: DeletionRecords,
    /// Of images.
    pub images: DeletionRecords,
    /// Of networks.
    pub networks: DeletionRecords,
}

impl HistoryRecords {
    /// UUIDs of the VMs that run on another node.
    pub fn moved(&self) -> BTreeSet<String> {
        let moved = self.vms.tombstones.iter().filter(|tombstone| tombstone.moved);
        moved
            .filter_map(|tombstone| Some(tombstone.metadata.as_ref()?.uid.clone()))
            .collect()
    }
}

/// History of deleted objects of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeletionRecords {
    /// Deletions, the oldest first.
    pub tombstones: Vec<Tombstone>,
    /// Run and revision of the last deletion that was forgotten.
    pub trimmed: (u64, u64),
    /// Highest generation of a deleted object of any kind: new objects begin above it.
    pub generation: u64,
}

fn failed(error: impl Into<redb::Error>) -> Error {
    Error::of("read the store", error)
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
    let buried = |kind: Deleted| -> Result<DeletionRecords, Error> {
        let [run, revision] = kind.trimmed();
        Ok(DeletionRecords {
            tombstones: readable(transaction, kind.table())?,
            trimmed: (number(run)?, number(revision)?),
            generation: number(GENERATION_FLOOR)?,
        })
    };
    Ok(HistoryRecords {
        run: number(RUN)?,
        nonces,
        vms: buried(Deleted::Vm)?,
        disks: buried(Deleted::Disk)?,
        images: buried(Deleted::Image)?,
        networks: buried(Deleted::Network)?,
    })
}

/// A run of the daemon that begins.
#[derive(Clone, Debug)]
pub struct Run {
    number: u64,
    nonce: u64,
    /// Runs that are not remembered any more.
    forgotten: Vec<u64>,
}

impl Run {
    /// The next one, which `history` then has.
    pub fn next(history: &mut HistoryRecords) -> Self {
        let number = history.run + 1;
        let (nonce, _) = uuid::Uuid::new_v4().as_u64_pair();
        let oldest = number.saturating_sub(MAX_RUNS);
        let later = history.nonces.split_off(&(oldest + 1));
        let forgotten = std::mem::replace(&mut history.nonces, later);
        history.run = number;
        history.nonces.insert(number, nonce);
        Self {
            number,
            nonce,
            forgotten: forgotten.into_keys().collect(),
        }
    }

    /// Notes it.
    pub fn write(&self, transaction: &WriteTransaction) -> Result<(), Error> {
        let failed = |error: redb::StorageError| Error::of("write the store", error);
        let mut meta = transaction
            .open_table(META)
            .map_err(|error| Error::of("open the store", error))?;
        meta.insert(RUN, self.number).map_err(failed)?;
        meta.insert(format!("run.{}", self.number).as_str(), self.nonce)
            .map_err(failed)?;
        for run in &self.forgotten {
            meta.remove(format!("run.{run}").as_str()).map_err(failed)?;
        }
        Ok(())
    }
}

/// Notes that an object of this generation is deleted.
fn raise_floor(transaction: &WriteTransaction, generation: u64) -> Result<(), Error> {
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

/// Remembers the deletion of an object.
pub fn bury(transaction: &WriteTransaction, kind: Deleted, tombstone: &Tombstone) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let opened = |error: redb::TableError| Error::of("open the store", error);
    let mut table = transaction.open_table(kind.table()).map_err(opened)?;
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
        let [run, revision] = kind.trimmed();
        meta.insert(run, oldest.run).map_err(failed)?;
        meta.insert(revision, oldest.revision).map_err(failed)?;
    }
    Ok(())
}
