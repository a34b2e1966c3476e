//! A disk for the API, without the fields that only its file provides.

use vmmd_api::v1::{self, ConditionStatus, DiskPhase};
use vmmd_host::text;
use vmmd_objects::registry::Record as _;
use vmmd_store::{DiskRecord, DiskStage, disk_source::Source};

use super::Seen;
use crate::paths::disk::Folder;

/// Relations of a disk to VMs and other disks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Relations {
    /// Names of VMs.
    pub used_by: Vec<String>,
    /// Name of the disk below it.
    pub backing: String,
    /// Names of disks above it.
    pub overlays: Vec<String>,
    /// Name of the image below all of them.
    pub image: String,
    /// Id of the operation under way.
    pub operation: String,
}

/// Returns the API's disk, without the fields that only its file provides.
pub fn disk(folder: &Folder, seen: &Seen) -> v1::Disk {
    let (record, relations) = (&seen.record, seen.view.clone());
    let phase = match record.stage() {
        DiskStage::Creating => DiskPhase::Creating,
        DiskStage::Ready if !relations.operation.is_empty() => DiskPhase::Resizing,
        DiskStage::Ready => DiskPhase::Ready,
        DiskStage::Deleting => DiskPhase::Deleting,
    };
    let source = match record.source.as_ref().and_then(|source| source.source.clone()) {
        Some(Source::RawFile(path)) => Some(v1::volume_spec::Source::RawFile(path)),
        Some(Source::OverlayOf(name)) => Some(v1::volume_spec::Source::OverlayOf(name)),
        Some(Source::Adopt(path)) => Some(v1::volume_spec::Source::Adopt(path)),
        Some(Source::Image(image)) => Some(v1::volume_spec::Source::Image(v1::ImageClone {
            name: image.name,
            clone: image.clone,
        })),
        // A disk that came from another node has no source.
        None if !relations.backing.is_empty() => {
            Some(v1::volume_spec::Source::OverlayOf(relations.backing.clone()))
        }
        None => None,
    };
    v1::Disk {
        metadata: Some(record.metadata()),
        spec: Some(v1::VolumeSpec {
            format: record.format,
            size_bytes: record.size_bytes,
            preallocation: record.preallocation,
            source,
            any_content: record.source.as_ref().is_some_and(|source| source.any_content),
        }),
        status: Some(v1::VolumeStatus {
            phase: phase.into(),
            path: folder.path(record).display().to_string(),
            allocated_bytes: 0,
            used_by: relations.used_by,
            backing_disk: relations.backing,
            overlays: relations.overlays,
            backing_image: relations.image,
            operation: relations.operation,
            conditions: vec![ready(record)],
            logical_block_bytes: record.logical_block,
        }),
    }
}

fn ready(record: &DiskRecord) -> v1::Condition {
    let (status, reason, message) = match record.stage() {
        DiskStage::Creating => (ConditionStatus::False, "Creating", "the disk is being made"),
        DiskStage::Ready => (ConditionStatus::True, "Ready", ""),
        DiskStage::Deleting => (ConditionStatus::False, "Deleting", "the disk is being deleted"),
    };
    v1::Condition {
        r#type: "Ready".to_owned(),
        status: status.into(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        transition_time: text::timestamp(record.stage_ms.max(record.created_ms)),
    }
}
