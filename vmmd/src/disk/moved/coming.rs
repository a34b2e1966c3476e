//! What the other daemon says of disks that come with a VM, checked as far as that needs nothing of the node.

use std::collections::BTreeMap;

use proto::{
    model::{
        disk::{Disk, NewDisk, Preallocation, Source},
        name::Name,
    },
    v1,
};
use uuid::Uuid;
use vmmd_host::{failure::Failure, text};

/// A disk that comes, checked as far as that needs nothing of the node.
#[derive(Clone, Debug)]
pub struct Coming {
    /// Its UUID at the source, and here.
    pub(super) uid: Uuid,
    /// What is to be made.
    pub(super) new: NewDisk,
    size: u64,
    /// About how much it takes, in bytes.
    allocated: u64,
}

impl Coming {
    /// Checks what the source says of a disk.
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
        Ok(Self {
            uid,
            new,
            size: wire.size_bytes,
            allocated: wire.allocated_bytes.min(wire.size_bytes),
        })
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        self.new.name.as_ref().map_or("", Name::as_str)
    }

    /// What is to be free for it.
    pub(super) fn needs(&self) -> u64 {
        match self.new.preallocation {
            Preallocation::Full => self.size,
            Preallocation::Off | Preallocation::Metadata => self.allocated,
        }
    }
}

/// The disks that go along with a VM, of those that it has: what each is called in the VM, and on the node.
pub fn along(disks: &[Disk]) -> impl Iterator<Item = (&str, &str)> {
    let written = disks.iter().filter(|disk| !disk.read_only);
    written.filter_map(|disk| match &disk.source {
        Source::Disk { name, .. } => Some((disk.name.as_str(), name.as_str())),
        Source::Path { .. } | Source::Seed => None,
    })
}

/// The disks of the wire by name; each disk that goes along is there once, and no other.
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
