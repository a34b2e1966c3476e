//! Disks as manifests.
//!
//! In the API a disk is flat, what is put on it belongs to the request that makes it, and what the daemon says of it is
//! in `state`. A manifest arranges the same fields as a VM's does: `metadata`, `spec`, `status`.

use proto::{
    manifest::API_VERSION,
    model::{Violations, disk::NewDisk},
    v1,
};
use serde_json::{Map, Value as Json};

use super::emit;
use crate::failure::Failure;

/// The manifests' `kind`.
pub const KIND: &str = "Disk";

/// Fields of the API's `Disk` that are in a manifest's `metadata`.
const METADATA: [&str; 3] = ["name", "uid", "labels"];
/// The field of `state` that is there too.
const CREATED: &str = "createTime";
/// Fields of the request beside the disk.
const SOURCES: [&str; 2] = ["rawFile", "overlayOf"];

/// The request that a manifest, as JSON, asks for; without what only the daemon sets.
pub fn request(mut manifest: Json) -> serde_json::Result<v1::CreateDiskRequest> {
    let mut disk = take(&mut manifest, "metadata");
    disk.remove(CREATED);
    disk.remove("uid");
    let mut request = Map::new();
    for (name, value) in take(&mut manifest, "spec") {
        let place = if SOURCES.contains(&name.as_str()) {
            &mut request
        } else {
            &mut disk
        };
        place.insert(name, value);
    }
    request.insert("disk".to_owned(), Json::Object(disk));
    serde_json::from_value(Json::Object(request))
}

/// A disk as the JSON of its manifest, which makes the same disk again, but for what was put on it.
pub fn manifest(disk: &v1::Disk) -> Result<Json, Failure> {
    let Json::Object(fields) = emit::json(disk)? else {
        return Ok(Json::Null);
    };
    let (mut metadata, mut spec, mut status) = (Map::new(), Map::new(), Map::new());
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("state", Json::Object(state)) => status = state,
            (known, value) if METADATA.contains(&known) => _ = metadata.insert(name, value),
            (_, value) => _ = spec.insert(name, value),
        }
    }
    if let Some(created) = status.remove(CREATED) {
        metadata.insert(CREATED.to_owned(), created);
    }
    if let Some(below) = status.get("backingDisk") {
        spec.insert("overlayOf".to_owned(), below.clone());
    }
    let mut manifest = Map::new();
    manifest.insert("apiVersion".to_owned(), API_VERSION.into());
    manifest.insert("kind".to_owned(), KIND.into());
    for (name, part) in [("metadata", metadata), ("spec", spec), ("status", status)] {
        if !part.is_empty() {
            manifest.insert(name.to_owned(), Json::Object(part));
        }
    }
    Ok(Json::Object(manifest))
}

/// What can be seen to be wrong with a request without the node; fields as a manifest has them.
pub fn check(request: &v1::CreateDiskRequest) -> Violations {
    let mut found = NewDisk::try_from(request).err().unwrap_or_default();
    for violation in &mut found.0 {
        violation.field = field(&violation.field);
    }
    found
}

/// A field of a request (`disk.sizeBytes`) as a manifest has it (`spec.sizeBytes`).
pub fn field(path: &str) -> String {
    let path = path.strip_prefix("disk.").unwrap_or(path);
    let first = path.split(['.', '[']).next().unwrap_or_default();
    match first {
        "metadata" | "spec" => path.to_owned(),
        first if METADATA.contains(&first) => format!("metadata.{path}"),
        _ => format!("spec.{path}"),
    }
}

fn take(manifest: &mut Json, part: &str) -> Map<String, Json> {
    match manifest.get_mut(part).map(Json::take) {
        Some(Json::Object(fields)) => fields,
        _ => Map::new(),
    }
}
