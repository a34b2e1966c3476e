//! All disks of the node by name, with their users. Decisions that depend on both are made under
//! one lock.

pub mod shown;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use vmmd_api::v1;
use vmmd_host::failure::{Failure, Kind};
use vmmd_objects::registry::{self, Objects, Registry};
use vmmd_spec::disk::{Disk, Format, Source};
use vmmd_store::{DiskRecord, DiskStage, ImageRecord, Tombstone};

use crate::paths::disk::{Folder, backing_limit, format};

/// The disks.
#[derive(Debug, Default)]
pub struct Disks {
    /// All disks in any phase.
    pub registry: Registry<DiskKind>,
    /// Held while a disk's record is read, changed and written.
    edit: tokio::sync::Mutex<()>,
}

/// Disks of the DiskService.
#[derive(Clone, Debug, PartialEq)]
pub enum DiskKind {}

/// Relations of the disks.
#[derive(Debug, Default)]
pub struct Index {
    /// Names of the disks above a disk, by its UUID.
    above: BTreeMap<Vec<u8>, BTreeSet<String>>,
    /// By the disk's name; one entry per disk of a VM.
    uses: BTreeMap<String, Vec<Use>>,
    /// Names of the disks that a VM names: the keys of `uses` by VM.
    used: BTreeMap<String, BTreeSet<String>>,
    /// Room that is kept for disks which come from other nodes, in bytes, by their UUIDs.
    expected: BTreeMap<Vec<u8>, u64>,
}

/// A disk at a time.
pub type Seen = registry::Seen<DiskKind>;

impl registry::Kind for DiskKind {
    const NAME: &'static str = "disk";
    const A: &'static str = "a disk";
    const EXISTS: &'static str = "DISK_EXISTS";
    const NOT_FOUND: &'static str = "DISK_NOT_FOUND";
    type Record = DiskRecord;
    /// Id of the operation under way.
    type State = Option<String>;
    type Index = Index;
    type View = shown::Relations;

    fn view(disks: &Objects<Self>, record: &DiskRecord, operation: &Option<String>) -> shown::Relations {
        let users = disks.index.uses.get(&record.name).into_iter().flatten();
        let used_by: BTreeSet<_> = users.map(|user| user.vm.clone()).collect();
        shown::Relations {
            used_by: used_by.into_iter().collect(),
            backing: disks.name_of(&record.backing).unwrap_or_default().to_owned(),
            overlays: disks.index.overlays(record),
            image: image_of(disks, record),
            operation: operation.clone().unwrap_or_default(),
        }
    }

    fn enter(index: &mut Index, record: &DiskRecord) {
        if !record.backing.is_empty() {
            let above = index.above.entry(record.backing.clone()).or_default();
            above.insert(record.name.clone());
        }
    }

    fn leave(index: &mut Index, record: &DiskRecord) {
        if let Some(above) = index.above.get_mut(&record.backing) {
            above.remove(&record.name);
            if above.is_empty() {
                index.above.remove(&record.backing);
            }
        }
    }
}

/// A VM's spec names a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The VM.
    pub vm: String,
    /// Name of the disk in the VM.
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
    /// Backing files, the nearest first.
    pub backing: Vec<(PathBuf, Format)>,
    /// Virtual size in bytes; 0 if unknown.
    pub size: u64,
}

impl Disks {
    /// The disks of this registry.
    pub fn new(registry: Registry<DiskKind>) -> Self {
        Self {
            registry,
            edit: tokio::sync::Mutex::default(),
        }
    }

    /// Lock for changes of a disk's record.
    pub async fn edit(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.edit.lock().await
    }

    /// A disk that can be used.
    pub fn get(&self, name: &str) -> Result<DiskRecord, Failure> {
        ready(&self.registry.lock(), name).cloned()
    }

    /// Reserves the name of a new disk, an overlay of `below` if given. Returns the record with the
    /// values inherited from `below`.
    pub fn reserve(&self, mut record: DiskRecord, below: Option<&str>) -> Result<DiskRecord, Failure> {
        let mut disks = self.registry.lock();
        disks.check_free(&record.name)?;
        if let Some(below) = below {
            let base = ready(&disks, below)?.clone();
            let writers = disks.index.users(below, |user| user.writes);
            if !writers.is_empty() {
                let message = format!(
                    "disk \"{below}\" can be written to by {writers}: an overlay needs a disk that does not change; detach \
                     it there, or attach it read-only"
                );
                return Err(Failure::precondition("DISK_IN_USE", message));
            }
            idle(&disks, below)?;
            let image = usize::from(!base.image_digest.is_empty());
            if chain(&disks, &base)?.len() + image >= backing_limit() {
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
                return Err(Failure::field("disk.spec.sizeBytes", problem));
            }
            record.backing = base.uid;
            (record.image, record.image_digest) = (base.image, base.image_digest);
            record.logical_block = base.logical_block;
        }
        record.stage = DiskStage::Creating.into();
        Ok(add(&mut disks, record))
    }

