//! The stored records of VMs and snapshots.

use std::collections::BTreeMap;

use vmmd_api::v1;

use super::{Mirror, Timestamp, VmSpec, as_it_is, stored};
use crate::{
    AccessKeysRecord, FileRecord, HandoverRecord, Hardware, InstanceRecord, ReplacingRecord, RequestMark,
    RestartRecord, RetentionRecord, SnapshotDisk, SnapshotRecord, StopRecord, VmRecord,
};

// The store's own in both places.
as_it_is!(
    AccessKeysRecord,
    FileRecord,
    HandoverRecord,
    Hardware,
    ReplacingRecord,
    RequestMark,
    RestartRecord,
    RetentionRecord,
    SnapshotDisk,
    StopRecord
);

stored! {
    /// See [`VmRecord`].
    Vm of VmRecord {
        #[prost(bytes = "vec", tag = "1")]
        uid: Vec<u8>,
        #[prost(string, tag = "2")]
        name: String,
        #[prost(uint64, tag = "3")]
        generation: u64,
        #[prost(uint64, tag = "4")]
        created_ms: u64,
        #[prost(btree_map = "string, string", tag = "5")]
        labels: BTreeMap<String, String>,
        #[prost(btree_map = "string, string", tag = "40")]
        annotations: BTreeMap<String, String>,
        #[prost(string, tag = "41")]
        owner: String,
        #[prost(message, optional, tag = "6")]
        spec: Option<VmSpec>,
        #[prost(message, optional, tag = "7")]
        hardware: Option<Hardware>,
        #[prost(int32, tag = "8")]
        intent: i32,
        #[prost(message, optional, tag = "9")]
        instance: Option<Instance>,
        #[prost(message, optional, tag = "10")]
        last_exit: Option<Exit>,
        #[prost(message, optional, tag = "30")]
        counts: Option<Counts>,
        #[prost(message, optional, tag = "31")]
        restart: Option<RestartRecord>,
        #[prost(message, optional, tag = "32")]
        stop: Option<StopRecord>,
        #[prost(message, optional, tag = "37")]
        deleting: Option<StopRecord>,
        #[prost(bool, tag = "33")]
        evacuated: bool,
        #[prost(btree_map = "string, message", tag = "34")]
        files: BTreeMap<String, FileRecord>,
        #[prost(message, optional, tag = "35")]
        handover: Option<HandoverRecord>,
        #[prost(message, optional, tag = "36")]
        replacing: Option<ReplacingRecord>,
        #[prost(message, repeated, tag = "20")]
        begun: Vec<RequestMark>,
        #[prost(uint64, tag = "21")]
        made_run: u64,
        #[prost(uint64, tag = "22")]
        made_revision: u64,
        #[prost(message, repeated, tag = "42")]
        access_keys: Vec<AccessKeysRecord>,
    }
}

stored! {
    /// See [`InstanceRecord`].
    Instance of InstanceRecord {
        #[prost(uint32, tag = "1")]
        user: u32,
        #[prost(uint64, tag = "2")]
        started_ms: u64,
        #[prost(uint64, tag = "3")]
        generation: u64,
        #[prost(string, tag = "4")]
        boot_id: String,
        #[prost(string, repeated, tag = "5")]
        attaching: Vec<String>,
        #[prost(string, repeated, tag = "6")]
        ejecting: Vec<String>,
        #[prost(string, tag = "20")]
        request_id: String,
        #[prost(string, tag = "23")]
        operation: String,
        #[prost(message, optional, tag = "21")]
        spec: Option<VmSpec>,
        #[prost(message, optional, tag = "22")]
        hardware: Option<Hardware>,
        #[prost(btree_map = "string, string", tag = "24")]
        taps: BTreeMap<String, String>,
        #[prost(bool, tag = "25")]
        shared_memory: bool,
        #[prost(uint64, tag = "26")]
        started_since_boot: u64,
        #[prost(bool, tag = "27")]
        may_be_frozen: bool,
        #[prost(string, tag = "28")]
        cgroup: String,
        #[prost(bool, tag = "29")]
        started: bool,
        #[prost(bool, tag = "30")]
        notified: bool,
    }
}

