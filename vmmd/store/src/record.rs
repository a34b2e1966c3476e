//! Records of VMs, disks and the node in the store. The wire form is Protocol Buffers, so that
//! fields can be added. A change of meaning needs a new [`SCHEMA`](super::SCHEMA) and a migration.
//! [`super::stored`] has the wire form of a VM.

use std::{collections::BTreeMap, fmt};

use vm_lifecycle::{policy::Intent, restart::RestartRecord};
use vmmd_api::v1::{ExitReason, ExitStatus, RunCounts, VmSpec};

use super::RequestMark;

/// A VM, from its creation to its deletion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmRecord {
    /// UUID, 16 bytes; also the record's key.
    pub uid: Vec<u8>,
    /// Unique on the node.
    pub name: String,
    /// Counts changes of the spec, from 1.
    pub generation: u64,
    /// Unix time in milliseconds.
    pub created_ms: u64,
    /// As in the manifest.
    pub labels: BTreeMap<String, String>,
    /// As in the manifest.
    pub annotations: BTreeMap<String, String>,
    /// As in the manifest.
    pub owner: String,
    /// As in the manifest.
    pub spec: Option<VmSpec>,
    /// Given once, the same in each run.
    pub hardware: Option<Hardware>,
    /// Last requested state: an [`Intent`].
    pub intent: i32,
    /// Written before its process is forked, removed when that has ended.
    pub instance: Option<InstanceRecord>,
    /// How the last run ended.
    pub last_exit: Option<ExitStatus>,
    /// Counters of its runs since its creation. Resets are counted at the end of a run.
    pub counts: Option<RunCounts>,
    /// Starts by the run policy; not there when there was none since the last one by request.
    pub restart: Option<RestartRecord>,
    /// A stop that was asked for and is not done; not there when there is none.
    pub stop: Option<StopRecord>,
    /// A deletion that was asked for and is not done; not there when there is none.
    pub deleting: Option<StopRecord>,
    /// The node has ended its last run to make room, for example for a reboot; the intent is
    /// unchanged.
    pub evacuated: bool,
    /// Files of the last start, by path. A start by request replaces all of them; a start by the
    /// run policy adds only unknown ones.
    pub files: BTreeMap<String, FileRecord>,
    /// Its migration to another node, or from one; not there when there was none.
    pub handover: Option<HandoverRecord>,
    /// A restore replaces its images; not there when none does.
    pub replacing: Option<ReplacingRecord>,
    /// Requests that have been begun on this VM and may not have been answered yet.
    pub begun: Vec<RequestMark>,
    /// Run of the daemon that made it; 0 when not known.
    pub made_run: u64,
    /// Revision in that run which is not later than its creation.
    pub made_revision: u64,
    /// SSH keys that users of the guest may have because of the VM's spec. Noted before the guest's agent
    /// adds them, and removed after the agent has removed them.
    pub access_keys: Vec<AccessKeysRecord>,
}

/// SSH keys of a user of a guest.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AccessKeysRecord {
    /// Name of the user.
    #[prost(string, tag = "1")]
    pub user: String,
    /// Lines of its authorized_keys.
    #[prost(string, repeated, tag = "2")]
    pub keys: Vec<String>,
}

/// Images of a VM that are replaced by copies of a snapshot's disks, which are beside them.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ReplacingRecord {
    /// Which.
    #[prost(message, repeated, tag = "1")]
    pub images: Vec<ReplacedImage>,
    /// The machine has run with the copies: they get the images' names. Until then the VM has the images.
    #[prost(bool, tag = "2")]
    pub committed: bool,
    /// The copies are whole, and a machine may run with them.
    #[prost(bool, tag = "3")]
    pub copied: bool,
}

/// An image that is replaced.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ReplacedImage {
    /// Path of its folder, without symbolic links.
    #[prost(bytes = "vec", tag = "1")]
    pub folder: Vec<u8>,
    /// Its name there.
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    /// The copy's.
    #[prost(bytes = "vec", tag = "3")]
    pub new: Vec<u8>,
    /// It is a file of the daemon's own folder.
    #[prost(bool, tag = "4")]
    pub own: bool,
}

