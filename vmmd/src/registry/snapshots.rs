//! All snapshots of the node by name.

mod quota;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_store::{SnapshotRecord, SnapshotStage};

use crate::config::SnapshotLimits;

/// The snapshots.
#[derive(Debug, Default)]
pub struct Snapshots {
    inner: Mutex<BTreeMap<String, SnapshotRecord>>,
    /// Snapshots that wait until a VM's disks are quiet, by the VM's UUID.
    waiting: Mutex<HashMap<Vec<u8>, Waiting>>,
    /// By the snapshot's UUID: how many exports and restores read it. Locked after `inner`.
    readers: Mutex<HashMap<Vec<u8>, usize>>,
    /// Held while a VM is made of one: its NICs' addresses are compared with those of all VMs.
    pub making: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Waiting {
    /// Number of the request to the `vmm`.
    number: u64,
    quiet: oneshot::Sender<()>,
}

impl Snapshots {
    /// A snapshot that is complete.
    pub fn get(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let inner = self.inner();
        let found = inner.get(name).filter(|record| is_ready(record));
        found.cloned().ok_or_else(|| not_found(name))
    }

    /// All snapshots that are complete, by name.
    pub fn list(&self) -> Vec<SnapshotRecord> {
        self.inner()
            .values()
            .filter(|record| is_ready(record))
            .cloned()
            .collect()
    }

    /// The first `limit` complete snapshots after a name, and whether there are more.
    pub fn page(&self, after: &str, limit: usize) -> (Vec<SnapshotRecord>, bool) {
        let inner = self.inner();
        let rows = inner.range::<str, _>((Bound::Excluded(after), Bound::Unbounded));
        let mut found = rows.map(|(_, record)| record).filter(|record| is_ready(record));
        let page = found.by_ref().take(limit).cloned().collect();
        (page, found.next().is_some())
    }

    /// Reserves the name of a snapshot that is to be made, and the room that its record says. Refused while another one of the same VM is being
    /// made, and when there would be more than `limits` allow.
    pub fn reserve(&self, record: &SnapshotRecord, limits: &SnapshotLimits) -> Result<(), Failure> {
        let mut inner = self.inner();
        if inner.contains_key(&record.name) {
            let message = format!("there is a snapshot \"{}\" already", record.name);
            return Err(Failure::new(Kind::Exists, "SNAPSHOT_EXISTS", message));
        }
        // One that is being deleted was complete.
        let is_taken = |it: &&SnapshotRecord| !is_ready(it) && it.completed_ms == 0;
        let mut taken = inner.values().filter(is_taken);
        if let Some(other) = taken.find(|other| other.vm_uid == record.vm_uid) {
            return Err(under_way(&record.vm_name, &other.name));
        }
        quota::check_count(inner.values(), record, limits)?;
        quota::check_room(inner.values(), record, limits)?;
        inner.insert(record.name.clone(), record.clone());
        Ok(())
    }

    /// Notes that a snapshot that is being made takes the room that its record says. Refused when that is more than `limits` leave.
    pub fn charge(&self, record: &SnapshotRecord, limits: &SnapshotLimits) -> Result<(), Failure> {
        let mut inner = self.inner();
        quota::check_room(inner.values(), record, limits)?;
        if let Some(held) = inner.get_mut(&record.name) {
            held.allocated_bytes = record.allocated_bytes;
        }
        Ok(())
    }

    /// Returns a snapshot and protects it from deletion until [`end_reading`](Self::end_reading).
    pub fn begin_reading(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let inner = self.inner();
        let found = inner.get(name).filter(|record| is_ready(record));
        let record = found.ok_or_else(|| not_found(name))?;
        *self.readers().entry(record.uid.clone()).or_default() += 1;
        Ok(record.clone())
    }

    /// An export or a restore of the snapshot with this UUID has ended.
    pub fn end_reading(&self, uid: &[u8]) {
        let mut readers = self.readers();
        if let Some(count) = readers.get_mut(uid) {
            *count -= 1;
            if *count == 0 {
                readers.remove(uid);
            }
        }
    }

