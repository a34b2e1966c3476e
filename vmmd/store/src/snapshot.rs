//! The records of snapshots.

use std::collections::BTreeMap;

use vmmd_api::v1::{SnapshotKind, VmSpec};

#[cfg(doc)]
use super::DiskRecord;
use super::{DiskImage, Hardware, RequestMark};

/// A snapshot of a VM. How it is written is in [`super::stored`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SnapshotRecord {
    /// UUID, 16 bytes; also the record's key, and the name of its file.
    pub uid: Vec<u8>,
    /// Unique among the node's snapshots.
    pub name: String,
    /// Unix time in milliseconds.
    pub created_ms: u64,
    /// As in the request.
    pub labels: BTreeMap<String, String>,
    /// As in the request.
    pub annotations: BTreeMap<String, String>,
    /// As in the request.
    pub owner: String,
    /// How far its life is: a [`SnapshotStage`].
    pub stage: i32,
    /// When it was complete, in milliseconds of Unix time.
    pub completed_ms: u64,
    /// Length of its file in bytes: 0 of one of the disks alone.
    pub size_bytes: u64,
    /// Memory that was written, in bytes.
    pub written_bytes: u64,
    /// For how long the VM was paused, in nanoseconds.
    pub pause_ns: u64,
    /// The VM's name at that time.
    pub vm_name: String,
    /// The VM's UUID, 16 bytes.
    pub vm_uid: Vec<u8>,
    /// The spec that the VM ran with.
    pub vm_spec: Option<VmSpec>,
    /// The addresses of its devices.
    pub vm_hardware: Option<Hardware>,
    /// The disks that it has copies of.
    pub disks: Vec<SnapshotDisk>,
    /// Room that its files take, in bytes; at most so much while it is being made. 0 in a record of an earlier daemon.
    pub allocated_bytes: u64,
    /// The retention that it was created with. One without is never deleted by a retention.
    pub retention: Option<RetentionRecord>,
    /// What it has: a [`vmmd_api::v1::SnapshotKind`]; 0 in a record of an earlier daemon, which knew full ones alone.
    pub kind: i32,
    /// State of the file systems in it: a [`vmmd_api::v1::SnapshotConsistency`]; 0 in a record of an earlier daemon.
    pub consistency: i32,
    /// Why that is less than the request wanted; empty when it is not.
    pub consistency_message: String,
    /// Requests that have been begun on this snapshot and may not have been answered yet.
    pub begun: Vec<RequestMark>,
}

/// Which earlier snapshots of its VM are deleted when a snapshot is complete.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RetentionRecord {
    /// How many snapshots of the group stay, with the new one; 0 for any number.
    #[prost(uint32, tag = "1")]
    pub keep_last: u32,
    /// How much older than the new one they may be, in milliseconds; 0 for any age.
    #[prost(uint64, tag = "2")]
    pub max_age_ms: u64,
    /// Which snapshots of the VM it is about: those with the same group.
    #[prost(string, tag = "3")]
    pub group: String,
}

/// A disk in a snapshot.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SnapshotDisk {
    /// Its name in the VM.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Raw or qcow2.
    #[prost(enumeration = "vmmd_api::v1::DiskFormat", tag = "2")]
    pub format: i32,
    /// Virtual size in bytes; for a qcow2 image outside the DiskService, the length of its file.
    #[prost(uint64, tag = "3")]
    pub capacity_bytes: u64,
    /// UUID of the disk of the DiskService that it is an overlay of; empty when it is none.
    #[prost(bytes = "vec", tag = "4")]
    pub backing: Vec<u8>,
    /// As of the disk ([`DiskRecord::image`]).
    #[prost(bytes = "vec", tag = "5")]
    pub image: Vec<u8>,
    /// As of the disk ([`DiskRecord::image_digest`]).
    #[prost(bytes = "vec", tag = "6")]
    pub image_digest: Vec<u8>,
    /// The source of the disk, if that is an image.
    #[prost(message, optional, tag = "7")]
    pub source: Option<DiskImage>,
}

impl SnapshotRecord {
    /// How far its life is. A stage that this daemon does not know counts as partial.
    pub fn stage(&self) -> SnapshotStage {
        SnapshotStage::try_from(self.stage).unwrap_or(SnapshotStage::Partial)
    }

    /// Whether it has the machine too: memory, processors and devices, not the disks alone.
    pub fn has_machine(&self) -> bool {
        self.kind != i32::from(SnapshotKind::Disks)
    }
}

/// How far the life of a snapshot is. A new daemon removes each record that is not `Ready`, and its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum SnapshotStage {
    /// Its file is being written or removed.
    Partial = 0,
    /// It is complete and durable.
    Ready = 1,
}