    /// Adds a disk with an existing file; `backing` of the record is the backing of the file.
    pub fn adopt(&self, mut record: DiskRecord) -> Result<DiskRecord, Failure> {
        let mut disks = self.registry.lock();
        disks.check_free(&record.name)?;
        if let Some(other) = disks.by_uid(&record.uid) {
            let message = format!("the file is that of disk \"{}\"", other.name);
            return Err(Failure::new(Kind::Exists, "DISK_EXISTS", message));
        }
        chain(&disks, &record)?;
        record.stage = DiskStage::Creating.into();
        Ok(add(&mut disks, record))
    }

    /// Keeps room for a disk that comes from another node, until it has [arrived](Self::arrived) or is forgotten; how much is kept for all of
    /// them then, in bytes.
    pub fn expect(&self, uid: &[u8], bytes: u64) -> u64 {
        let mut disks = self.registry.lock();
        disks.index.expected.insert(uid.to_vec(), bytes);
        disks
            .index
            .expected
            .values()
            .fold(0, |sum, it| sum.saturating_add(*it))
    }

    /// A disk that comes from another node has all that it takes.
    pub fn arrived(&self, uid: &[u8]) {
        self.registry.lock().index.expected.remove(uid);
    }

    /// Adds a disk of an earlier daemon.
    pub fn restore(&self, record: DiskRecord) {
        let mut disks = self.registry.lock();
        let backing = record.backing.clone();
        disks.put(record);
        touch_backing(&mut disks, &backing);
    }

    /// Notes that an operation of a disk begins. Refused as BUSY while another one is under way.
    pub fn begin(&self, name: &str, operation: &str) -> Result<(), Failure> {
        let mut disks = self.registry.lock();
        idle(&disks, name)?;
        disks.change(name, |_, under_way| *under_way = Some(operation.to_owned()));
        Ok(())
    }

    /// Notes that no operation of a disk is under way any more.
    pub fn end(&self, uid: &[u8]) {
        let mut disks = self.registry.lock();
        if let Some(name) = disks.name_of(uid).map(str::to_owned) {
            disks.change(&name, |_, under_way| *under_way = None);
        }
    }

    /// Notes that a disk is gone; `tombstone` is what [`Registry::bury`] returned.
    pub fn forget(&self, uid: &[u8], tombstone: Tombstone) {
        let mut disks = self.registry.lock();
        disks.index.expected.remove(uid);
        if let Some(record) = disks.remove(uid) {
            touch_backing(&mut disks, &record.backing);
        }
        disks.buried(tombstone);
    }

    /// Takes a disk out of use for good. Fails if the disk is in use, or if `check` refuses.
    pub fn begin_delete(
        &self,
        name: &str,
        check: impl FnOnce(&DiskRecord) -> Result<(), Failure>,
    ) -> Result<DiskRecord, Failure> {
        let mut disks = self.registry.lock();
        let record = ready(&disks, name)?.clone();
        check(&record)?;
        let users = disks.index.users(name, |_| true);
        if !users.is_empty() {
            let message = format!("disk \"{name}\" is in the spec of {users}: detach it there first");
            return Err(Failure::precondition("DISK_IN_USE", message));
        }
        let overlays = disks.index.overlays(&record);
        if !overlays.is_empty() {
            let overlays = quoted(&overlays);
            let message = format!("disk \"{name}\" has overlays ({overlays}): delete those first");
            return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
        }
        idle(&disks, name)?;
        disks.change(name, |record, _| record.stage = DiskStage::Deleting.into());
        Ok(record)
    }

    /// Fills in the format and the length of logical blocks of a disk that a spec names and leaves them out. One that is not there is left as
    /// it is.
    pub fn fill_in(&self, spec: &mut v1::DiskSpec) {
        let disks = self.registry.lock();
        let Some(record) = ready(&disks, spec.disk()).ok().filter(|_| spec.path().is_empty()) else {
            return;
        };
        if spec.format() == v1::DiskFormat::Unspecified {
            spec.format = record.format;
        }
        if spec.logical_block_bytes == 0 {
            spec.logical_block_bytes = record.logical_block;
        }
    }

