//! State directories of VMs: the last write of each.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use tokio::sync;
use uuid::Uuid;

/// State of the last write.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Written {
    /// The directory.
    pub dir: PathBuf,
    /// The encoded VM.
    pub vm: Vec<u8>,
    /// Length and time of change of each log that there was.
    pub logs: Vec<Option<(u64, SystemTime)>>,
}

/// State of the last write of each VM. A writer holds the lock, so that an older state never
/// replaces a newer one.
#[derive(Debug, Default)]
pub struct StateDirs(Mutex<HashMap<Uuid, Arc<sync::Mutex<Written>>>>);

impl StateDirs {
    /// State of the last write for a VM.
    pub fn of(&self, uid: Uuid) -> Arc<sync::Mutex<Written>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(uid).or_default())
    }

    /// The VM is gone.
    pub fn forget(&self, uid: Uuid) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&uid);
    }
}
