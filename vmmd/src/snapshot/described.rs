//! Description of a snapshot in an archive: the first part of the [container](super::archive), a
//! protobuf message.
//!
//! Another node may have created it, or any program that can write a file: it is accepted only
//! within the limits of the API. The module reads no state of this node.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_spec::{
    Violations,
    disk::MAX_SIZE,
    metadata::Metadata,
    name::Name,
    nic::Mac,
    pci::{self, PciSlot},
    vm::VmSpec,
};
use vmmd_store::{Hardware, SnapshotDisk, SnapshotRecord, SnapshotStage};

use crate::vm::refuse_digests;

/// Longest `consistency_message` in bytes.
const MESSAGE: usize = 1024;

/// A snapshot, apart from its files.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Described {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(btree_map = "string, string", tag = "2")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "3")]
    annotations: BTreeMap<String, String>,
    #[prost(string, tag = "4")]
    owner: String,
    #[prost(string, tag = "5")]
    vm_name: String,
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "6")]
    vm_uid: Vec<u8>,
    /// With its secrets.
    #[prost(message, optional, tag = "7")]
    vm_spec: Option<v1::VmSpec>,
    #[prost(message, optional, tag = "8")]
    vm_hardware: Option<Hardware>,
    /// In the order of the archive's files, of which the first is the memory.
    #[prost(message, repeated, tag = "9")]
    disks: Vec<Disk>,
    /// In milliseconds of Unix time.
    #[prost(uint64, tag = "10")]
    completed_ms: u64,
    #[prost(uint64, tag = "11")]
    written_bytes: u64,
    #[prost(uint64, tag = "12")]
    pause_ns: u64,
    /// About how much room the files take, in bytes.
    #[prost(uint64, tag = "13")]
    allocated_bytes: u64,
    /// 0 for a snapshot with the machine. Archives older than this field all have the machine.
    #[prost(enumeration = "v1::SnapshotKind", tag = "14")]
    kind: i32,
    /// AGENT, or 0 for CRASH, which is what older archives have.
    #[prost(enumeration = "v1::SnapshotConsistency", tag = "15")]
    consistency: i32,
    #[prost(string, tag = "16")]
    consistency_message: String,
}

/// A disk of the snapshot.
#[derive(Clone, PartialEq, prost::Message)]
struct Disk {
    /// Its name in the VM.
    #[prost(string, tag = "1")]
    name: String,
    #[prost(enumeration = "v1::DiskFormat", tag = "2")]
    format: i32,
    /// As of [`SnapshotDisk`].
    #[prost(uint64, tag = "3")]
    capacity_bytes: u64,
    /// Digest of the image below an overlay; empty for other disks.
    #[prost(bytes = "vec", tag = "4")]
    image_digest: Vec<u8>,
}

impl Described {
    /// Describes a snapshot whose files have this allocated size. Refused when a disk is an overlay
    /// of another disk.
    pub fn of(record: &SnapshotRecord, allocated_bytes: u64) -> Result<Self, Failure> {
        if let Some(disk) = record.disks.iter().find(|disk| !disk.backing.is_empty()) {
            let message = format!(
                "disk \"{}\" of snapshot \"{}\" is an overlay of another disk, which an archive does not have",
                disk.name, record.name
            );
            return Err(Failure::precondition("SNAPSHOT_OVERLAY", message));
        }
        let disks = record.disks.iter().map(|disk| Disk {
            name: disk.name.clone(),
            format: disk.format,
            capacity_bytes: disk.capacity_bytes,
            image_digest: disk.image_digest.clone(),
        });
        Ok(Self {
            name: record.name.clone(),
            labels: record.labels.clone(),
            annotations: record.annotations.clone(),
            owner: record.owner.clone(),
            vm_name: record.vm_name.clone(),
            vm_uid: record.vm_uid.clone(),
            vm_spec: record.vm_spec.clone(),
            vm_hardware: record.vm_hardware.clone(),
            disks: disks.collect(),
            completed_ms: record.completed_ms,
            written_bytes: record.written_bytes,
            pause_ns: record.pause_ns,
            allocated_bytes,
            kind: match record.has_machine() {
                true => v1::SnapshotKind::Unspecified.into(),
                false => v1::SnapshotKind::Disks.into(),
            },
            consistency: match record.consistency == i32::from(v1::SnapshotConsistency::Agent) {
                true => record.consistency,
                false => 0,
            },
            consistency_message: record.consistency_message.clone(),
        })
    }

