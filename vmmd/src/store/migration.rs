//! Versions of the records' meaning: what this build makes of a store that an older one has written.

use redb::{Database, ReadableDatabase, ReadableTable, WriteTransaction};

use super::{DISKS, Error, Intent, META, NODE, VMS, VmRecord, decode, history, stored::Vm, write};

/// Version of the records' meaning that this build writes.
pub const SCHEMA: u64 = 5;
/// `MIGRATIONS[n]` makes schema n + 2 of schema n + 1, in the transaction that also notes the new number.
pub(super) const MIGRATIONS: [Migration; 4] = [add_disks, add_policies, add_node, seal_secrets];
pub(super) type Migration = fn(&WriteTransaction) -> Result<(), Error>;

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

/// Makes this build's schema of an older one, or of an empty file.
pub fn migrate(database: &Database, from: u64) -> Result<(), Error> {
    write(database, |transaction| {
        let steps = MIGRATIONS
            .iter()
            .skip(usize::try_from(from).unwrap_or(usize::MAX).saturating_sub(1));
        // A new file (schema 0) has nothing to migrate.
        for step in steps.filter(|_| from > 0) {
            step(transaction)?;
        }
        transaction
            .open_table(VMS)
            .map_err(|error| Error::of("make the store", error))?;
        add_disks(transaction)?;
        history::add(transaction)?;
        add_node(transaction)?;
        let mut meta = transaction
            .open_table(META)
            .map_err(|error| Error::of("make the store", error))?;
        meta.insert("schema", SCHEMA)
            .map_err(|error| Error::of("make the store", error))?;
        Ok(())
    })
}

/// Schema 2: disks of the DiskService, of which an older store has none.
fn add_disks(transaction: &WriteTransaction) -> Result<(), Error> {
    let table = transaction.open_table(DISKS);
    table
        .map(drop)
        .map_err(|error| Error::of("make the store", error))
}

/// Schema 3: what is remembered, and run policies. Daemons before had none: a VM that was down stayed so. It still does,
/// until it is started for the first time again.
fn add_policies(transaction: &WriteTransaction) -> Result<(), Error> {
    history::add(transaction)?;
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let mut vms = transaction
        .open_table(VMS)
        .map_err(|error| Error::of("open the store", error))?;
    let mut down = Vec::new();
    for row in vms.iter().map_err(failed)? {
        let mut record = VmRecord::from(decode::<Vm>(row.map_err(failed)?.1.value())?);
        if record.instance.is_none() && record.intent() == Intent::Running {
            record.set_intent(Intent::Stopped);
            down.push(record);
        }
    }
    for record in down {
        vms.insert(record.uid.as_slice(), record.to_bytes().as_slice())
            .map_err(failed)?;
    }
    Ok(())
}

/// Schema 4: the node itself, of which an older store says nothing.
fn add_node(transaction: &WriteTransaction) -> Result<(), Error> {
    let table = transaction.open_table(NODE);
    table
        .map(drop)
        .map_err(|error| Error::of("make the store", error))
}

/// Schema 5: secrets are sealed, which [`super::seal::seal_all`] does with the key. An older daemon would lose what is sealed.
fn seal_secrets(_: &WriteTransaction) -> Result<(), Error> {
    Ok(())
}