stored! {
    /// See [`SnapshotRecord`].
    Snapshot of SnapshotRecord {
        #[prost(bytes = "vec", tag = "1")]
        uid: Vec<u8>,
        #[prost(string, tag = "2")]
        name: String,
        #[prost(uint64, tag = "3")]
        created_ms: u64,
        #[prost(btree_map = "string, string", tag = "4")]
        labels: BTreeMap<String, String>,
        #[prost(btree_map = "string, string", tag = "5")]
        annotations: BTreeMap<String, String>,
        #[prost(string, tag = "6")]
        owner: String,
        #[prost(int32, tag = "7")]
        stage: i32,
        #[prost(uint64, tag = "8")]
        completed_ms: u64,
        #[prost(uint64, tag = "9")]
        size_bytes: u64,
        #[prost(uint64, tag = "10")]
        written_bytes: u64,
        #[prost(uint64, tag = "11")]
        pause_ns: u64,
        #[prost(string, tag = "12")]
        vm_name: String,
        #[prost(bytes = "vec", tag = "13")]
        vm_uid: Vec<u8>,
        #[prost(message, optional, tag = "14")]
        vm_spec: Option<VmSpec>,
        #[prost(message, optional, tag = "15")]
        vm_hardware: Option<Hardware>,
        #[prost(message, repeated, tag = "16")]
        disks: Vec<SnapshotDisk>,
        #[prost(uint64, tag = "17")]
        allocated_bytes: u64,
        #[prost(message, optional, tag = "18")]
        retention: Option<RetentionRecord>,
        #[prost(int32, tag = "19")]
        kind: i32,
        #[prost(int32, tag = "21")]
        consistency: i32,
        #[prost(string, tag = "22")]
        consistency_message: String,
        #[prost(message, repeated, tag = "20")]
        begun: Vec<RequestMark>,
    }
}

stored! {
    /// How a run ended.
    Exit of v1::ExitStatus {
        #[prost(int32, tag = "1")]
        reason: i32,
        #[prost(string, tag = "2")]
        message: String,
        #[prost(message, optional, tag = "3")]
        time: Option<Timestamp>,
    }
}

stored! {
    /// What runs were.
    Counts of v1::RunCounts {
        #[prost(uint64, tag = "1")]
        starts: u64,
        #[prost(uint64, tag = "2")]
        automatic_starts: u64,
        #[prost(uint64, tag = "3")]
        guest_shutdowns: u64,
        #[prost(uint64, tag = "4")]
        guest_resets: u64,
        #[prost(uint64, tag = "5")]
        guest_panics: u64,
        #[prost(uint64, tag = "6")]
        guest_crashes: u64,
        #[prost(uint64, tag = "7")]
        vmm_errors: u64,
        #[prost(uint64, tag = "8")]
        out_of_memory: u64,
        #[prost(uint64, tag = "9")]
        lost: u64,
        #[prost(uint64, tag = "10")]
        failed_starts: u64,
        #[prost(uint64, tag = "11")]
        crash_resets: u64,
        #[prost(uint64, tag = "12")]
        probe_failures: u64,
    }
}

stored! {
    /// Metadata of a deleted object.
    Metadata of v1::ObjectMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        uid: String,
        #[prost(uint64, tag = "3")]
        generation: u64,
        #[prost(btree_map = "string, string", tag = "4")]
        labels: BTreeMap<String, String>,
        #[prost(message, optional, tag = "5")]
        create_time: Option<Timestamp>,
        #[prost(btree_map = "string, string", tag = "6")]
        annotations: BTreeMap<String, String>,
        #[prost(string, tag = "7")]
        owner: String,
    }
}