    /// Parses the description of an archive. Fields unknown to this vmmd are refused, since they
    /// would be lost.
    pub fn read(bytes: &[u8]) -> Result<Self, Failure> {
        let read = Self::decode(bytes).map_err(|error| refuse(format_args!("can't be read: {error}")))?;
        match read.encode_to_vec() == bytes {
            true => Ok(read),
            false => Err(refuse(
                "has fields that this vmmd does not know: it was made by a newer one",
            )),
        }
    }

    /// About how much room the files take, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    /// The record of a new snapshot with this name, or that of the archive when it is empty; nothing of it is made yet.
    pub fn record(self, name: &str) -> Result<SnapshotRecord, Failure> {
        if !name.is_empty()
            && let Err(error) = Name::try_from(name)
        {
            let problem = format_args!("{error}, is \"{}\"", text::brief(name));
            return Err(Failure::field("open.name", problem));
        }
        let mut found = Violations::default();
        let wire = v1::ObjectMetadata {
            name: match name {
                "" => self.name,
                name => name.to_owned(),
            },
            labels: self.labels,
            annotations: self.annotations,
            owner: self.owner,
            ..Default::default()
        };
        let metadata = Metadata::new(&mut found, "archive", &wire);
        let metadata = match metadata {
            Some(metadata) => found.or(metadata)?,
            None => return Err(found.into()),
        };
        if let Err(error) = Name::try_from(self.vm_name.as_str()) {
            let problem = format!("names a VM, and {error}, is \"{}\"", text::brief(&self.vm_name));
            return Err(refuse(problem));
        }
        if Uuid::from_slice(&self.vm_uid).is_ok_and(|uid| uid.is_nil()) || self.vm_uid.len() != 16 {
            return Err(refuse("has no UUID of the VM"));
        }
        let kind = match v1::SnapshotKind::try_from(self.kind) {
            Ok(v1::SnapshotKind::Unspecified) => v1::SnapshotKind::Full,
            Ok(v1::SnapshotKind::Disks) => v1::SnapshotKind::Disks,
            _ => return Err(refuse("is of a kind that this vmmd does not know")),
        };
        let consistency = match v1::SnapshotConsistency::try_from(self.consistency) {
            Ok(v1::SnapshotConsistency::Unspecified) => v1::SnapshotConsistency::Crash,
            Ok(v1::SnapshotConsistency::Agent) => v1::SnapshotConsistency::Agent,
            _ => return Err(refuse("has a consistency that this vmmd does not know")),
        };
        let mut spec = self.vm_spec.unwrap_or_default();
        refuse_digests(&mut spec)?;
        let model = VmSpec::try_from(&spec)?;
        let hardware = self.vm_hardware.unwrap_or_default();
        check_hardware(&model, &hardware)?;
        let written = model.disks.iter().filter(|disk| !disk.read_only);
        if !written
            .map(|disk| disk.name.as_str())
            .eq(self.disks.iter().map(|disk| disk.name.as_str()))
        {
            return Err(refuse("has other disks than those that the VM writes to"));
        }
        if kind == v1::SnapshotKind::Disks && self.disks.is_empty() {
            return Err(refuse("has neither memory nor disks"));
        }
        let disks = self.disks.into_iter().map(Disk::checked);
        Ok(SnapshotRecord {
            uid: Uuid::new_v4().as_bytes().to_vec(),
            name: metadata.name.to_string(),
            created_ms: text::now_ms(),
            labels: metadata.labels,
            annotations: metadata.annotations,
            owner: metadata.owner,
            stage: SnapshotStage::Partial.into(),
            completed_ms: self.completed_ms,
            written_bytes: self.written_bytes,
            pause_ns: self.pause_ns,
            vm_name: self.vm_name,
            vm_uid: self.vm_uid,
            vm_spec: Some(spec),
            vm_hardware: Some(hardware),
            disks: disks.collect::<Result<_, _>>()?,
            kind: kind.into(),
            consistency: consistency.into(),
            consistency_message: text::one_line(&self.consistency_message, MESSAGE),
            ..SnapshotRecord::default()
        })
    }
}

