//! Disks, for lists and watches.

use std::sync::Arc;

use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::registry::{Registry, Seen};

use crate::{
    disk::describe,
    grpc::objects::{Served, Watched},
    host::Host,
    registry::disks::{DiskKind, shown},
};

impl Served for DiskKind {
    type Object = v1::Disk;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.disks.registry
    }

    async fn look_at(
        host: &Arc<Host>,
        seen: Vec<Arc<Seen<Self>>>,
        _: Vec<v1::Disk>,
    ) -> Result<Vec<v1::Disk>, Failure> {
        describe::look_at(host, seen).await
    }

    fn known(host: &Host, seen: &Seen<Self>) -> v1::Disk {
        shown::disk(&host.disk_folder(), seen)
    }
}

impl Watched for DiskKind {
    type Event = v1::WatchDisksResponse;

    fn gone(metadata: ObjectMetadata) -> v1::Disk {
        v1::Disk {
            metadata: Some(metadata),
            ..Default::default()
        }
    }

    fn event(kind: WatchEventType, disk: Option<v1::Disk>, cursor: String) -> v1::WatchDisksResponse {
        v1::WatchDisksResponse {
            r#type: kind.into(),
            disk,
            cursor,
        }
    }
}
