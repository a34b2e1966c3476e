//! Description of a migrating disk from the other daemon, with the checks that need no state of the
//! node.

use std::collections::BTreeMap;

use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{failure::Failure, text};
use vmmd_spec::{
    disk::{Disk, NewDisk, Preallocation, Source},
    name::Name,
};

/// A disk that comes, checked as far as that needs nothing of the node.
#[derive(Clone, Debug)]
pub struct Coming {
    /// Its UUID at the source, and here.
    pub(super) uid: Uuid,
    /// Specification of the disk to create.
    pub(super) new: NewDisk,
    size: u64,
    /// About how much it takes, in bytes.
    allocated: u64,
    /// As of the source's record; 0 when not known.
    pub(super) logical_block: u32,
}

impl Coming {
    /// Checks the source's description of a disk.
    pub fn new(wire: &v1::PeerDisk) -> Result<Self, Failure> {
        let uid = Uuid::parse_str(&wire.uid).map_err(|_| Failure::field("disks.uid", "must be a UUID"))?;
        let request = v1::CreateDiskRequest {
            disk: Some(v1::Disk {
                metadata: Some(v1::ObjectMetadata {
                    name: wire.name.clone(),
                    labels: wire.labels.clone(),
                    annotations: wire.annotations.clone(),
                    owner: wire.owner.clone(),
                    ..Default::default()
                }),
                spec: Some(v1::VolumeSpec {
                    format: wire.format,
                    size_bytes: wire.size_bytes,
                    preallocation: wire.preallocation,
                    ..Default::default()
                }),
                status: None,
            }),
            ..Default::default()
        };
        let new = NewDisk::try_from(&request)?;
        if !matches!(wire.logical_block_bytes, 0 | 512 | 4096) {
            return Err(Failure::field(
                "disks.logicalBlockBytes",
                "must be 512 or 4096, or 0 when not known",
            ));
        }
        Ok(Self {
            uid,
            new,
            size: wire.size_bytes,
            allocated: wire.allocated_bytes.min(wire.size_bytes),
            logical_block: wire.logical_block_bytes,
        })
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        self.new.name.as_ref().map_or("", Name::as_str)
    }

    /// Required free space in bytes.
    pub(super) fn needs(&self) -> u64 {
        match self.new.preallocation {
            Preallocation::Full => self.size,
            Preallocation::Off | Preallocation::Metadata => self.allocated,
        }
    }
}

/// The disks that migrate with a VM, as pairs: name in the VM, name on the node.
pub fn along(disks: &[Disk]) -> impl Iterator<Item = (&str, &str)> {
    let written = disks.iter().filter(|disk| !disk.read_only);
    written.filter_map(|disk| match &disk.source {
        Source::Disk { name, .. } => Some((disk.name.as_str(), name.as_str())),
        Source::Path { .. } | Source::Pod { .. } | Source::Seed | Source::Empty => None,
    })
}

/// The disks of the message by name. The message must have each migrating disk exactly once, and no
/// other disk.
pub fn check(disks: &[Disk], wire: &[v1::PeerDisk]) -> Result<Vec<Coming>, Failure> {
    let mut given = BTreeMap::new();
    for disk in wire {
        if given.insert(disk.name.as_str(), disk).is_some() {
            return Err(Failure::field("disks", "one has the name of another"));
        }
    }
    let coming: Vec<_> = along(disks)
        .map(|(_, name)| match given.remove(name) {
            Some(disk) => Coming::new(disk),
            None => {
                let message =
                    format!("the guest can write to disk \"{name}\", which the source does not send");
                Err(Failure::precondition("MIGRATION_DISKS", message))
            }
        })
        .collect::<Result<_, _>>()?;
    match given.keys().next() {
        Some(name) => {
            let message = format!(
                "\"{}\" is no disk of the VM that goes along",
                text::one_line(name, 100)
            );
            Err(Failure::field("disks", message))
        }
        None => Ok(coming),
    }
}
