//! Records that are written anew when a store is opened, since an earlier daemon has written them otherwise and the key is needed to change
//! that.

use prost::Message;
use redb::{Database, ReadableDatabase as _, ReadableTable as _};

use super::{
    DISKS, DiskRecord, Error, IMAGES, ImageRecord, Key, NETWORKS, NetworkRecord, RequestMark, RequestRecord,
    SNAPSHOTS, Table, VMS,
    history::REQUESTS,
    stored::{Snapshot, Vm},
    write,
};

/// A record: its table, its key, and what is written.
pub(super) type Row = (Table, Vec<u8>, Vec<u8>);

/// The records of a table that `change` makes others of. What can't be decoded is left as it is.
pub(super) fn changed<R: Message + Default>(
    database: &Database,
    table: Table,
    change: impl Fn(R) -> Result<Option<Vec<u8>>, Error>,
) -> Result<Vec<Row>, Error> {
    let failed = |error: redb::Error| Error::of("read the store", error);
    let transaction = database.begin_read().map_err(|error| failed(error.into()))?;
    let rows = match transaction.open_table(table) {
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        rows => rows.map_err(|error| failed(error.into()))?,
    };
    let mut found = Vec::new();
    for row in rows.iter().map_err(|error| failed(error.into()))? {
        let (key, value) = row.map_err(|error| failed(error.into()))?;
        let Ok(record) = R::decode(value.value()) else {
            continue;
        };
        if let Some(written) = change(record)? {
            found.push((table, key.value().to_vec(), written));
        }
    }
    Ok(found)
}

/// Writes them, together or not at all.
pub(super) fn put(database: &Database, rows: &[Row]) -> Result<(), Error> {
    if rows.is_empty() {
        return Ok(());
    }
    write(database, |transaction| {
        for (table, key, value) in rows {
            let mut table = transaction
                .open_table(*table)
                .map_err(|error| Error::of("open the store", error))?;
            table
                .insert(key.as_slice(), value.as_slice())
                .map_err(|error| Error::of("write the store", error))?;
        }
        Ok(())
    })
}

/// A record with marks of requests.
trait Marked: Message + Default {
    fn marks(&mut self) -> &mut [RequestMark];
}

macro_rules! begun {
    ($($record:ty),*) => {
        $(impl Marked for $record {
            fn marks(&mut self) -> &mut [RequestMark] {
                &mut self.begun
            }
        })*
    };
}
begun!(Vm, Snapshot, DiskRecord, NetworkRecord, ImageRecord);

impl Marked for RequestRecord {
    fn marks(&mut self) -> &mut [RequestMark] {
        self.mark.as_mut_slice()
    }
}

/// Makes fingerprints of the plain hashes that daemons before this one have written.
pub(super) fn key_all(database: &Database, key: &Key) -> Result<(), Error> {
    let mut rows = plain::<Vm>(database, VMS, key)?;
    rows.extend(plain::<Snapshot>(database, SNAPSHOTS, key)?);
    rows.extend(plain::<DiskRecord>(database, DISKS, key)?);
    rows.extend(plain::<NetworkRecord>(database, NETWORKS, key)?);
    rows.extend(plain::<ImageRecord>(database, IMAGES, key)?);
    rows.extend(plain::<RequestRecord>(database, REQUESTS, key)?);
    put(database, &rows)
}

/// The records of a table that have marks with plain hashes, as they are to be written.
fn plain<R: Marked>(database: &Database, table: Table, key: &Key) -> Result<Vec<Row>, Error> {
    changed(database, table, |mut record: R| {
        let mut wanted = false;
        for mark in record.marks() {
            let hash = std::mem::take(&mut mark.plain_hash);
            if !hash.is_empty() {
                mark.fingerprint = key.fingerprint(&hash);
                wanted = true;
            }
        }
        Ok(wanted.then(|| record.encode_to_vec()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{RequestKey, Store, VmRecord};

    const HASH: [u8; 32] = [5; 32];

    fn mark() -> RequestMark {
        RequestMark {
            id: "r".into(),
            method: "CreateVm".into(),
            plain_hash: HASH.to_vec(),
            begun_ms: crate::text::now_ms(),
            ..RequestMark::default()
        }
    }

    #[tokio::test]
    async fn plain_hashes_of_an_earlier_daemon_are_gone_after_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = Store::file(folder.path());
        let begun = vec![mark()];
        let vm = VmRecord {
            uid: vec![1; 16],
            name: "web".into(),
            begun: begun.clone(),
            ..VmRecord::default()
        };
        let disk = DiskRecord {
            uid: vec![2; 16],
            begun,
            ..DiskRecord::default()
        };
        let answered = RequestRecord {
            mark: Some(mark()),
            ended_ms: crate::text::now_ms(),
            ..RequestRecord::default()
        };
        let database = super::super::open(&file).unwrap();
        put(
            &database,
            &[
                (VMS, vm.uid.clone(), vm.to_bytes()),
                (DISKS, disk.uid.clone(), disk.encode_to_vec()),
                (REQUESTS, b"r".to_vec(), answered.encode_to_vec()),
            ],
        )
        .unwrap();
        drop(database);
        let key = Key::of(&[7; 32]);
        let (store, records) = Store::open(folder.path(), &key).unwrap();
        let answered = store.request(RequestKey::new("", "r")).await.unwrap().unwrap();
        for mark in [
            &records.vms[0].begun[0],
            &records.disks[0].begun[0],
            &answered.mark.unwrap(),
        ] {
            assert_eq!(mark.fingerprint, key.fingerprint(&HASH));
            assert_eq!(mark.plain_hash, Vec::<u8>::new());
        }
        assert_ne!(key.fingerprint(&HASH), Key::of(&[8; 32]).fingerprint(&HASH));
    }
}