/// The state of a migration: [`vm_lifecycle::handover`] says what each means.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HandoverRecord {
    /// How far it is.
    #[prost(enumeration = "HandoverStage", tag = "1")]
    pub stage: i32,
    /// Number of the migration.
    #[prost(uint64, tag = "2")]
    pub migration: u64,
    /// At the source: where the target is (`HOST:PORT`). At the target: name in the source's certificate. Empty when no migration is
    /// under way, and at the target in records of older daemons.
    #[prost(string, tag = "3")]
    pub peer: String,
    /// UUIDs of the disks that migrate with the VM. The side that does not own the VM in the end
    /// removes them.
    #[prost(bytes = "vec", repeated, tag = "4")]
    pub disks: Vec<Vec<u8>>,
    /// When the migration began on this node, in milliseconds of Unix time; 0 when not known.
    #[prost(uint64, tag = "5")]
    pub began_ms: u64,
    /// At the source: id of the migration's operation; empty when not known.
    #[prost(string, tag = "6")]
    pub operation: String,
}

/// A migration that was taken back and whose target has not confirmed that: see [`vm_lifecycle::handover::Aborts`]. Such a record outlives its VM.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct AbortRecord {
    /// UUID of the VM, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub uid: Vec<u8>,
    /// Name that the VM had.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Where the target is (`HOST:PORT`).
    #[prost(string, tag = "3")]
    pub peer: String,
    /// Number of the migration.
    #[prost(uint64, tag = "4")]
    pub migration: u64,
}

impl AbortRecord {
    /// The record's key: one for each VM and target.
    pub fn key(&self) -> Vec<u8> {
        [self.uid.as_slice(), self.peer.as_bytes()].concat()
    }
}

/// States of [`vm_lifecycle::handover::Source`] and [`vm_lifecycle::handover::Target`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum HandoverStage {
    /// `Source::Owner`.
    Owner = 0,
    /// `Source::Owner`, migrating.
    Migrating = 1,
    /// `Source::Given`.
    Given = 2,
    /// `Source::Gone`.
    Gone = 3,
    /// `Target::Idle`.
    Idle = 4,
    /// `Target::Prepared`.
    Prepared = 5,
    /// `Target::Owned`.
    Owned = 6,
}

/// Guest-visible hardware that must never change across runs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hardware {
    /// PCI device number of the entropy device.
    #[prost(uint32, tag = "1")]
    pub rng_slot: u32,
    /// By the disk's name: its PCI device number, or 96 plus the port of the SATA controller.
    #[prost(btree_map = "string, uint32", tag = "2")]
    pub disk_slots: BTreeMap<String, u32>,
    /// By the NIC's name.
    #[prost(btree_map = "string, message", tag = "3")]
    pub nics: BTreeMap<String, NicHardware>,
    /// By the share's name: its PCI device number.
    #[prost(btree_map = "string, uint32", tag = "4")]
    pub share_slots: BTreeMap<String, u32>,
    /// The firmware that was chosen for a VM with FIRMWARE_TYPE_AUTO, a value of the API's
    /// `FirmwareType`; 0 before its first start, and for all other VMs.
    #[prost(int32, tag = "5")]
    pub firmware: i32,
    /// Processor that the guest sees; not there with the model "host".
    #[prost(message, optional, tag = "6")]
    pub processor: Option<ProcessorRecord>,
}

/// Processor of a VM. It stays the same when a later daemon gives the model other features, until the VM's spec is changed.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ProcessorRecord {
    /// As in the spec.
    #[prost(string, tag = "1")]
    pub model: String,
    /// As in the spec, sorted.
    #[prost(string, repeated, tag = "2")]
    pub add: Vec<String>,
    /// As in the spec, sorted.
    #[prost(string, repeated, tag = "3")]
    pub remove: Vec<String>,
    /// All features of the guest, sorted.
    #[prost(string, repeated, tag = "4")]
    pub features: Vec<String>,
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
    /// IPv4 address, as a number, that a guest from another node has in the network of its pod; 0: the start chooses one.
    #[prost(uint32, tag = "3")]
    pub pod_address: u32,
}