    /// Notes that a VM names these disks; all or none of them. `field` gives the path of the nth in the request.
    pub fn take(&self, vm: &str, wanted: &[Disk], field: impl Fn(usize) -> String) -> Result<(), Failure> {
        let mut disks = self.registry.lock();
        let mut taken = Vec::new();
        for (index, disk) in wanted.iter().enumerate() {
            let Some(name) = disk.named() else {
                continue;
            };
            usable(&disks, disk, &field(index))?;
            let user = Use {
                vm: vm.to_owned(),
                disk: disk.name.to_string(),
                writes: !disk.read_only,
            };
            taken.push((name.to_string(), user));
        }
        for (name, user) in taken {
            disks.touch(&name);
            disks.index.add_use(name, user);
        }
        Ok(())
    }

    /// Bytes that all disks take when they are full.
    pub fn promised(&self) -> u64 {
        let disks = self.registry.lock();
        disks
            .records()
            .fold(0, |sum, record| sum.saturating_add(record.size_bytes))
    }

    /// Which of these disks [`Disks::take`] would refuse, by their numbers, and why. `field` as there.
    pub fn refusals(&self, wanted: &[Disk], field: impl Fn(usize) -> String) -> Vec<(usize, Failure)> {
        let disks = self.registry.lock();
        let numbered = wanted.iter().enumerate();
        let refused =
            numbered.filter_map(|(index, disk)| Some((index, usable(&disks, disk, &field(index)).err()?)));
        refused.collect()
    }

    /// Notes that these disks are all that a VM has, in its spec or in its machine.
    pub fn hold<'a>(&self, vm: &str, held: impl IntoIterator<Item = &'a v1::DiskSpec>) {
        let mut disks = self.registry.lock();
        let before = disks.index.drop_uses(vm, None);
        for disk in held.into_iter().filter(|disk| !disk.disk().is_empty()) {
            let user = Use {
                vm: vm.to_owned(),
                disk: disk.name.clone(),
                writes: !disk.read_only,
            };
            let uses = disks.index.uses.get(disk.disk());
            if !uses.is_some_and(|uses| uses.contains(&user)) {
                disks.index.add_use(disk.disk().to_owned(), user);
            }
        }
        let after = disks.index.used_by(vm);
        for changed in before.symmetric_difference(&after) {
            disks.touch(changed);
        }
    }

    /// Notes that a VM names a disk no more, or with `None` none at all.
    pub fn give_back(&self, vm: &str, disk: Option<&str>) {
        let mut disks = self.registry.lock();
        let before = disks.index.drop_uses(vm, disk);
        let after = disks.index.used_by(vm);
        for changed in before.difference(&after) {
            disks.touch(changed);
        }
    }

    /// Returns the VMs that name a disk.
    pub fn uses(&self, name: &str) -> Vec<Use> {
        let disks = self.registry.lock();
        disks.index.uses.get(name).cloned().unwrap_or_default()
    }

    /// The names of a disk's overlays, for a message; empty when there are none.
    pub fn overlays(&self, record: &DiskRecord) -> String {
        quoted(&self.registry.lock().index.overlays(record))
    }

    /// Names of the disks that are overlays of an image, and of the VMs that have a disk which is to be made of it; sorted.
    pub fn users_of_image(&self, image: &ImageRecord) -> (Vec<String>, Vec<String>) {
        let disks = self.registry.lock();
        let overlays = disks
            .records()
            .filter(|disk| disk.image == image.uid && disk.backing.is_empty());
        (overlays.map(|disk| disk.name.clone()).collect(), Vec::new())
    }

    /// Where the content of a disk is.
    pub fn resolve(&self, folder: &Folder, name: &str) -> Result<Resolved, Failure> {
        let disks = self.registry.lock();
        let record = ready(&disks, name)?;
        let backing = chain(&disks, record)?;
        let image = (!record.image_digest.is_empty()).then(|| (folder.image(record), Format::Raw));
        Ok(Resolved {
            path: folder.path(record),
            format: format(record),
            backing: backing
                .into_iter()
                .map(|below| (folder.path(below), format(below)))
                .chain(image)
                .collect(),
            size: record.size_bytes,
        })
    }
}

impl Index {
    fn used_by(&self, vm: &str) -> BTreeSet<String> {
        self.used.get(vm).cloned().unwrap_or_default()
    }

    fn add_use(&mut self, name: String, user: Use) {
        let used = self.used.entry(user.vm.clone()).or_default();
        used.insert(name.clone());
        self.uses.entry(name).or_default().push(user);
    }

