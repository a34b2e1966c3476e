//! Networks, for lists and watches.

use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_network::{NetworkKind, describe};
use vmmd_objects::registry::{Registry, Seen};

use crate::{
    grpc::objects::{Served, Watched},
    host::Host,
};

impl Served for NetworkKind {
    type Object = v1::Network;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.networks.registry
    }

    fn known(_: &Host, seen: &Seen<Self>) -> v1::Network {
        describe(seen)
    }
}

impl Watched for NetworkKind {
    type Event = v1::WatchNetworksResponse;

    fn gone(metadata: ObjectMetadata) -> v1::Network {
        v1::Network {
            metadata: Some(metadata),
            ..Default::default()
        }
    }

    fn event(
        kind: WatchEventType,
        network: Option<v1::Network>,
        cursor: String,
    ) -> v1::WatchNetworksResponse {
        v1::WatchNetworksResponse {
            r#type: kind.into(),
            network,
            cursor,
        }
    }
}