/// A file behind a path: what stays the same of it over reboots.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct FileRecord {
    /// Inode number; 0 of a block device, and on file systems that do not keep it.
    #[prost(uint64, tag = "1")]
    pub inode: u64,
    /// When the inode was made, in seconds of Unix time; 0 where the file system does not say.
    #[prost(int64, tag = "2")]
    pub born_s: i64,
    /// Nanoseconds beside that.
    #[prost(uint32, tag = "3")]
    pub born_ns: u32,
    /// It is no file but a device.
    #[prost(bool, tag = "4")]
    pub block_device: bool,
}

/// One run of the VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InstanceRecord {
    /// User id of the `vmm`.
    pub user: u32,
    /// Unix time in milliseconds.
    pub started_ms: u64,
    /// The same in milliseconds since the boot of the node; 0 in what an older daemon has written.
    pub started_since_boot: u64,
    /// Generation of the spec it runs with.
    pub generation: u64,
    /// Boot id of the node's kernel at the start: a run never outlives it.
    pub boot_id: String,
    /// Disks that are being attached: noted before the request to the `vmm`, and removed after its
    /// answer. If the daemon ends in between, the next daemon asks the `vmm`.
    pub attaching: Vec<String>,
    /// Disks that the guest has been asked to eject and has not ejected: when it does, they leave the spec.
    pub ejecting: Vec<String>,
    /// Id of the request that began the run; empty when it had none.
    pub request_id: String,
    /// Id of the operation that began the run; empty in records of daemons without durable
    /// operations.
    pub operation: String,
    /// Spec of the machine: the spec of its start, with the live changes since. Absent in records
    /// of daemons without updates: the VM's spec applies then.
    pub spec: Option<VmSpec>,
    /// The addresses that go with it.
    pub hardware: Option<Hardware>,
    /// The taps that were made for its NICs, by the NICs' names. Those of a run that an older daemon has begun are not there.
    pub taps: BTreeMap<String, String>,
    /// Other processes can map the machine's memory. Runs that an older daemon has begun don't say so.
    pub shared_memory: bool,
    /// The file systems of the guest may be frozen. Noted before the request to freeze them, and removed after they are thawed.
    pub may_be_frozen: bool,
    /// Directory of the run's cgroup, below that of the launcher of the VM's pod; empty where the daemon chooses the cgroup.
    pub cgroup: String,
    /// The startup probe has succeeded in this run.
    pub started: bool,
    /// The guest has notified in this run that it is ready, and not that it stops.
    pub notified: bool,
}

impl VmRecord {
    /// Returns the last requested state.
    pub fn intent(&self) -> Intent {
        Intent::try_from(self.intent).unwrap_or(Intent::Stopped)
    }

    /// How its last run ended, for the run policy: a run that the node has ended did not end as the VM wanted.
    pub fn exit_reason(&self) -> Option<ExitReason> {
        if self.evacuated {
            return Some(ExitReason::NodeRestart);
        }
        self.last_exit.as_ref().map(ExitStatus::reason)
    }
}

/// A stop under way, which the next daemon continues.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StopRecord {
    /// When the guest's time is over, in milliseconds of Unix time.
    #[prost(uint64, tag = "1")]
    pub deadline_ms: u64,
    /// How much time the guest was given, in milliseconds; 0 for a stop by force.
    #[prost(uint64, tag = "2")]
    pub grace_ms: u64,
    /// User id of the requester over the UNIX socket.
    #[prost(uint32, optional, tag = "3")]
    pub user: Option<u32>,
    /// Certificate name of the requester over TCP; empty without one.
    #[prost(string, tag = "4")]
    pub certificate: String,
    /// The run policy wants it.
    #[prost(bool, tag = "5")]
    pub policy: bool,
    /// As the client gave it.
    #[prost(string, tag = "6")]
    pub request_id: String,
}

