//! Networks as manifests: the API's `Network`, with `apiVersion` and `kind` in front, as a VM's is.

use serde_json::Value as Json;
use vmmd_api::v1;
use vmmd_spec::{Violations, manifest, network::NewNetwork};

/// The manifests' `kind`.
pub const KIND: &str = "Network";

/// The network of a manifest as JSON, without fields that only the daemon sets.
pub fn network(json: Json) -> serde_json::Result<v1::Network> {
    let mut network = serde_json::from_value(manifest::without_head(json))?;
    strip(&mut network);
    Ok(network)
}

/// Removes the fields that only the daemon sets.
pub fn strip(network: &mut v1::Network) {
    network.status = None;
    manifest::strip_metadata(&mut network.metadata);
}

/// Returns the errors in a network that are detectable without the node; fields as in a request.
pub fn check(network: &v1::Network) -> Violations {
    NewNetwork::try_from(network).err().unwrap_or_default()
}
