//! Exclusive access to L2 tables.
//!
//! imago keeps an L2 table locked for writing from the allocation of a cluster until the table
//! refers to the cluster, that is, during the write of the data. Another request for that lock
//! would wait for it while holding the lock on this image's tables, and the writer needs the tables
//! to continue. Therefore a request takes its turn here before any other lock.

use std::{
    collections::BTreeSet,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: Mutex<BTreeSet<u64>>,
    changed: Condvar,
}

/// The table is this one's as long as it lives.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    table: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.taken().remove(&self.table);
        self.turns.changed.notify_all();
    }
}

impl Turns {
    fn taken(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the L2 table with this index in the L1 table.
    pub(super) fn take(&self, table: u64) -> Turn<'_> {
        let mut taken = self.taken();
        while !taken.insert(table) {
            taken = self.changed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        Turn { turns: self, table }
    }
}