/// Settings of the node's operator, and observations of the node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeRecord {
    /// As set by UpdateNodeLabels.
    #[prost(btree_map = "string, string", tag = "1")]
    pub labels: BTreeMap<String, String>,
    /// No VM is created or started.
    #[prost(bool, tag = "2")]
    pub cordoned: bool,
    /// Why, for people.
    #[prost(string, tag = "3")]
    pub cordon_reason: String,
    /// A drain is under way: the next daemon reports its early end.
    #[prost(bool, tag = "4")]
    pub draining: bool,
    /// By type.
    #[prost(btree_map = "string, message", tag = "5")]
    pub conditions: BTreeMap<String, ConditionRecord>,
    /// UUID, 16 bytes; made once.
    #[prost(bytes = "vec", tag = "6")]
    pub uid: Vec<u8>,
    /// Counts changes of labels and cordon.
    #[prost(uint64, tag = "7")]
    pub generation: u64,
}

/// Last observed state of a condition.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct ConditionRecord {
    /// Its status.
    #[prost(enumeration = "vmmd_api::v1::ConditionStatus", tag = "1")]
    pub status: i32,
    /// Since when, in milliseconds of Unix time.
    #[prost(uint64, tag = "2")]
    pub since_ms: u64,
}

/// A disk of the DiskService.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DiskRecord {
    /// UUID, 16 bytes; also the record's key, and the name of its file.
    #[prost(bytes = "vec", tag = "1")]
    pub uid: Vec<u8>,
    /// Unique among the node's disks.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "3")]
    pub created_ms: u64,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "4")]
    pub labels: BTreeMap<String, String>,
    /// Raw or qcow2.
    #[prost(enumeration = "vmmd_api::v1::DiskFormat", tag = "5")]
    pub format: i32,
    /// Virtual size in bytes; 0 until it is known.
    #[prost(uint64, tag = "6")]
    pub size_bytes: u64,
    /// As in the request.
    #[prost(enumeration = "vmmd_api::v1::DiskPreallocation", tag = "7")]
    pub preallocation: i32,
    /// UUID of the disk that it is an overlay of; empty when it is none.
    #[prost(bytes = "vec", tag = "8")]
    pub backing: Vec<u8>,
    /// How far its life is.
    #[prost(enumeration = "DiskStage", tag = "9")]
    pub stage: i32,
    /// Counts changes by clients; 0 in what daemons before generations of disks wrote, which is 1.
    #[prost(uint64, tag = "10")]
    pub generation: u64,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "11")]
    pub annotations: BTreeMap<String, String>,
    /// As in the request.
    #[prost(string, tag = "12")]
    pub owner: String,
    /// Run of the daemon that made it; 0 when not known.
    #[prost(uint64, tag = "13")]
    pub made_run: u64,
    /// Revision in that run at its creation.
    #[prost(uint64, tag = "14")]
    pub made_revision: u64,
    /// When it entered its stage, in milliseconds of Unix time; 0 when not known.
    #[prost(uint64, tag = "15")]
    pub stage_ms: u64,
    /// Where its first content came from; not there for zeroes, or when not known.
    #[prost(message, optional, tag = "16")]
    pub source: Option<DiskSource>,
    /// Name of the VM whose restore creates the disk; empty once this VM exists, and for all other
    /// disks.
    #[prost(string, tag = "17")]
    pub for_vm: String,
    /// UUID of the image that it, or the disk at the bottom of its chain, is an overlay of; empty when it is of none.
    #[prost(bytes = "vec", tag = "30")]
    pub image: Vec<u8>,
    /// Digest of that image.
    #[prost(bytes = "vec", tag = "32")]
    pub image_digest: Vec<u8>,
    /// Length of the logical blocks that its first content was made for, in bytes; 0 when not known.
    #[prost(uint32, tag = "33")]
    pub logical_block: u32,
    /// UUID of the VM that it was made for and goes with; empty when it stays.
    #[prost(bytes = "vec", tag = "31")]
    pub goes_with: Vec<u8>,
    /// As of a VM.
    #[prost(message, repeated, tag = "20")]
    pub begun: Vec<RequestMark>,
}

