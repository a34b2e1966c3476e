//! Images, for lists and watches.

use std::sync::Arc;

use tokio::sync::watch;
use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::feed::{Buried, Expired, Position};

use crate::{
    grpc::objects::{Kept, Kind, Snapshot},
    host::Host,
    image::describe,
    registry::images::{Seen, metadata},
};

/// See the module.
#[derive(Debug)]
pub enum Image {}

impl Kind for Image {
    const NAME: &'static str = "image";
    type Seen = Seen;
    type Object = v1::Image;
    type Event = v1::WatchImagesResponse;

    fn after(host: &Host, name: Option<&str>) -> Snapshot<Seen> {
        let (objects, at) = host.images.after(name);
        Snapshot::of(objects, at)
    }

    fn since(host: &Host, position: Position) -> Result<(Vec<Buried>, Snapshot<Seen>), Expired> {
        let (buried, objects, at) = host.images.since(position)?;
        Ok((buried, Snapshot::of(objects, at)))
    }

    fn position(host: &Host) -> Position {
        host.images.position()
    }

    fn news(host: &Host) -> watch::Receiver<u64> {
        host.images.news()
    }

    fn nonce(host: &Host, run: u64) -> Option<u64> {
        host.images.nonce(run)
    }

    async fn look_at(host: &Arc<Host>, seen: Vec<Arc<Seen>>) -> Result<Vec<v1::Image>, Failure> {
        let seen = seen.iter().map(|seen| seen.as_ref().clone());
        describe::look_at(host, seen.collect()).await
    }

    fn known(seen: &Seen) -> v1::Image {
        Self::buried(metadata(&seen.record))
    }

    fn buried(metadata: ObjectMetadata) -> v1::Image {
        v1::Image {
            metadata: Some(metadata),
            ..Default::default()
        }
    }

    fn event(kind: WatchEventType, image: Option<v1::Image>, cursor: String) -> v1::WatchImagesResponse {
        v1::WatchImagesResponse {
            r#type: kind.into(),
            image,
            cursor,
        }
    }
}

impl Kept for Seen {
    fn uid(&self) -> &[u8] {
        &self.record.uid
    }

    fn metadata(&self) -> ObjectMetadata {
        metadata(&self.record)
    }

    fn made(&self) -> (u64, u64) {
        (self.record.made_run, self.record.made_revision)
    }

    fn revision(&self) -> u64 {
        self.revision
    }
}
