//! Versions of the records' meaning: what this build makes of a store that an older one has written.

use redb::{Database, ReadableDatabase, ReadableTable, WriteTransaction};

use super::{
    DISKS, Error, Intent, Key, META, NODE, VMS, VmRecord, answers, decode, history, rewrite, seal,
    stored::Vm, write,
};

/// Version of the records' meaning that this build writes.
pub const SCHEMA: u64 = 7;
/// `MIGRATIONS[n]` makes schema n + 2 of schema n + 1, in the transaction that also notes the new number.
pub(super) const MIGRATIONS: [Migration; 6] = [
    add_disks,
    add_policies,
    add_node,
    seal_secrets,
    limit_answers,
    seal_secrets,
];
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

/// Makes this build's schema of an older one, or of an empty file.
pub fn migrate(database: &Database, from: u64, key: &Key) -> Result<(), Error> {
    write(database, |transaction| {
        let steps = MIGRATIONS
            .iter()
            .skip(usize::try_from(from).unwrap_or(usize::MAX).saturating_sub(1));
        // A new file (schema 0) needs no migration.
        for step in steps.filter(|_| from > 0) {
            step(transaction, key)?;
        }
        transaction
            .open_table(VMS)
            .map_err(|error| Error::of("make the store", error))?;
        add_disks(transaction, key)?;
        history::add(transaction)?;
        add_node(transaction, key)?;
        answers::prune(transaction)?;
        let mut meta = transaction
            .open_table(META)
            .map_err(|error| Error::of("make the store", error))?;
        meta.insert("schema", SCHEMA)
            .map_err(|error| Error::of("make the store", error))?;
        Ok(())
    })
}

/// Schema 2: adds disks of the DiskService.
fn add_disks(transaction: &WriteTransaction, _: &Key) -> Result<(), Error> {
    let table = transaction.open_table(DISKS);
    table
        .map(drop)
        .map_err(|error| Error::of("make the store", error))
}

/// Schema 3: adds the history and run policies. Without policies, a VM that was down stayed down.
/// The migration preserves this until the VM's next start.
fn add_policies(transaction: &WriteTransaction, _: &Key) -> Result<(), Error> {
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
fn add_node(transaction: &WriteTransaction, _: &Key) -> Result<(), Error> {
    let table = transaction.open_table(NODE);
    table
        .map(drop)
        .map_err(|error| Error::of("make the store", error))
}

/// Schema 5: user data and hashes of passwords are sealed. Schema 7: network configuration and vendor data are sealed too. An older daemon would lose
/// sealed contents.
fn seal_secrets(transaction: &WriteTransaction, key: &Key) -> Result<(), Error> {
    seal::seal_all(transaction, key)
}

/// Schema 6: answers of requests are limited. A daemon of schema 5 may have noted its schema and not have sealed all secrets, and its first
/// releases wrote marks of requests without the key.
fn limit_answers(transaction: &WriteTransaction, key: &Key) -> Result<(), Error> {
    seal::seal_all(transaction, key)?;
    rewrite::key_all(transaction, key)?;
    answers::limit(transaction, key)
}