impl DiskRecord {
    /// The image that it was made of, if it was.
    pub fn made_of(&self) -> Option<DiskImage> {
        match self.source.as_ref()?.source.as_ref()? {
            disk_source::Source::Image(image) => Some(Clone::clone(image)),
            _ => None,
        }
    }
}

/// Where the first content of a disk came from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DiskSource {
    /// As in the request.
    #[prost(oneof = "disk_source::Source", tags = "1, 2, 3, 5")]
    pub source: Option<disk_source::Source>,
    /// As in the request.
    #[prost(bool, tag = "4")]
    pub any_content: bool,
}

/// The image that a disk was made of.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct DiskImage {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// As in the request.
    #[prost(enumeration = "vmmd_api::v1::DiskClone", tag = "2")]
    pub clone: i32,
}

/// An image of the ImageService.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageRecord {
    /// UUID, 16 bytes; also the record's key.
    #[prost(bytes = "vec", tag = "1")]
    pub uid: Vec<u8>,
    /// Unique among the node's images.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Unix time in milliseconds.
    #[prost(uint64, tag = "3")]
    pub created_ms: u64,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "4")]
    pub labels: BTreeMap<String, String>,
    /// As in the request.
    #[prost(btree_map = "string, string", tag = "5")]
    pub annotations: BTreeMap<String, String>,
    /// As in the request.
    #[prost(string, tag = "6")]
    pub owner: String,
    /// Counts changes by clients.
    #[prost(uint64, tag = "7")]
    pub generation: u64,
    /// Not there for an upload.
    #[prost(message, optional, tag = "8")]
    pub source: Option<ImageSource>,
    /// SHA-256 that the file is to have; empty when any.
    #[prost(bytes = "vec", tag = "9")]
    pub checksum: Vec<u8>,
    /// Most bytes of the file, and of the disk in it.
    #[prost(uint64, tag = "10")]
    pub max_size: u64,
    /// How far its life is.
    #[prost(enumeration = "ImageStage", tag = "11")]
    pub stage: i32,
    /// When it entered its stage, in milliseconds of Unix time.
    #[prost(uint64, tag = "12")]
    pub stage_ms: u64,
    /// Which version of the file is being downloaded. Not there when a download cannot be resumed. (Tag 13 had a part of it.)
    #[prost(message, optional, tag = "25")]
    pub source_version: Option<SourceVersion>,
    /// Names the content; empty until it is known.
    #[prost(bytes = "vec", tag = "14")]
    pub digest: Vec<u8>,
    /// Virtual size in bytes; 0 until it is known.
    #[prost(uint64, tag = "15")]
    pub size_bytes: u64,
    /// Format of the source file.
    #[prost(string, tag = "16")]
    pub source_format: String,
    /// How it was compressed.
    #[prost(string, tag = "17")]
    pub source_compression: String,
    /// How long it was.
    #[prost(uint64, tag = "18")]
    pub source_bytes: u64,
    /// SHA-256 of it; empty when not known.
    #[prost(bytes = "vec", tag = "19")]
    pub source_checksum: Vec<u8>,
    /// When a disk was last made of it, in milliseconds of Unix time.
    #[prost(uint64, tag = "20")]
    pub used_ms: u64,
    /// Run of the daemon that made it.
    #[prost(uint64, tag = "21")]
    pub made_run: u64,
    /// Revision in that run at its creation.
    #[prost(uint64, tag = "22")]
    pub made_revision: u64,
    /// SHA-256 of the manifest that the reference of an OCI image meant; empty until it is known.
    #[prost(bytes = "vec", tag = "23")]
    pub source_manifest: Vec<u8>,
    /// [`RegistryCredentials`], sealed; empty when there are none, and when the import has ended.
    #[prost(bytes = "vec", tag = "24")]
    pub sealed_credentials: Vec<u8>,
    /// An agent of a cluster asked for it, for a tenant.
    #[prost(bool, tag = "26")]
    pub for_tenant: bool,
    /// Length of the logical blocks that the disk was made for, in bytes; 0 for 512.
    #[prost(uint32, tag = "27")]
    pub logical_block: u32,
    /// As of a VM.
    #[prost(message, repeated, tag = "30")]
    pub begun: Vec<RequestMark>,
}

