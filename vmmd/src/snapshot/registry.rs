//! All snapshots of the node by name.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    failure::{Failure, Kind},
    store::{SnapshotRecord, SnapshotStage},
    text,
};

/// The snapshots.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<BTreeMap<String, SnapshotRecord>>,
}

impl Registry {
    /// A snapshot that is whole.
    pub fn get(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let inner = self.inner();
        let found = inner.get(name).filter(|record| is_ready(record));
        found.cloned().ok_or_else(|| not_found(name))
    }

    /// All snapshots that are whole, by name.
    pub fn list(&self) -> Vec<SnapshotRecord> {
        self.inner()
            .values()
            .filter(|record| is_ready(record))
            .cloned()
            .collect()
    }

    /// Takes the name of a snapshot that is to be made.
    pub fn reserve(&self, record: &SnapshotRecord) -> Result<(), Failure> {
        let mut inner = self.inner();
        if inner.contains_key(&record.name) {
            let message = format!("there is a snapshot \"{}\" already", record.name);
            return Err(Failure::new(Kind::Exists, "SNAPSHOT_EXISTS", message));
        }
        inner.insert(record.name.clone(), record.clone());
        Ok(())
    }

    /// Takes a snapshot out of use, for good unless it is [settled](Self::settle) again.
    pub fn begin_delete(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let mut inner = self.inner();
        let found = inner.get_mut(name).filter(|record| is_ready(record));
        let record = found.ok_or_else(|| not_found(name))?;
        let ready = record.clone();
        record.stage = SnapshotStage::Partial.into();
        Ok(ready)
    }

    /// Notes what a snapshot is now.
    pub fn settle(&self, record: SnapshotRecord) {
        self.inner().insert(record.name.clone(), record);
    }

    /// Notes that a snapshot is gone.
    pub fn forget(&self, name: &str) {
        self.inner().remove(name);
    }

    fn inner(&self) -> MutexGuard<'_, BTreeMap<String, SnapshotRecord>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_ready(record: &SnapshotRecord) -> bool {
    record.stage() == SnapshotStage::Ready
}

fn not_found(name: &str) -> Failure {
    let message = format!("there is no snapshot \"{}\" on this node", text::brief(name));
    Failure::new(Kind::NotFound, "SNAPSHOT_NOT_FOUND", message)
}