impl Disk {
    fn checked(self) -> Result<SnapshotDisk, Failure> {
        let known = matches!(
            v1::DiskFormat::try_from(self.format),
            Ok(v1::DiskFormat::Raw | v1::DiskFormat::Qcow2)
        );
        if !known {
            return Err(refuse(format_args!("has no format of disk \"{}\"", self.name)));
        }
        if self.capacity_bytes > MAX_SIZE {
            let problem = format_args!("says that disk \"{}\" is larger than a disk can be", self.name);
            return Err(refuse(problem));
        }
        if !matches!(self.image_digest.len(), 0 | 32) {
            let problem = format_args!("has no digest of the image below disk \"{}\"", self.name);
            return Err(refuse(problem));
        }
        Ok(SnapshotDisk {
            name: self.name,
            format: self.format,
            capacity_bytes: self.capacity_bytes,
            image_digest: self.image_digest,
            ..SnapshotDisk::default()
        })
    }
}

/// Each device of the spec has a slot, and none has that of another one; each NIC has a MAC address.
fn check_hardware(spec: &VmSpec, hardware: &Hardware) -> Result<(), Failure> {
    let disks = hardware.disk_slots.values();
    let disks = disks.map(|slot| (*slot, pci::is_disk_address(*slot)));
    let nics = hardware.nics.values().map(|nic| nic.slot);
    let shares = hardware.share_slots.values().copied();
    let others = nics.chain(shares).chain([hardware.rng_slot]);
    let others = others.map(|slot| (slot, PciSlot::try_from(slot).is_ok()));
    let mut taken = BTreeSet::new();
    for (number, is_address) in disks.chain(others) {
        if !is_address || !taken.insert(number) {
            return Err(refuse(format_args!("has no PCI slot {number}, or has it twice")));
        }
    }
    let missing = |what: &str, name: &Name| Err(refuse(format_args!("has no address of {what} \"{name}\"")));
    if let Some(disk) = spec.disks.iter().find(|disk| {
        let slot = hardware.disk_slots.get(disk.name.as_str());
        slot.is_none_or(|slot| !disk.bus.has(*slot))
    }) {
        return missing("disk", &disk.name);
    }
    for nic in &spec.nics {
        let mac = hardware.nics.get(nic.name.as_str()).map(|nic| nic.mac.as_slice());
        let mac = mac.and_then(|mac| <[u8; 6]>::try_from(mac).ok());
        if mac.is_none_or(|mac| Mac::try_from(mac).is_err()) {
            return missing("NIC", &nic.name);
        }
    }
    match spec
        .shares
        .iter()
        .find(|share| !hardware.share_slots.contains_key(share.name.as_str()))
    {
        Some(share) => missing("share", &share.name),
        None => Ok(()),
    }
}