/// Validators and length of a file on a server (RFC 9110, 8.8).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SourceVersion {
    /// The strong ETag; empty when there is none.
    #[prost(string, tag = "1")]
    pub etag: String,
    /// The value of `Last-Modified`; empty when there is none.
    #[prost(string, tag = "2")]
    pub modified: String,
    /// Length of the file in bytes; 0 when the server does not say.
    #[prost(uint64, tag = "3")]
    pub length: u64,
}

/// Credentials of the daemon for a registry of images. Only written sealed.
#[derive(Clone, PartialEq, Eq, prost::Message)]
#[prost(skip_debug)]
pub struct RegistryCredentials {
    /// Name of a user.
    #[prost(string, tag = "1")]
    pub username: String,
    /// Password or token.
    #[prost(string, tag = "2")]
    pub password: String,
}

impl fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegistryCredentials")
    }
}

/// Where an image comes from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageSource {
    /// As in the request.
    #[prost(oneof = "image_source::Source", tags = "1, 2, 3, 4")]
    pub source: Option<image_source::Source>,
}

/// Of [`ImageSource`].
pub mod image_source {
    /// As in the request.
    #[derive(Clone, PartialEq, Eq, prost::Oneof)]
    pub enum Source {
        /// Of the web; with what stands after a "?", which is not shown.
        #[prost(string, tag = "1")]
        Url(String),
        /// A file of the node.
        #[prost(string, tag = "2")]
        Path(String),
        /// In a registry.
        #[prost(message, tag = "3")]
        Oci(super::OciSource),
        /// In a folder of the node.
        #[prost(message, tag = "4")]
        OciLayout(super::OciLayoutSource),
    }
}

/// An OCI image in a registry.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct OciSource {
    /// As in the request, with the tag that is meant when there is none.
    #[prost(string, tag = "1")]
    pub reference: String,
    /// As in the request; the node's when empty.
    #[prost(string, tag = "2")]
    pub platform: String,
    /// As in the request.
    #[prost(bool, tag = "3")]
    pub plain_http: bool,
}

/// An OCI image in a folder.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct OciLayoutSource {
    /// The folder.
    #[prost(string, tag = "1")]
    pub path: String,
    /// As in the request.
    #[prost(string, tag = "2")]
    pub reference: String,
    /// As in the request; the node's when empty.
    #[prost(string, tag = "3")]
    pub platform: String,
}

/// How far the life of an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum ImageStage {
    /// It is being imported. The next daemon continues the import, except an upload, because its
    /// client is gone.
    Importing = 0,
    /// It is whole.
    Ready = 1,
    /// It is being removed.
    Deleting = 2,
}

/// Of [`DiskSource`].
pub mod disk_source {
    /// As in the request.
    #[derive(Clone, PartialEq, Eq, prost::Oneof)]
    pub enum Source {
        /// A file of the node.
        #[prost(string, tag = "1")]
        RawFile(String),
        /// Another disk.
        #[prost(string, tag = "2")]
        OverlayOf(String),
        /// A file of the daemon's folder.
        #[prost(string, tag = "3")]
        Adopt(String),
        /// An image.
        #[prost(message, tag = "5")]
        Image(super::DiskImage),
    }
}

/// Life-cycle stage of a disk. The next daemon removes a record in a stage other than `Ready` with
/// its file: clients never saw the disk as existing, or saw it as deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum DiskStage {
    /// Its file is being made.
    Creating = 0,
    /// It is whole.
    Ready = 1,
    /// Its file is being removed.
    Deleting = 2,
}