    /// Removes the use of a disk by a VM, or with `None` all uses by the VM; returns the names of the disks that it used before. `disk` is
    /// the disk's name in the VM.
    fn drop_uses(&mut self, vm: &str, disk: Option<&str>) -> BTreeSet<String> {
        let before = self.used.remove(vm).unwrap_or_default();
        let mut left = BTreeSet::new();
        for name in &before {
            let Some(uses) = self.uses.get_mut(name) else {
                continue;
            };
            uses.retain(|user| user.vm != vm || disk.is_some_and(|disk| user.disk != disk));
            if uses.iter().any(|user| user.vm == vm) {
                left.insert(name.clone());
            }
            if uses.is_empty() {
                self.uses.remove(name);
            }
        }
        if !left.is_empty() {
            self.used.insert(vm.to_owned(), left);
        }
        before
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

    /// Names of a disk's overlays, sorted.
    fn overlays(&self, record: &DiskRecord) -> Vec<String> {
        let above = self.above.get(&record.uid).into_iter().flatten();
        above.cloned().collect()
    }
}

fn ready<'a>(disks: &'a Objects<DiskKind>, name: &str) -> Result<&'a DiskRecord, Failure> {
    match disks.get(name).map(|record| (record.stage(), record)) {
        Some((DiskStage::Ready, record)) => Ok(record),
        Some((DiskStage::Creating, _)) => {
            let message = format!("disk \"{name}\" is being made: wait for its operation");
            Err(Failure::precondition("DISK_NOT_READY", message))
        }
        Some((DiskStage::Deleting, _)) | None => Err(<DiskKind as registry::Kind>::not_found(name)),
    }
}

fn idle(disks: &Objects<DiskKind>, name: &str) -> Result<(), Failure> {
    match disks.state(name).and_then(Option::as_ref) {
        Some(operation) => {
            let message = format!(
                "operation {operation} of disk \"{name}\" is under way: wait for its end, or cancel it"
            );
            Err(Failure::precondition("BUSY", message))
        }
        None => Ok(()),
    }
}

fn add(disks: &mut Objects<DiskKind>, record: DiskRecord) -> DiskRecord {
    let record = disks.add(record);
    touch_backing(disks, &record.backing);
    record
}

/// The disk below shows its overlays.
fn touch_backing(disks: &mut Objects<DiskKind>, backing: &[u8]) {
    if let Some(name) = disks.name_of(backing).map(str::to_owned) {
        disks.touch(&name);
    }
}

/// Name of the image that a disk, or the one at the bottom of its chain, is an overlay of.
fn image_of(disks: &Objects<DiskKind>, record: &DiskRecord) -> String {
    let bottom = chain(disks, record).ok().and_then(|chain| chain.last().copied());
    let bottom = bottom.unwrap_or(record);
    let image = bottom.made_of().filter(|_| !bottom.image.is_empty());
    image.map(|image| image.name).unwrap_or_default()
}

/// Whether a VM may name this disk; `field` is its path in the request.
fn usable(disks: &Objects<DiskKind>, disk: &Disk, field: &str) -> Result<(), Failure> {
    let Source::Disk { name, format: said } = &disk.source else {
        return Ok(());
    };
    let at = |failure: Failure| Failure {
        kind: Kind::Precondition,
        message: format!("{field}: {}", failure.message),
        ..failure
    };
    let record = ready(disks, name.as_str()).map_err(at)?;
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
    let overlays = disks.index.overlays(record);
    if !disk.read_only && !overlays.is_empty() {
        let overlays = quoted(&overlays);
        let message = format!(
            "disk \"{name}\" has overlays ({overlays}) and can't be written to any more: set `readOnly`, or name \
             an overlay of it"
        );
        return Err(at(Failure::precondition("DISK_HAS_OVERLAYS", message)));
    }
    Ok(())
}

/// Returns the backing disks of a disk, the nearest first.
fn chain<'a>(disks: &'a Objects<DiskKind>, record: &DiskRecord) -> Result<Vec<&'a DiskRecord>, Failure> {
    let mut chain: Vec<&DiskRecord> = Vec::new();
    let mut uid = record.backing.as_slice();
    while !uid.is_empty() {
        let below = disks.by_uid(uid);
        let Some(below) = below.filter(|_| chain.len() < backing_limit()) else {
            let message = format!("the disk below \"{}\" is missing on this node", record.name);
            return Err(Failure::precondition("BACKING_DISK_MISSING", message));
        };
        chain.push(below);
        uid = &below.backing;
    }
    Ok(chain)
}

/// `"a", "b"`.
fn quoted(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    quoted.join(", ")
}

#[cfg(test)]
mod tests;
