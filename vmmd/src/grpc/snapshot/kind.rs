//! Snapshots, for lists.

use vmmd_api::v1;
use vmmd_objects::registry::{Registry, Seen};

use crate::{grpc::objects::Served, host::Host, registry::snapshots::SnapshotKind, snapshot};

impl Served for SnapshotKind {
    type Object = v1::Snapshot;
    const MAX_BYTES: usize = 3 << 20;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.snapshots.registry
    }

    fn known(host: &Host, seen: &Seen<Self>) -> v1::Snapshot {
        snapshot::describe(&seen.record, host.store.key())
    }
}
