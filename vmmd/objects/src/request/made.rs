//! The object that a request created. The stored response is valid only while the object exists.

use prost::Message;
use uuid::Uuid;
use vmmd_api::v1::{
    CreateDiskResponse, CreateNetworkResponse, CreateSnapshotResponse, CreateVmResponse, ImportImageResponse,
    ImportSnapshotResponse, ObjectMetadata, Operation, OperationPhase, RestoreVmResponse,
};
use vmmd_host::failure::{Failure, Kind};

use super::Requests;
use crate::{context::Context, event::Object};

/// The methods that make an object, or put it back.
#[cfg(test)]
pub const METHODS: [&str; 7] = [
    "CreateVm",
    "RestoreVm",
    "CreateDisk",
    "CreateNetwork",
    "CreateSnapshot",
    "ImportSnapshot",
    "ImportImage",
];

/// The object that a response of this method reports. `None` when the method creates no object, or
/// when the creation has only begun (`no_wait`): the operation then has its result.
pub fn object(method: &str, response: &[u8]) -> Option<Object> {
    match method {
        "CreateVm" => vm(CreateVmResponse::decode(response).ok()?.vm?.metadata),
        "RestoreVm" => vm(RestoreVmResponse::decode(response).ok()?.vm?.metadata),
        "CreateDisk" => {
            let response = CreateDiskResponse::decode(response).ok()?;
            let metadata = whole(response.operation, response.disk?.metadata);
            named(Object::Disk, metadata)
        }
        "ImportImage" => {
            let response = ImportImageResponse::decode(response).ok()?;
            let metadata = whole(response.operation, response.image?.metadata);
            named(Object::Image, metadata)
        }
        "CreateNetwork" => {
            let response = CreateNetworkResponse::decode(response).ok()?;
            named(Object::Network, response.network?.metadata)
        }
        "CreateSnapshot" => {
            let response = CreateSnapshotResponse::decode(response).ok()?;
            named(Object::Snapshot, response.snapshot?.metadata)
        }
        "ImportSnapshot" => {
            let response = ImportSnapshotResponse::decode(response).ok()?;
            named(Object::Snapshot, response.snapshot?.metadata)
        }
        _ => None,
    }
}

fn vm(metadata: Option<ObjectMetadata>) -> Option<Object> {
    named(Object::Vm, metadata)
}

/// `None` while the operation that creates the object is in progress.
fn whole(operation: Option<Operation>, metadata: Option<ObjectMetadata>) -> Option<ObjectMetadata> {
    metadata.filter(|_| operation.is_none_or(|operation| operation.phase() == OperationPhase::Completed))
}

fn named(object: fn(String, Uuid) -> Object, metadata: Option<ObjectMetadata>) -> Option<Object> {
    let metadata = metadata?;
    let uid = Uuid::parse_str(&metadata.uid).ok()?;
    Some(object(metadata.name, uid))
}

/// A repeated request whose object is not there any more.
pub fn gone(object: &Object) -> Failure {
    let message = format!(
        "this request was carried out before, and its {object} is not on this node any more: to make another one, take a new request id"
    );
    Failure::new(Kind::NotFound, "OBJECT_GONE", message)
}

impl Requests {
    /// UUID of the object that the request made under an earlier daemon. `method` is the method of the request:
    /// "CreateVm".
    pub fn made(&self, context: &Context, method: &str) -> Option<Vec<u8>> {
        let inner = self.inner();
        let left = inner.left.get(&context.key())?;
        (left.mark.method == method).then(|| left.on.clone())
    }
}
