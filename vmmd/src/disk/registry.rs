//! All disks of the node by name, with who uses them. What depends on both is decided under one lock.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use proto::{
    model::disk::{Disk, Format, Source},
    v1,
};
use uuid::Uuid;

use super::file::{Folder, backing_limit, format};
use crate::{
    failure::{Failure, Kind},
    store::{DiskRecord, DiskStage},
    text,
};

/// The disks.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    disks: BTreeMap<String, DiskRecord>,
    /// By the disk's name; one entry per disk of a VM.
    uses: BTreeMap<String, Vec<Use>>,
}

/// A VM's spec names a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The VM.
    pub vm: String,
    /// What the disk is called there.
    pub disk: String,
    /// The VM's guest can write to it.
    pub writes: bool,
}

/// Where the content of a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Its file.
    pub path: PathBuf,
    /// How that is to be read.
    pub format: Format,
    /// What is below it, the nearest first.
    pub backing: Vec<(PathBuf, Format)>,
    /// What its guest sees, in bytes; 0 when not known.
    pub size: u64,
}

impl Registry {
    /// A disk that is whole.
    pub fn get(&self, name: &str) -> Result<DiskRecord, Failure> {
        self.inner().ready(name).cloned()
    }

    /// All disks that are whole, by name.
    pub fn list(&self) -> Vec<DiskRecord> {
        let inner = self.inner();
        let ready = inner
            .disks
            .values()
            .filter(|disk| disk.stage() == DiskStage::Ready);
        ready.cloned().collect()
    }

    /// Takes the name of a disk that is to be made, as an overlay of `below` if that is given; returns the record with
    /// what it has from there.
    pub fn reserve(&self, mut record: DiskRecord, below: Option<&str>) -> Result<DiskRecord, Failure> {
        let mut inner = self.inner();
        if inner.disks.contains_key(&record.name) {
            let message = format!("there is a disk \"{}\" already", record.name);
            return Err(Failure::new(Kind::Exists, "DISK_EXISTS", message));
        }
        if let Some(below) = below {
            let base = inner.ready(below)?.clone();
            let writers = inner.users(below, |user| user.writes);
            if !writers.is_empty() {
                let message = format!(
                    "disk \"{below}\" can be written to by {writers}: an overlay needs a disk that does not change; detach \
                     it there, or attach it read-only"
                );
                return Err(Failure::precondition("DISK_IN_USE", message));
            }
            if inner.chain(&base)?.len() >= backing_limit() {
                let message = format!(
                    "disk \"{below}\" is an overlay on {} others already, which is the most that there can be",
                    backing_limit()
                );
                return Err(Failure::precondition("TOO_MANY_OVERLAYS", message));
            }
            if record.size_bytes == 0 {
                record.size_bytes = base.size_bytes;
            } else if record.size_bytes < base.size_bytes {
                let problem = format_args!(
                    "is {}, less than the {} of disk \"{below}\"",
                    record.size_bytes, base.size_bytes
                );
                return Err(Failure::field("disk.sizeBytes", problem));
            }
            record.backing = base.uid;
        }
        record.stage = DiskStage::Creating.into();
        inner.disks.insert(record.name.clone(), record.clone());
        Ok(record)
    }

    /// Notes what a disk is now.
    pub fn settle(&self, record: DiskRecord) {
        self.inner().disks.insert(record.name.clone(), record);
    }

    /// Notes that a disk is gone.
    pub fn forget(&self, name: &str) {
        self.inner().disks.remove(name);
    }

    /// Takes a disk out of use for good, or says who uses it.
    pub fn begin_delete(&self, name: &str) -> Result<DiskRecord, Failure> {
        let mut inner = self.inner();
        let record = inner.ready(name)?.clone();
        let users = inner.users(name, |_| true);
        if !users.is_empty() {
            let message = format!("disk \"{name}\" is in the spec of {users}: detach it there first");
            return Err(Failure::precondition("DISK_IN_USE", message));
        }
        let overlays = inner.overlays(&record);
        if !overlays.is_empty() {
            let message = format!("disk \"{name}\" has overlays ({overlays}): delete those first");
            return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
        }
        if let Some(disk) = inner.disks.get_mut(name) {
            disk.stage = DiskStage::Deleting.into();
        }
        Ok(record)
    }