/// An archive whose record is not one.
fn refuse(problem: impl std::fmt::Display) -> Failure {
    let message = format!("the archive's record {problem}");
    Failure::new(Kind::Invalid, "ARCHIVE_INVALID", message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn described() -> Described {
        let linux = v1::LinuxBoot {
            kernel: "/boot/kernel".into(),
            ..Default::default()
        };
        let disk = |name: &str, read_only| v1::DiskSpec {
            name: name.into(),
            source: Some(v1::disk_spec::Source::Path(format!("/srv/{name}.raw"))),
            format: v1::DiskFormat::Raw.into(),
            read_only,
            ..Default::default()
        };
        let spec = v1::VmSpec {
            cpu: Some(v1::CpuSpec {
                cores: 1,
                ..Default::default()
            }),
            memory: Some(v1::MemorySpec {
                size_bytes: 128 << 20,
                ..Default::default()
            }),
            boot: Some(v1::BootSpec {
                source: Some(v1::boot_spec::Source::Linux(linux)),
            }),
            disks: vec![disk("root", false), disk("tools", true)],
            ..Default::default()
        };
        Described {
            name: "one".into(),
            labels: BTreeMap::from([("tier".into(), "web".into())]),
            vm_name: "web".into(),
            vm_uid: vec![1; 16],
            vm_spec: Some(spec),
            vm_hardware: Some(Hardware {
                rng_slot: 4,
                disk_slots: BTreeMap::from([("root".into(), 5), ("tools".into(), 6)]),
                ..Hardware::default()
            }),
            disks: vec![Disk {
                name: "root".into(),
                format: v1::DiskFormat::Raw.into(),
                capacity_bytes: 4096,
                image_digest: Vec::new(),
            }],
            completed_ms: 1_700_000_000_000,
            allocated_bytes: 8192,
            ..Described::default()
        }
    }

    #[test]
    fn what_was_described_is_the_record_of_a_new_snapshot() {
        let before = described();
        let read = Described::read(&before.encode_to_vec()).unwrap();
        assert_eq!(read, before);
        let record = read.record("").unwrap();
        assert_eq!(
            (record.name.as_str(), record.stage()),
            ("one", SnapshotStage::Partial)
        );
        assert_eq!(record.disks[0].name, "root");
        assert_eq!(Described::of(&record, 8192).unwrap(), before);
        assert_eq!(before.record("two").unwrap().name, "two");
    }

    #[test]
    fn an_overlay_of_another_disk_is_not_described() {
        let mut record = described().record("").unwrap();
        record.disks[0].backing = vec![1; 16];
        let refused = Described::of(&record, 0).unwrap_err();
        assert_eq!(refused.reason, "SNAPSHOT_OVERLAY");
    }

    #[test]
    fn what_no_request_could_say_is_refused() {
        type Change = fn(&mut Described);
        let changes: [(&str, Change); 16] = [
            ("INVALID_FIELDS", |it| it.name = "No Name".into()),
            ("INVALID_FIELDS", |it| {
                drop(it.labels.insert(String::new(), String::new()));
            }),
            ("INVALID_FIELDS", |it| it.owner = "\n".into()),
            ("INVALID_FIELDS", |it| it.vm_spec = None),
            ("INVALID_FIELDS", |it| {
                it.vm_spec.as_mut().unwrap().cpu.as_mut().unwrap().cores = 100_000;
            }),
            ("INVALID_FIELDS", |it| {
                it.vm_spec.as_mut().unwrap().cloud_init = Some(v1::CloudInit {
                    user_data_digest: "sha256:00".into(),
                    ..Default::default()
                });
            }),
            ("ARCHIVE_INVALID", |it| it.vm_name = "../web".into()),
            ("ARCHIVE_INVALID", |it| it.vm_uid.truncate(15)),
            ("ARCHIVE_INVALID", |it| it.vm_hardware = None),
            ("ARCHIVE_INVALID", |it| {
                it.vm_hardware.as_mut().unwrap().rng_slot = 5;
            }),
            ("ARCHIVE_INVALID", |it| {
                it.vm_hardware.as_mut().unwrap().rng_slot = 500;
            }),
            ("ARCHIVE_INVALID", |it| it.disks.clear()),
            ("ARCHIVE_INVALID", |it| it.disks[0].name = "tools".into()),
            ("ARCHIVE_INVALID", |it| it.disks[0].format = 77),
            ("ARCHIVE_INVALID", |it| it.disks[0].capacity_bytes = u64::MAX),
            ("ARCHIVE_INVALID", |it| it.disks[0].image_digest = vec![1; 31]),
        ];
        for (number, (reason, change)) in changes.into_iter().enumerate() {
            let mut changed = described();
            change(&mut changed);
            let refused = changed.record("").unwrap_err();
            assert_eq!(
                (refused.reason, refused.kind),
                (reason, Kind::Invalid),
                "{number}: {refused}"
            );
        }
    }

    #[test]
    fn what_this_vmmd_does_not_know_is_refused() {
        let whole = described().encode_to_vec();
        for more in [[0xf8, 0x3f, 1].as_slice(), &[0x6a, 1], &[0x0a, 1, b'x']] {
            let refused = Described::read(&[&whole, more].concat()).unwrap_err();
            assert_eq!(refused.reason, "ARCHIVE_INVALID");
        }
    }

    proptest! {
        #[test]
        fn any_record_is_read_and_checked_without_a_panic(
            changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
            more in prop::collection::vec(any::<u8>(), 0..10),
            length in 0_usize..400,
        ) {
            let mut bytes = described().encode_to_vec();
            bytes.truncate(length.max(1));
            for (place, value) in changes {
                let place = place % bytes.len();
                bytes[place] = value;
            }
            bytes.extend(more);
            if let Ok(read) = Described::read(&bytes) {
                prop_assert_eq!(read.encode_to_vec(), bytes);
                let _ = read.record("");
            }
        }
    }
}
