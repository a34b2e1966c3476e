//! All disks of the node by name, with their users. Decisions that depend on both are made under
//! one lock.

pub mod shown;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use tokio::sync::watch;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::feed::{Buried, Expired, Feed, Position};
use vmmd_spec::disk::{Disk, Format, Source};
use vmmd_store::{BuriedRecords, DiskRecord, DiskStage, ImageRecord, Tombstone};

use crate::paths::disk::{Folder, backing_limit, format};

/// The disks.
#[derive(Debug)]
pub struct Disks {
    inner: Mutex<Inner>,
    /// Held while a disk's record is read, changed and written.
    edit: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Inner {
    disks: BTreeMap<String, Slot>,
    /// Names by UUID.
    names: BTreeMap<Vec<u8>, String>,
    /// Names of the disks above a disk, by its UUID.
    above: BTreeMap<Vec<u8>, BTreeSet<String>>,
    /// By the disk's name; one entry per disk of a VM.
    uses: BTreeMap<String, Vec<Use>>,
    /// Names of the disks that a VM names: the keys of `uses` by VM.
    used: BTreeMap<String, BTreeSet<String>>,
    /// Room that is kept for disks which come from other nodes, in bytes, by their UUIDs.
    expected: BTreeMap<Vec<u8>, u64>,
    feed: Feed,
}

#[derive(Debug)]
struct Slot {
    record: DiskRecord,
    /// Id of the operation under way.
    operation: Option<String>,
    /// Revision of the last change.
    revision: u64,
    /// The disk since then, once a client has asked for it: all watchers share it.
    seen: OnceLock<Arc<Seen>>,
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

/// A disk at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Record of the disk.
    pub record: DiskRecord,
    /// The disk for the API, without the fields that only its file provides (see
    /// [`crate::disk::describe::look`]).
    pub disk: v1::Disk,
    /// Of this state.
    pub revision: u64,
}

/// All disks at a time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Sorted by name.
    pub disks: Vec<Arc<Seen>>,
    /// Which time.
    pub at: Position,
}

impl Default for Disks {
    fn default() -> Self {
        Self::new(1, [(1, 0)].into(), BuriedRecords::default())
    }
}