    /// Takes a snapshot out of use, for good unless it is [put](Self::put) back.
    pub fn begin_delete(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let mut inner = self.inner();
        let found = inner.get_mut(name).filter(|record| is_ready(record));
        let record = found.ok_or_else(|| not_found(name))?;
        if self.readers().contains_key(&record.uid) {
            let message = format!(
                "snapshot \"{name}\" is being exported or restored: wait for the end of that, or end it"
            );
            return Err(Failure::precondition("SNAPSHOT_IN_USE", message));
        }
        let ready = record.clone();
        record.stage = SnapshotStage::Partial.into();
        Ok(ready)
    }

    /// Sets the record of a snapshot.
    pub fn put(&self, record: SnapshotRecord) {
        self.inner().insert(record.name.clone(), record);
    }

    /// Notes that a snapshot is gone.
    pub fn forget(&self, name: &str) {
        self.inner().remove(name);
    }

    /// Hears it when the disks of a VM are quiet. For the one snapshot of that VM that is being taken.
    pub fn until_quiet(&self, vm: &[u8], number: u64) -> oneshot::Receiver<()> {
        let (sender, quiet) = oneshot::channel();
        let waiting = Waiting {
            number,
            quiet: sender,
        };
        self.waiting().insert(vm.to_vec(), waiting);
        quiet
    }

    /// Handles the notice of a `vmm` that the disks of a VM are quiet for the snapshot `number`; 0
    /// stands for any. Returns false if no snapshot waits, as after a cancel. A notice for a number
    /// other than the waiting one belongs to an abandoned snapshot and is ignored.
    pub fn disks_quiet(&self, vm: &[u8], number: u64) -> bool {
        let mut all = self.waiting();
        let Some(waiting) = all.get(vm).filter(|it| !it.quiet.is_closed()) else {
            all.remove(vm);
            return false;
        };
        if number != 0 && number != waiting.number {
            return true;
        }
        let waiting = all.remove(vm);
        waiting.is_some_and(|waiting| waiting.quiet.send(()).is_ok())
    }

    /// Name of a snapshot that has an overlay of this disk of the DiskService.
    pub fn needs(&self, disk: &[u8]) -> Option<String> {
        let inner = self.inner();
        let mut needing = inner
            .values()
            .filter(|record| record.disks.iter().any(|it| it.backing == disk));
        needing.next().map(|record| record.name.clone())
    }

    /// Name of a snapshot that has an overlay of this image.
    pub fn needs_image(&self, image: &[u8]) -> Option<String> {
        let inner = self.inner();
        let mut needing = inner
            .values()
            .filter(|record| record.disks.iter().any(|it| it.image == image));
        needing.next().map(|record| record.name.clone())
    }

    fn readers(&self) -> MutexGuard<'_, HashMap<Vec<u8>, usize>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> MutexGuard<'_, BTreeMap<String, SnapshotRecord>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_ready(record: &SnapshotRecord) -> bool {
    record.stage() == SnapshotStage::Ready
}

fn under_way(vm: &str, name: &str) -> Failure {
    let message = format!("snapshot \"{name}\" of VM \"{vm}\" is being taken: wait until it is complete");
    Failure::precondition("SNAPSHOT_UNDER_WAY", message)
}

fn not_found(name: &str) -> Failure {
    let message = format!("there is no snapshot \"{}\" on this node", text::brief(name));
    Failure::new(Kind::NotFound, "SNAPSHOT_NOT_FOUND", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_of_another_snapshot_is_not_taken_for_the_one_that_is_waited_for() {
        let snapshots = Snapshots::default();
        let mut quiet = snapshots.until_quiet(b"web", 2);
        assert!(snapshots.disks_quiet(b"web", 1));
        assert!(!snapshots.disks_quiet(b"other", 2));
        assert!(quiet.try_recv().is_err());
        assert!(snapshots.disks_quiet(b"web", 2));
        assert_eq!(quiet.try_recv(), Ok(()));
        // The number 0 stands for any snapshot.
        let mut quiet = snapshots.until_quiet(b"web", 3);
        assert!(snapshots.disks_quiet(b"web", 0));
        assert_eq!(quiet.try_recv(), Ok(()));
        // One that was cancelled does not hear it.
        drop(snapshots.until_quiet(b"web", 4));
        assert!(!snapshots.disks_quiet(b"web", 4));
    }
}
