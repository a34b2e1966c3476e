//! Records that a schema step writes again, since an earlier daemon has written them otherwise and the key is needed to change that.

use prost::Message;
use redb::{ReadableTable as _, WriteTransaction};

use super::{
    DISKS, DiskRecord, Error, IMAGES, ImageRecord, Key, NETWORKS, NetworkRecord, RequestMark, SNAPSHOTS,
    Table, VMS,
    stored::{Snapshot, Vm},
};

/// Writes the records of a table of which `change` makes others. Records that cannot be decoded stay as they are.
pub(super) fn rewrite<R: Message + Default>(
    transaction: &WriteTransaction,
    table: Table,
    change: impl Fn(R) -> Result<Option<Vec<u8>>, Error>,
) -> Result<(), Error> {
    let failed = |error: redb::StorageError| Error::of("write the store", error);
    let mut rows = transaction
        .open_table(table)
        .map_err(|error| Error::of("open the store", error))?;
    let mut found = Vec::new();
    for row in rows.iter().map_err(failed)? {
        let (key, value) = row.map_err(failed)?;
        let Ok(record) = R::decode(value.value()) else {
            continue;
        };
        if let Some(written) = change(record)? {
            found.push((key.value().to_vec(), written));
        }
    }
    for (key, value) in found {
        rows.insert(key.as_slice(), value.as_slice()).map_err(failed)?;
    }
    Ok(())
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

/// Makes fingerprints of the plain hashes that earlier daemons have written.
pub(super) fn key_all(transaction: &WriteTransaction, key: &Key) -> Result<(), Error> {
    plain::<Vm>(transaction, VMS, key)?;
    plain::<Snapshot>(transaction, SNAPSHOTS, key)?;
    plain::<DiskRecord>(transaction, DISKS, key)?;
    plain::<NetworkRecord>(transaction, NETWORKS, key)?;
    plain::<ImageRecord>(transaction, IMAGES, key)
}

fn plain<R: Marked>(transaction: &WriteTransaction, table: Table, key: &Key) -> Result<(), Error> {
    rewrite(transaction, table, |mut record: R| {
        let mut any = false;
        for mark in record.marks() {
            any |= mark.key_with(key);
        }
        Ok(any.then(|| record.encode_to_vec()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{META, RequestKey, RequestRecord, Store, VmRecord, write};

    const HASH: [u8; 32] = [5; 32];

    fn mark() -> RequestMark {
        RequestMark {
            id: "r".into(),
            method: "CreateVm".into(),
            plain_hash: HASH.to_vec(),
            begun_ms: vmmd_host::text::now_ms(),
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
            ended_ms: vmmd_host::text::now_ms(),
            ..RequestRecord::default()
        };
        let key = Key::of(&[7; 32]);
        let database = super::super::open(&file, &key).unwrap();
        let entry = [answered.ended_ms.to_be_bytes().as_slice(), b"r"].concat();
        write(&database, |transaction| {
            for (table, key, value) in [
                (VMS, vm.uid.as_slice(), vm.to_bytes()),
                (DISKS, disk.uid.as_slice(), disk.encode_to_vec()),
                (Table::new("requests"), b"r", answered.encode_to_vec()),
                (Table::new("request_order"), b"0", entry),
            ] {
                let mut table = transaction.open_table(table).unwrap();
                table.insert(key, value.as_slice()).unwrap();
            }
            transaction.open_table(META).unwrap().insert("schema", 5).unwrap();
            Ok(())
        })
        .unwrap();
        drop(database);
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