impl Disks {
    /// One without disks; see [`Feed::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: BuriedRecords) -> Self {
        let inner = Inner {
            disks: BTreeMap::new(),
            names: BTreeMap::new(),
            above: BTreeMap::new(),
            uses: BTreeMap::new(),
            used: BTreeMap::new(),
            expected: BTreeMap::new(),
            feed: Feed::new(run, nonces, history),
        };
        Self {
            inner: Mutex::new(inner),
            edit: tokio::sync::Mutex::default(),
        }
    }

    /// Lock for changes of a disk's record.
    pub async fn edit(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.edit.lock().await
    }

    /// Returns a disk in any phase.
    pub fn see(&self, folder: &Folder, name: &str) -> Result<Arc<Seen>, Failure> {
        let inner = self.inner();
        let slot = inner.disks.get(name).ok_or_else(|| no_disk(name))?;
        Ok(inner.see(folder, slot))
    }

    /// Returns the disk with this UUID, in any phase.
    pub fn find(&self, folder: &Folder, uid: &[u8]) -> Option<Arc<Seen>> {
        let inner = self.inner();
        Some(inner.see(folder, inner.slot_of(uid)?))
    }

    /// Disks after a name, and where in the order of changes that was.
    pub fn after(&self, folder: &Folder, name: Option<&str>) -> Snapshot {
        let inner = self.inner();
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let slots = inner.disks.range::<str, _>((from, Bound::Unbounded));
        Snapshot {
            disks: slots.map(|(_, slot)| inner.see(folder, slot)).collect(),
            at: inner.feed.position(),
        }
    }

    /// All disks, and deletions since `position`.
    pub fn since(&self, folder: &Folder, position: Position) -> Result<(Vec<Buried>, Snapshot), Expired> {
        let inner = self.inner();
        let buried = inner.feed.buried_since(position)?;
        let snapshot = Snapshot {
            disks: inner.disks.values().map(|slot| inner.see(folder, slot)).collect(),
            at: inner.feed.position(),
        };
        Ok((buried, snapshot))
    }

    /// Wakes up with each change.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.inner().feed.news()
    }

    /// Where the last change is.
    pub fn position(&self) -> Position {
        self.inner().feed.position()
    }

    /// See [`Feed::nonce`].
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.inner().feed.nonce(run)
    }

    /// A disk that can be used.
    pub fn get(&self, name: &str) -> Result<DiskRecord, Failure> {
        self.inner().ready(name).cloned()
    }

    /// Reserves the name of a new disk, an overlay of `below` if given. Returns the record with the
    /// values inherited from `below`.
    pub fn reserve(&self, mut record: DiskRecord, below: Option<&str>) -> Result<DiskRecord, Failure> {
        let mut inner = self.inner();
        inner.is_free(&record.name)?;
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
            inner.idle(below)?;
            let image = usize::from(!base.image_digest.is_empty());
            if inner.chain(&base)?.len() + image >= backing_limit() {
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
        Ok(inner.add(record))
    }

    /// Adds a disk with an existing file; `backing` of the record is the backing of the file.
    pub fn adopt(&self, mut record: DiskRecord) -> Result<DiskRecord, Failure> {
        let mut inner = self.inner();
        inner.is_free(&record.name)?;
        if let Some(other) = inner.slot_of(&record.uid) {
            let message = format!("the file is that of disk \"{}\"", other.record.name);
            return Err(Failure::new(Kind::Exists, "DISK_EXISTS", message));
        }
        inner.chain(&record)?;
        record.stage = DiskStage::Creating.into();
        Ok(inner.add(record))
    }

    /// Keeps room for a disk that comes from another node, until it has [arrived](Self::arrived) or is forgotten; how much is kept for all of
    /// them then, in bytes.
    pub fn expect(&self, uid: &[u8], bytes: u64) -> u64 {
        let mut inner = self.inner();
        inner.expected.insert(uid.to_vec(), bytes);
        inner.expected.values().fold(0, |sum, it| sum.saturating_add(*it))
    }

    /// A disk that comes from another node has all that it takes.
    pub fn arrived(&self, uid: &[u8]) {
        self.inner().expected.remove(uid);
    }

    /// Replaces the record of a disk. A disk that was forgotten meanwhile stays forgotten.
    pub fn settle(&self, record: DiskRecord) {
        let mut inner = self.inner();
        let Some(name) = inner.name_of(&record.uid) else {
            return;
        };
        let operation = inner.disks.get(&name).and_then(|slot| slot.operation.clone());
        inner.take_out(&name);
        inner.put(record, 0);
        if let Some(slot) = inner.disks.get_mut(&name) {
            slot.operation = operation;
        }
        inner.touch([name]);
    }

    /// Adds a disk of an earlier daemon.
    pub fn restore(&self, record: DiskRecord) {
        let mut inner = self.inner();
        let revision = inner.feed.change();
        let below = inner.name_of(&record.backing);
        inner.put(record, revision);
        inner.touch(below);
    }

    /// Notes that an operation of a disk begins. Refused as BUSY while another one is under way.
    pub fn begin(&self, name: &str, operation: &str) -> Result<(), Failure> {
        let mut inner = self.inner();
        inner.idle(name)?;
        if let Some(slot) = inner.disks.get_mut(name) {
            slot.operation = Some(operation.to_owned());
        }
        inner.touch([name.to_owned()]);
        Ok(())
    }

    /// Notes that no operation of a disk is under way any more.
    pub fn end(&self, uid: &[u8]) {
        let mut inner = self.inner();
        if let Some(name) = inner.name_of(uid) {
            if let Some(slot) = inner.disks.get_mut(&name) {
                slot.operation = None;
            }
            inner.touch([name]);
        }
    }

    /// Begins to forget a disk. Returns the record for the store. [`Self::forget`] follows.
    pub fn bury(&self, record: &DiskRecord) -> Tombstone {
        self.inner().feed.bury(shown::metadata(record))
    }

    /// Notes that a disk is gone; `tombstone` is what [`Self::bury`] returned.
    pub fn forget(&self, uid: &[u8], tombstone: Tombstone) {
        let mut inner = self.inner();
        inner.expected.remove(uid);
        if let Some(name) = inner.name_of(uid) {
            let backing = inner.take_out(&name);
            // The one below shows its overlays.
            let below = backing.and_then(|uid| inner.name_of(&uid));
            inner.touch(below);
        }
        inner.feed.buried(tombstone);
    }

    /// Takes a disk out of use for good. Fails if the disk is in use, or if `check` refuses.
    pub fn begin_delete(
        &self,
        name: &str,
        check: impl FnOnce(&DiskRecord) -> Result<(), Failure>,
    ) -> Result<DiskRecord, Failure> {
        let mut inner = self.inner();
        let record = inner.ready(name)?.clone();
        check(&record)?;
        let users = inner.users(name, |_| true);
        if !users.is_empty() {
            let message = format!("disk \"{name}\" is in the spec of {users}: detach it there first");
            return Err(Failure::precondition("DISK_IN_USE", message));
        }
        let overlays = inner.overlays(&record);
        if !overlays.is_empty() {
            let overlays = quoted(&overlays);
            let message = format!("disk \"{name}\" has overlays ({overlays}): delete those first");
            return Err(Failure::precondition("DISK_HAS_OVERLAYS", message));
        }
        inner.idle(name)?;
        if let Some(slot) = inner.disks.get_mut(name) {
            slot.record.stage = DiskStage::Deleting.into();
        }
        inner.touch([name.to_owned()]);
        Ok(record)
    }

    /// Fills in the format and the length of logical blocks of a disk that a spec names and leaves them out. One that is not there is left as
    /// it is.
    pub fn fill_in(&self, spec: &mut v1::DiskSpec) {
        let inner = self.inner();
        let Some(record) = inner.ready(spec.disk()).ok().filter(|_| spec.path().is_empty()) else {
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
        let names: Vec<_> = taken.iter().map(|(name, _)| name.clone()).collect();
        for (name, user) in taken {
            inner.add_use(name, user);
        }
        inner.touch(names);
        Ok(())
    }

    /// Bytes that all disks take when they are full.
    pub fn promised(&self) -> u64 {
        let inner = self.inner();
        inner
            .disks
            .values()
            .fold(0, |sum, slot| sum.saturating_add(slot.record.size_bytes))
    }

    /// Which of these disks [`Disks::take`] would refuse, by their numbers, and why. `field` as there.
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
        let before = inner.drop_uses(vm, None);
        for disk in disks.into_iter().filter(|disk| !disk.disk().is_empty()) {
            let user = Use {
                vm: vm.to_owned(),
                disk: disk.name.clone(),
                writes: !disk.read_only,
            };
            let uses = inner.uses.get(disk.disk());
            if !uses.is_some_and(|uses| uses.contains(&user)) {
                inner.add_use(disk.disk().to_owned(), user);
            }
        }
        let after = inner.used_by(vm);
        let changed: Vec<_> = before.symmetric_difference(&after).cloned().collect();
        inner.touch(changed);
    }

    /// Notes that a VM names a disk no more, or with `None` none at all.
    pub fn give_back(&self, vm: &str, disk: Option<&str>) {
        let mut inner = self.inner();
        let before = inner.drop_uses(vm, disk);
        let after = inner.used_by(vm);
        let changed: Vec<_> = before.difference(&after).cloned().collect();
        inner.touch(changed);
    }

    /// Returns the VMs that name a disk.
    pub fn uses(&self, name: &str) -> Vec<Use> {
        self.inner().uses.get(name).cloned().unwrap_or_default()
    }

    /// The names of a disk's overlays, for a message; empty when there are none.
    pub fn overlays(&self, record: &DiskRecord) -> String {
        quoted(&self.inner().overlays(record))
    }

    /// Names of the disks that are overlays of an image, and of the VMs that have a disk which is to be made of it; sorted.
    pub fn users_of_image(&self, image: &ImageRecord) -> (Vec<String>, Vec<String>) {
        let inner = self.inner();
        let disks = inner.disks.values().map(|slot| &slot.record);
        let disks = disks.filter(|disk| disk.image == image.uid && disk.backing.is_empty());
        (disks.map(|disk| disk.name.clone()).collect(), Vec::new())
    }

    /// Where the content of a disk is.
    pub fn resolve(&self, folder: &Folder, name: &str) -> Result<Resolved, Failure> {
        let inner = self.inner();
        let record = inner.ready(name)?;
        let backing = inner.chain(record)?;
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

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn ready(&self, name: &str) -> Result<&DiskRecord, Failure> {
        let record = self.disks.get(name).map(|slot| &slot.record);
        match record.map(|record| (record.stage(), record)) {
            Some((DiskStage::Ready, record)) => Ok(record),
            Some((DiskStage::Creating, _)) => {
                let message = format!("disk \"{name}\" is being made: wait for its operation");
                Err(Failure::precondition("DISK_NOT_READY", message))
            }
            Some((DiskStage::Deleting, _)) | None => Err(no_disk(name)),
        }
    }

    fn is_free(&self, name: &str) -> Result<(), Failure> {
        match self.disks.contains_key(name) {
            true => {
                let message = format!("there is a disk \"{name}\" already");
                Err(Failure::new(Kind::Exists, "DISK_EXISTS", message))
            }
            false => Ok(()),
        }
    }

    fn idle(&self, name: &str) -> Result<(), Failure> {
        match self.disks.get(name).and_then(|slot| slot.operation.as_ref()) {
            Some(operation) => {
                let message = format!(
                    "operation {operation} of disk \"{name}\" is under way: wait for its end, or cancel it"
                );
                Err(Failure::precondition("BUSY", message))
            }
            None => Ok(()),
        }
    }

    fn add(&mut self, mut record: DiskRecord) -> DiskRecord {
        record.generation = self.feed.first_generation();
        let revision = self.feed.change();
        (record.made_run, record.made_revision) = (self.feed.run(), revision);
        self.put(record.clone(), revision);
        // The one below shows its overlays.
        let below = self.name_of(&record.backing);
        self.touch(below);
        record
    }

    fn put(&mut self, record: DiskRecord, revision: u64) {
        let name = record.name.clone();
        self.names.insert(record.uid.clone(), name.clone());
        if !record.backing.is_empty() {
            let above = self.above.entry(record.backing.clone()).or_default();
            above.insert(name.clone());
        }
        let slot = Slot {
            record,
            operation: None,
            revision,
            seen: OnceLock::new(),
        };
        self.disks.insert(name, slot);
    }

    /// Removes a disk; returns the UUID of the disk below it.
    fn take_out(&mut self, name: &str) -> Option<Vec<u8>> {
        let DiskRecord { uid, backing, .. } = self.disks.remove(name)?.record;
        self.names.remove(&uid);
        if let Some(above) = self.above.get_mut(&backing) {
            above.remove(name);
            if above.is_empty() {
                self.above.remove(&backing);
            }
        }
        Some(backing)
    }

    fn name_of(&self, uid: &[u8]) -> Option<String> {
        self.names.get(uid).cloned()
    }

    fn slot_of(&self, uid: &[u8]) -> Option<&Slot> {
        self.disks.get(self.names.get(uid)?)
    }

    /// Notes that disks have changed.
    fn touch(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            if let Some(slot) = self.disks.get_mut(&name) {
                slot.revision = self.feed.change();
                slot.seen = OnceLock::new();
            }
        }
    }

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

    fn see(&self, folder: &Folder, slot: &Slot) -> Arc<Seen> {
        Arc::clone(slot.seen.get_or_init(|| Arc::new(self.look(folder, slot))))
    }

    fn look(&self, folder: &Folder, slot: &Slot) -> Seen {
        let record = &slot.record;
        let users = self.uses.get(&record.name).into_iter().flatten();
        let used_by: BTreeSet<_> = users.map(|user| user.vm.clone()).collect();
        let relations = shown::Relations {
            used_by: used_by.into_iter().collect(),
            backing: self.name_of(&record.backing).unwrap_or_default(),
            overlays: self.overlays(record),
            image: self.image_of(record),
            operation: slot.operation.clone().unwrap_or_default(),
        };
        Seen {
            disk: shown::disk(folder, record, relations),
            record: record.clone(),
            revision: slot.revision,
        }
    }

    /// Name of the image that a disk, or the one at the bottom of its chain, is an overlay of.
    fn image_of(&self, record: &DiskRecord) -> String {
        let bottom = self.chain(record).ok().and_then(|chain| chain.last().copied());
        let bottom = bottom.unwrap_or(record);
        let image = bottom.made_of().filter(|_| !bottom.image.is_empty());
        image.map(|image| image.name).unwrap_or_default()
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
            let overlays = quoted(&overlays);
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

    /// Names of a disk's overlays, sorted.
    fn overlays(&self, record: &DiskRecord) -> Vec<String> {
        let above = self.above.get(&record.uid).into_iter().flatten();
        above.cloned().collect()
    }

    /// Returns the backing disks of a disk, the nearest first.
    fn chain(&self, record: &DiskRecord) -> Result<Vec<&DiskRecord>, Failure> {
        let mut chain: Vec<&DiskRecord> = Vec::new();
        let mut uid = &record.backing;
        while !uid.is_empty() {
            let below = self.slot_of(uid).map(|slot| &slot.record);
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

fn no_disk(name: &str) -> Failure {
    let message = format!("there is no disk \"{}\" on this node", text::brief(name));
    Failure::new(Kind::NotFound, "DISK_NOT_FOUND", message)
}

/// `"a", "b"`.
fn quoted(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
    quoted.join(", ")
}

#[cfg(test)]
mod tests;
