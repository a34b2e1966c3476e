//! Who has an L2 table alone.
//!
//! imago keeps an L2 table locked for writing from the allocation of a cluster until the table names it, so over the
//! write of the data. Who needs that lock in the meantime would wait for it with this image's tables locked, which the
//! writer needs to go on. So the turn is taken here, before anything else is locked.

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
