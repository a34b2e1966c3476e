//! Networks, for lists and watches.

use std::sync::Arc;

use tokio::sync::watch;
use vmmd_api::v1::{self, ObjectMetadata, WatchEventType};
use vmmd_host::failure::Failure;
use vmmd_network::SeenNetwork as Seen;
use vmmd_objects::feed::{Buried, Expired, Position};

use crate::{
    grpc::objects::{Kept, Kind, Snapshot},
    host::Host,
};

/// See the module.
#[derive(Debug)]
pub enum Network {}

impl Kind for Network {
    const NAME: &'static str = "network";
    type Seen = Seen;
    type Object = v1::Network;
    type Event = v1::WatchNetworksResponse;

    fn after(host: &Host, name: Option<&str>) -> Snapshot<Seen> {
        let (objects, at) = host.networks.after(name);
        Snapshot::of(objects, at)
    }

    fn since(host: &Host, position: Position) -> Result<(Vec<Buried>, Snapshot<Seen>), Expired> {
        let (buried, objects, at) = host.networks.since(position)?;
        Ok((buried, Snapshot::of(objects, at)))
    }

    fn position(host: &Host) -> Position {
        host.networks.position()
    }

    fn news(host: &Host) -> watch::Receiver<u64> {
        host.networks.news()
    }

    fn nonce(host: &Host, run: u64) -> Option<u64> {
        host.networks.nonce(run)
    }

    async fn look_at(_: &Arc<Host>, seen: Vec<Arc<Seen>>) -> Result<Vec<v1::Network>, Failure> {
        Ok(seen.iter().map(|seen| seen.network.clone()).collect())
    }

    fn known(seen: &Seen) -> v1::Network {
        seen.network.clone()
    }

    fn buried(metadata: ObjectMetadata) -> v1::Network {
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

impl Kept for Seen {
    fn uid(&self) -> &[u8] {
        &self.uid
    }

    fn metadata(&self) -> ObjectMetadata {
        self.network.metadata.clone().unwrap_or_default()
    }

    fn made(&self) -> (u64, u64) {
        self.made
    }

    fn revision(&self) -> u64 {
        self.revision
    }
}
