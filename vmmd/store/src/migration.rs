//! Versions of the records' meaning, and the steps from an older version to the present one.

use redb::{Database, ReadableDatabase, WriteTransaction};

use super::{Error, Key, META, VMS, answers, write};

/// Oldest version of the records' meaning that this build can migrate.
pub const OLDEST: u64 = 7;
/// Version of the records' meaning that this build writes.
pub const SCHEMA: u64 = 7;
/// `MIGRATIONS[n]` makes schema [`OLDEST`] + n + 1 of schema [`OLDEST`] + n. All steps and the new number are in one transaction.
pub(super) const MIGRATIONS: [Migration; 0] = [];
pub(super) type Migration = fn(&WriteTransaction, &Key) -> Result<(), Error>;

/// The file's schema; 0 when it is new.
pub fn schema(database: &Database) -> Result<u64, Error> {
    let failed = |error: redb::Error| Error::of("read the store", error);
    let transaction = database.begin_read().map_err(|error| failed(error.into()))?;
    match transaction.open_table(META) {
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(0),
        Err(error) => Err(failed(error.into())),
        Ok(table) => {
            let value = table.get("schema").map_err(|error| failed(error.into()))?;
            Ok(value.map_or(0, |value| value.value()))
        }
    }
}

/// Makes this build's schema of an older one, or of an empty file (schema 0).
///
/// # Errors
///
/// The schema is older than [`OLDEST`], or the file could not be written.
pub fn migrate(database: &Database, from: u64, key: &Key) -> Result<(), Error> {
    let done = match from {
        0 => MIGRATIONS.len(),
        from => from
            .checked_sub(OLDEST)
            .and_then(|done| usize::try_from(done).ok())
            .ok_or(Error::Older(from))?,
    };
    write(database, |transaction| {
        for step in MIGRATIONS.iter().skip(done) {
            step(transaction, key)?;
        }
        let failed = |error: redb::Error| Error::of("make the store", error);
        transaction
            .open_table(VMS)
            .map_err(|error| failed(error.into()))?;
        answers::prune(transaction)?;
        let mut meta = transaction
            .open_table(META)
            .map_err(|error| failed(error.into()))?;
        meta.insert("schema", SCHEMA)
            .map_err(|error| failed(error.into()))?;
        Ok(())
    })
}
