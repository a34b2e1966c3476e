//! Migrations that were taken back and whose targets have not confirmed that, as in the store.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_lifecycle::handover;
use vmmd_store::AbortRecord;

/// By UUID of the VM and address of the target.
type Key = (Vec<u8>, String);

/// All of the node.
#[derive(Debug, Default)]
pub struct Aborts(Mutex<handover::Aborts<Key>>);

fn key(abort: &AbortRecord) -> Key {
    (abort.uid.clone(), abort.peer.clone())
}

impl Aborts {
    /// Notes one that is in the store. False when the same target is asked about this VM already.
    pub fn note(&self, abort: &AbortRecord) -> bool {
        let mut aborts = self.aborts();
        let is_new = aborts.get(&key(abort)).is_none();
        aborts.note(key(abort), abort.migration);
        is_new
    }

    /// The target has confirmed it. The migration of which the target is to be asked next, if there is a later one.
    pub fn confirmed(&self, abort: &AbortRecord) -> Option<u64> {
        let mut aborts = self.aborts();
        aborts.answered(&key(abort), abort.migration);
        aborts.get(&key(abort))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.aborts().iter().count()
    }

    fn aborts(&self) -> MutexGuard<'_, handover::Aborts<Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
