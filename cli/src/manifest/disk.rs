//! Disks as manifests: the API's `Disk`, with `apiVersion` and `kind` in front, as a VM's is.

use serde_json::{Map, Value as Json};
use vmmd_api::v1;
use vmmd_spec::{Violations, disk::NewDisk, manifest::API_VERSION};

use super::emit;
use crate::failure::Failure;

/// The manifests' `kind`.
pub const KIND: &str = "Disk";

/// The request that a manifest, as JSON, asks for; without what only the daemon sets.
pub fn request(mut manifest: Json) -> serde_json::Result<v1::CreateDiskRequest> {
    if let Json::Object(fields) = &mut manifest {
        for beside in ["apiVersion", "kind", "status"] {
            fields.remove(beside);
        }
    }
    let mut disk: v1::Disk = serde_json::from_value(manifest)?;
    strip(&mut disk);
    Ok(v1::CreateDiskRequest {
        disk: Some(disk),
        ..Default::default()
    })
}

/// Takes away what only the daemon sets.
pub fn strip(disk: &mut v1::Disk) {
    disk.status = None;
    if let Some(metadata) = &mut disk.metadata {
        metadata.uid.clear();
        metadata.generation = 0;
        metadata.create_time = None;
    }
}

/// A disk as the JSON of its manifest, which makes the same disk again.
pub fn manifest(disk: &v1::Disk) -> Result<Json, Failure> {
    let mut manifest = Map::new();
    manifest.insert("apiVersion".to_owned(), API_VERSION.into());
    manifest.insert("kind".to_owned(), KIND.into());
    if let Json::Object(fields) = emit::json(disk)? {
        manifest.extend(fields);
    }
    Ok(Json::Object(manifest))
}

/// Returns the errors in a request that are detectable without the node; fields as in a manifest.
pub fn check(request: &v1::CreateDiskRequest) -> Violations {
    let mut found = NewDisk::try_from(request).err().unwrap_or_default();
    for violation in &mut found.0 {
        violation.field = field(&violation.field);
    }
    found
}

/// A field of a request (`disk.spec.sizeBytes`) as a manifest has it (`spec.sizeBytes`).
pub fn field(path: &str) -> String {
    path.strip_prefix("disk.").unwrap_or(path).to_owned()
}

/// Name of a disk.
pub fn name(disk: &v1::Disk) -> &str {
    disk.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

/// Size of a disk as the guest sees it, in bytes.
pub fn size(disk: &v1::Disk) -> u64 {
    disk.spec.as_ref().map_or(0, |spec| spec.size_bytes)
}
