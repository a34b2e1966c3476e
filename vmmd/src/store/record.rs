//! What the store keeps of a VM. The wire form is Protocol Buffers, so that fields can be added; a change of meaning
//! needs a new [`SCHEMA`](super::SCHEMA) and a migration.

use std::collections::BTreeMap;

use proto::v1::{ExitStatus, VmSpec};

/// A VM, from its creation to its deletion.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VmRecord {
    /// UUID, 16 bytes; also the record's key.
    #[prost(bytes = "vec", tag = "1")]
    pub uid: Vec<u8>,
    /// Unique on the node.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Counts changes of the spec, from 1.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "4")]
    pub created_ms: u64,
    /// As in the manifest.
    #[prost(btree_map = "string, string", tag = "5")]
    pub labels: BTreeMap<String, String>,
    /// As in the manifest.
    #[prost(message, optional, tag = "6")]
    pub spec: Option<VmSpec>,
    /// Given once, the same in each run.
    #[prost(message, optional, tag = "7")]
    pub hardware: Option<Hardware>,
    /// What was last asked for.
    #[prost(enumeration = "Intent", tag = "8")]
    pub intent: i32,
    /// Written before its process is forked, removed when that has ended.
    #[prost(message, optional, tag = "9")]
    pub instance: Option<InstanceRecord>,
    /// How the last run ended.
    #[prost(message, optional, tag = "10")]
    pub last_exit: Option<ExitStatus>,
}

/// What the guest sees and must never change across runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hardware {
    /// PCI device number of the entropy device.
    #[prost(uint32, tag = "1")]
    pub rng_slot: u32,
    /// By the disk's name: its PCI device number.
    #[prost(btree_map = "string, uint32", tag = "2")]
    pub disk_slots: BTreeMap<String, u32>,
    /// By the NIC's name.
    #[prost(btree_map = "string, message", tag = "3")]
    pub nics: BTreeMap<String, NicHardware>,
}

/// A NIC's part of [`Hardware`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct NicHardware {
    /// PCI device number.
    #[prost(uint32, tag = "1")]
    pub slot: u32,
    /// 6 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub mac: Vec<u8>,
}

/// One run of the VM.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InstanceRecord {
    /// User id of the `vmm`.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "2")]
    pub started_ms: u64,
    /// Generation of the spec it runs with.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Of the node's kernel at that time: a run never outlives it.
    #[prost(string, tag = "4")]
    pub boot_id: String,
}

/// What was last asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Intent {
    /// Not to run.
    Stopped = 0,
    /// To run.
    Running = 1,
}
