//! Kinds of objects: the tables of their records and of their deletions.

use prost::Message as _;

use super::{
    DISKS, Deleted, DiskRecord, Error, IMAGES, ImageRecord, Key, NETWORKS, NetworkRecord, SNAPSHOTS,
    SnapshotRecord, Table, VMS, VmRecord, stored,
};

/// A record of an object.
pub trait Kept {
    /// The records of the kind, by UUID.
    const TABLE: Table;
    /// The deletions of the kind, if they are remembered.
    const DELETED: Option<Deleted>;

    /// UUID, 16 bytes.
    fn uid(&self) -> &[u8];

    /// The stored form; `key` seals the secrets.
    ///
    /// # Errors
    ///
    /// The encryption of a secret fails.
    fn encoded(&self, key: &Key) -> Result<Vec<u8>, Error>;
}

macro_rules! kept {
    ($($record:ty, $table:ident, $deleted:expr, $encode:expr;)*) => {
        $(impl Kept for $record {
            const TABLE: Table = $table;
            const DELETED: Option<Deleted> = $deleted;

            fn uid(&self) -> &[u8] {
                &self.uid
            }

            fn encoded(&self, key: &Key) -> Result<Vec<u8>, Error> {
                let encode: fn(&Self, &Key) -> Result<Vec<u8>, Error> = $encode;
                encode(self, key)
            }
        })*
    };
}

kept! {
    VmRecord, VMS, Some(Deleted::Vm), |record, key| key.seal(stored::Vm::from(record.clone()));
    SnapshotRecord, SNAPSHOTS, None, |record, key| key.seal(stored::Snapshot::from(record.clone()));
    DiskRecord, DISKS, Some(Deleted::Disk), |record, _| Ok(record.encode_to_vec());
    ImageRecord, IMAGES, Some(Deleted::Image), |record, _| Ok(record.encode_to_vec());
    NetworkRecord, NETWORKS, Some(Deleted::Network), |record, _| Ok(record.encode_to_vec());
}
