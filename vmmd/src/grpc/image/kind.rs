//! Images, for lists and watches.

use std::sync::Arc;

use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_objects::registry::{Record as _, Registry, Seen};

use vmmd_images::{describe, registry::ImageKind};

use crate::{
    grpc::objects::{Served, Watched},
    host::Host,
};

impl Served for ImageKind {
    type Object = v1::Image;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.images.registry
    }

    async fn look_at(
        host: &Arc<Host>,
        seen: Vec<Arc<Seen<Self>>>,
        _: Vec<v1::Image>,
    ) -> Result<Vec<v1::Image>, Failure> {
        describe::look_at(host, seen).await
    }

    fn known(_: &Host, seen: &Seen<Self>) -> v1::Image {
        <Self as Watched>::gone(seen.record.metadata())
    }
}

impl Watched for ImageKind {
    type Event = v1::WatchImagesResponse;

    fn gone(metadata: ObjectMetadata) -> v1::Image {
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