    /// Fills in the format of a disk that a spec names and leaves the format out. One that is not there is left as it is.
    pub fn fill_format(&self, spec: &mut v1::DiskSpec) {
        if spec.format() == v1::DiskFormat::Unspecified
            && spec.path().is_empty()
            && let Ok(record) = self.inner().ready(spec.disk())
        {
            spec.format = record.format;
        }
    }

    /// Notes that a VM names these disks; all or none of them. `field` gives the path of the nth in the request.
    pub fn take(&self, vm: &str, disks: &[Disk], field: impl Fn(usize) -> String) -> Result<(), Failure> {
        let mut inner = self.inner();
        let mut taken = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let Some(name) = disk.named() else {
                continue;
            };
            inner.usable(disk, &field(index))?;
            let user = Use {
                vm: vm.to_owned(),
                disk: disk.name.to_string(),
                writes: !disk.read_only,
            };
            taken.push((name.to_string(), user));
        }
        for (name, user) in taken {
            inner.uses.entry(name).or_default().push(user);
        }
        Ok(())
    }

    /// Bytes that all disks take when they are full.
    pub fn promised(&self) -> u64 {
        let inner = self.inner();
        inner
            .disks
            .values()
            .fold(0, |sum, disk| sum.saturating_add(disk.size_bytes))
    }

    /// Which of these disks [`Registry::take`] would refuse, by their numbers, and why. `field` as there.
    pub fn refusals(&self, disks: &[Disk], field: impl Fn(usize) -> String) -> Vec<(usize, Failure)> {
        let inner = self.inner();
        let numbered = disks.iter().enumerate();
        let refused =
            numbered.filter_map(|(index, disk)| Some((index, inner.usable(disk, &field(index)).err()?)));
        refused.collect()
    }

    /// Notes that these disks are all that a VM has, in its spec or in its machine.
    pub fn hold<'a>(&self, vm: &str, disks: impl IntoIterator<Item = &'a v1::DiskSpec>) {
        let mut inner = self.inner();
        for uses in inner.uses.values_mut() {
            uses.retain(|user| user.vm != vm);
        }
        for disk in disks.into_iter().filter(|disk| !disk.disk().is_empty()) {
            let user = Use {
                vm: vm.to_owned(),
                disk: disk.name.clone(),
                writes: !disk.read_only,
            };
            let uses = inner.uses.entry(disk.disk().to_owned()).or_default();
            if !uses.contains(&user) {
                uses.push(user);
            }
        }
    }

    /// Notes that a VM names a disk no more, or with `None` none at all.
    pub fn give_back(&self, vm: &str, disk: Option<&str>) {
        for uses in self.inner().uses.values_mut() {
            uses.retain(|user| user.vm != vm || disk.is_some_and(|disk| user.disk != disk));
        }
    }

    /// Who names a disk.
    pub fn uses(&self, name: &str) -> Vec<Use> {
        self.inner().uses.get(name).cloned().unwrap_or_default()
    }

    /// The names of a disk's overlays, for a message; empty when there are none.
    pub fn overlays(&self, record: &DiskRecord) -> String {
        self.inner().overlays(record)
    }

    /// Where the content of a disk is.
    pub fn resolve(&self, folder: &Folder, name: &str) -> Result<Resolved, Failure> {
        let inner = self.inner();
        let record = inner.ready(name)?;
        let backing = inner.chain(record)?;
        Ok(Resolved {
            path: folder.path(record),
            format: format(record),
            backing: backing
                .into_iter()
                .map(|below| (folder.path(below), format(below)))
                .collect(),
            size: record.size_bytes,
        })
    }

    /// A disk as the API shows it.
    pub fn describe(&self, folder: &Folder, record: &DiskRecord) -> v1::Disk {
        use std::os::unix::fs::MetadataExt;
        let path = folder.path(record);
        // stat(2): blocks of 512 bytes.
        let allocated = std::fs::metadata(&path).map_or(0, |metadata| metadata.blocks().saturating_mul(512));
        let inner = self.inner();
        let mut used_by: Vec<_> = inner
            .uses
            .get(&record.name)
            .into_iter()
            .flatten()
            .map(|user| user.vm.clone())
            .collect();
        used_by.sort();
        used_by.dedup();
        let backing = inner.disks.values().find(|disk| disk.uid == record.backing);
        v1::Disk {
            name: record.name.clone(),
            uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
            format: record.format,
            size_bytes: record.size_bytes,
            labels: record.labels.clone(),
            preallocation: record.preallocation,
            state: Some(v1::DiskState {
                create_time: text::timestamp(record.created_ms),
                path: path.display().to_string(),
                allocated_bytes: allocated,
                used_by,
                backing_disk: backing.map(|disk| disk.name.clone()).unwrap_or_default(),
            }),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn ready(&self, name: &str) -> Result<&DiskRecord, Failure> {
        let disk = self.disks.get(name);
        disk.filter(|disk| disk.stage() == DiskStage::Ready)
            .ok_or_else(|| {
                let message = format!("there is no disk \"{}\" on this node", text::brief(name));
                Failure::new(Kind::NotFound, "DISK_NOT_FOUND", message)
            })
    }

    /// Whether a VM may name this disk; `field` is its path in the request.
    fn usable(&self, disk: &Disk, field: &str) -> Result<(), Failure> {
        let Source::Disk { name, format: said } = &disk.source else {
            return Ok(());
        };
        let at = |failure: Failure| Failure {
            kind: Kind::Precondition,
            message: format!("{field}: {}", failure.message),
            ..failure
        };
        let record = self.ready(name.as_str()).map_err(at)?;
        let format = format(record);
        if said.is_some_and(|said| said != format) {
            let words = if format == Format::Qcow2 {
                "DISK_FORMAT_QCOW2"
            } else {
                "DISK_FORMAT_RAW"
            };
            let problem = format_args!("disk \"{name}\" is {words}: leave it out, or say the same");
            return Err(Failure::field(&format!("{field}.format"), problem));
        }
        let overlays = self.overlays(record);
        if !disk.read_only && !overlays.is_empty() {
            let message = format!(
                "disk \"{name}\" has overlays ({overlays}) and can't be written to any more: set `readOnly`, or name \
                 an overlay of it"
            );
            return Err(at(Failure::precondition("DISK_HAS_OVERLAYS", message)));
        }
        Ok(())
    }

    /// `VM "a", VM "b"`.
    fn users(&self, name: &str, which: impl Fn(&Use) -> bool) -> String {
        let uses = self.uses.get(name).into_iter().flatten();
        let mut vms: Vec<_> = uses
            .filter(|user| which(user))
            .map(|user| format!("VM \"{}\"", user.vm))
            .collect();
        vms.sort();
        vms.dedup();
        vms.join(", ")
    }

    fn overlays(&self, record: &DiskRecord) -> String {
        let names = self
            .disks
            .values()
            .filter(|disk| disk.backing == record.uid)
            .map(|disk| format!("\"{}\"", disk.name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// What is below a disk, the nearest first.
    fn chain(&self, record: &DiskRecord) -> Result<Vec<&DiskRecord>, Failure> {
        let mut chain: Vec<&DiskRecord> = Vec::new();
        let mut uid = &record.backing;
        while !uid.is_empty() {
            let below = self.disks.values().find(|disk| disk.uid == *uid);
            let Some(below) = below.filter(|_| chain.len() < backing_limit()) else {
                let message = format!("the disk below \"{}\" is missing on this node", record.name);
                return Err(Failure::precondition("BACKING_DISK_MISSING", message));
            };
            chain.push(below);
            uid = &below.backing;
        }
        Ok(chain)
    }
}

#[cfg(test)]
mod tests;
