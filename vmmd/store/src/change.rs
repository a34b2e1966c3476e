//! Changes of the store.

use redb::WriteTransaction;
use tokio_util::sync::CancellationToken;

use super::{AbortRecord, Deleted, Error, RequestRecord, Table, Tombstone, VMS, answers, handover, history};

/// A change of the store; those of one [`super::Store`] call are made together or not at all.
pub(super) enum Change {
    Put(Table, Vec<u8>, Vec<u8>),
    /// Unless that is cancelled when its turn comes.
    PutUnless(CancellationToken, Vec<u8>, Vec<u8>),
    Remove(Table, Vec<u8>),
    /// The present records of a migration that was taken back, and of its VM.
    Again(AbortRecord),
    /// The target has confirmed that this migration is over: unless a later one is noted.
    Confirmed(AbortRecord),
    Bury(Deleted, Tombstone),
    Complete(RequestRecord),
    /// An answer, unless there is one.
    Presume(RequestRecord),
}

impl Change {
    /// Makes it in a transaction.
    pub fn make(&self, transaction: &WriteTransaction) -> Result<(), Error> {
        let failed = |error: redb::StorageError| Error::of("write the store", error);
        let table = |table: &Table| {
            transaction
                .open_table(*table)
                .map_err(|error| Error::of("open the store", error))
        };
        match self {
            Self::Put(of, key, value) => {
                table(of)?
                    .insert(key.as_slice(), value.as_slice())
                    .map_err(failed)?;
            }
            Self::PutUnless(cancelled, ..) if cancelled.is_cancelled() => {}
            Self::PutUnless(_, key, value) => {
                table(&VMS)?
                    .insert(key.as_slice(), value.as_slice())
                    .map_err(failed)?;
            }
            Self::Remove(of, key) => drop(table(of)?.remove(key.as_slice()).map_err(failed)?),
            Self::Again(abort) => handover::write_again(transaction, abort)?,
            Self::Confirmed(abort) => handover::confirm(transaction, abort)?,
            Self::Bury(kind, tombstone) => history::bury(transaction, *kind, tombstone)?,
            Self::Complete(record) => answers::complete(transaction, record)?,
            Self::Presume(record) => answers::presume(transaction, record)?,
        }
        Ok(())
    }
}
