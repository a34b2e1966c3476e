//! Disks as manifests: the API's `Disk`, with `apiVersion` and `kind` in front, as a VM's is.

use serde_json::Value as Json;
use vmmd_api::v1;
use vmmd_spec::{Violations, disk::NewDisk, manifest};

/// The manifests' `kind`.
pub const KIND: &str = "Disk";

/// The request that a manifest, as JSON, asks for; without what only the daemon sets.
pub fn request(json: Json) -> serde_json::Result<v1::CreateDiskRequest> {
    let mut disk: v1::Disk = serde_json::from_value(manifest::without_head(json))?;
    strip(&mut disk);
    Ok(v1::CreateDiskRequest {
        disk: Some(disk),
        ..Default::default()
    })
}

/// Takes away what only the daemon sets.
pub fn strip(disk: &mut v1::Disk) {
    disk.status = None;
    manifest::strip_metadata(&mut disk.metadata);
}

/// Returns the errors in a request that are detectable without the node; fields as in the request.
pub fn check(request: &v1::CreateDiskRequest) -> Violations {
    NewDisk::try_from(request).err().unwrap_or_default()
}

/// Name of a disk.
pub fn name(disk: &v1::Disk) -> &str {
    disk.metadata.as_ref().map_or("", |metadata| &metadata.name)
}

/// Size of a disk as the guest sees it, in bytes.
pub fn size(disk: &v1::Disk) -> u64 {
    disk.spec.as_ref().map_or(0, |spec| spec.size_bytes)
}
