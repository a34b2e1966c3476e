//! Networks, for lists and watches.

use std::sync::Arc;

use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_network::{NetworkKind, describe};
use vmmd_objects::registry::{Registry, Seen};

use crate::{grpc::objects::Served, host::Host};

impl Served for NetworkKind {
    type Object = v1::Network;
    type Event = v1::WatchNetworksResponse;

    fn registry(host: &Host) -> &Registry<Self> {
        &host.networks.registry
    }

    async fn look_at(_: &Arc<Host>, seen: Vec<Arc<Seen<Self>>>) -> Result<Vec<v1::Network>, Failure> {
        Ok(seen.iter().map(|seen| describe(seen)).collect())
    }

    fn known(_: &Host, seen: &Seen<Self>) -> v1::Network {
        describe(seen)
    }

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
