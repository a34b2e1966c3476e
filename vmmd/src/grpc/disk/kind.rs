//! Disks, for lists and watches.

use std::sync::Arc;

use tokio::sync::watch;
use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::feed::{Buried, Expired, Position};

use crate::{
    disk::describe,
    grpc::objects::{Kept, Kind, Snapshot},
    host::Host,
    registry::disks::{self, Seen, shown},
};

/// See the module.
#[derive(Debug)]
pub enum Disk {}

fn snapshot(disks::Snapshot { disks, at }: disks::Snapshot) -> Snapshot<Seen> {
    Snapshot { objects: disks, at }
}

impl Kind for Disk {
    const NAME: &'static str = "disk";
    type Seen = Seen;
    type Object = v1::Disk;
    type Event = v1::WatchDisksResponse;

    fn after(host: &Host, name: Option<&str>) -> Snapshot<Seen> {
        snapshot(host.disks.after(&host.disk_folder(), name))
    }

    fn since(host: &Host, position: Position) -> Result<(Vec<Buried>, Snapshot<Seen>), Expired> {
        let (buried, disks) = host.disks.since(&host.disk_folder(), position)?;
        Ok((buried, snapshot(disks)))
    }

    fn position(host: &Host) -> Position {
        host.disks.position()
    }

    fn news(host: &Host) -> watch::Receiver<u64> {
        host.disks.news()
    }

    fn nonce(host: &Host, run: u64) -> Option<u64> {
        host.disks.nonce(run)
    }

    async fn look_at(host: &Arc<Host>, seen: Vec<Arc<Seen>>) -> Result<Vec<v1::Disk>, Failure> {
        describe::look_at(host, seen).await
    }

    fn known(seen: &Seen) -> v1::Disk {
        seen.disk.clone()
    }

    fn buried(metadata: ObjectMetadata) -> v1::Disk {
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

impl Kept for Seen {
    fn uid(&self) -> &[u8] {
        &self.record.uid
    }

    fn metadata(&self) -> ObjectMetadata {
        shown::metadata(&self.record)
    }

    fn made(&self) -> (u64, u64) {
        (self.record.made_run, self.record.made_revision)
    }

    fn revision(&self) -> u64 {
        self.revision
    }
}
