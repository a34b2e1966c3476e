//! All snapshots of the node by name.

mod quota;

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;
use vmmd_host::failure::Failure;
use vmmd_objects::registry::{self, Objects, Registry};
use vmmd_store::{SnapshotDisk, SnapshotRecord, SnapshotStage};

use crate::config::SnapshotLimits;

/// The snapshots.
#[derive(Debug, Default)]
pub struct Snapshots {
    /// All snapshots. Clients see the complete ones.
    pub registry: Registry<SnapshotKind>,
    /// Snapshots that wait until a VM's disks are quiet, by the VM's UUID.
    waiting: Mutex<HashMap<Vec<u8>, Waiting>>,
    /// Held while a VM is made of one: its NICs' addresses are compared with those of all VMs.
    pub making: tokio::sync::Mutex<()>,
}

/// Snapshots of VMs.
#[derive(Clone, Debug, PartialEq)]
pub enum SnapshotKind {}

impl registry::Kind for SnapshotKind {
    const NAME: &'static str = "snapshot";
    const A: &'static str = "a snapshot";
    const EXISTS: &'static str = "SNAPSHOT_EXISTS";
    const NOT_FOUND: &'static str = "SNAPSHOT_NOT_FOUND";
    type Record = SnapshotRecord;
    /// How many exports and restores read the snapshot.
    type State = usize;
    type Index = ();
    type View = ();

    fn view(_: &Objects<Self>, _: &SnapshotRecord, _: &usize) {}

    fn is_shown(record: &SnapshotRecord) -> bool {
        is_ready(record)
    }
}

#[derive(Debug)]
struct Waiting {
    /// Number of the request to the `vmm`.
    number: u64,
    quiet: oneshot::Sender<()>,
}

impl Snapshots {
    /// All snapshots that are complete, by name.
    pub fn list(&self) -> Vec<SnapshotRecord> {
        let snapshots = self.registry.lock();
        snapshots
            .records()
            .filter(|record| is_ready(record))
            .cloned()
            .collect()
    }

    /// Reserves the name of a snapshot that is to be made, and the room that its record says. Refused while another one of the same VM is being
    /// made, and when there would be more than `limits` allow.
    pub fn reserve(&self, record: &SnapshotRecord, limits: &SnapshotLimits) -> Result<(), Failure> {
        let mut snapshots = self.registry.lock();
        snapshots.check_free(&record.name)?;
        // One that is being deleted was complete.
        let is_taken = |it: &&SnapshotRecord| !is_ready(it) && it.completed_ms == 0;
        let of_vm = |it: &&SnapshotRecord| it.vm_uid == record.vm_uid;
        let other = snapshots.records().filter(is_taken).find(of_vm);
        if let Some(other) = other {
            return Err(under_way(&record.vm_name, &other.name));
        }
        quota::check_count(snapshots.records(), record, limits)?;
        quota::check_room(snapshots.records(), record, limits)?;
        snapshots.put(record.clone());
        Ok(())
    }

    /// Notes that a snapshot that is being made takes the room that its record says. Refused when that is more than `limits` leave.
    pub fn charge(&self, record: &SnapshotRecord, limits: &SnapshotLimits) -> Result<(), Failure> {
        let mut snapshots = self.registry.lock();
        quota::check_room(snapshots.records(), record, limits)?;
        snapshots.change(&record.name, |held, _| {
            held.allocated_bytes = record.allocated_bytes;
        });
        Ok(())
    }

    /// Returns a snapshot and protects it from deletion until [`end_reading`](Self::end_reading).
    pub fn begin_reading(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let mut snapshots = self.registry.lock();
        let record = ready(&snapshots, name)?;
        snapshots.change(name, |_, readers| *readers += 1);
        Ok(record)
    }

    /// An export or a restore of a snapshot has ended.
    pub fn end_reading(&self, name: &str) {
        let mut snapshots = self.registry.lock();
        snapshots.change(name, |_, readers| *readers = readers.saturating_sub(1));
    }

    /// Takes a snapshot out of use, for good unless its record is put back.
    pub fn begin_delete(&self, name: &str) -> Result<SnapshotRecord, Failure> {
        let mut snapshots = self.registry.lock();
        let record = ready(&snapshots, name)?;
        if snapshots.state(name).is_some_and(|readers| *readers > 0) {
            let message = format!(
                "snapshot \"{name}\" is being exported or restored: wait for the end of that, or end it"
            );
            return Err(Failure::precondition("SNAPSHOT_IN_USE", message));
        }
        snapshots.change(name, |record, _| record.stage = SnapshotStage::Partial.into());
        Ok(record)
    }

    /// Sets the record of a snapshot.
    pub fn put(&self, record: SnapshotRecord) {
        self.registry.lock().put(record);
    }

    /// Notes that a snapshot is gone; `uid` is its UUID.
    pub fn forget(&self, uid: &[u8]) {
        self.registry.lock().remove(uid);
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
        self.with_disk(|it| it.backing == disk)
    }

    /// Name of a snapshot that has an overlay of this image.
    pub fn needs_image(&self, image: &[u8]) -> Option<String> {
        self.with_disk(|it| it.image == image)
    }

    fn with_disk(&self, wanted: impl Fn(&SnapshotDisk) -> bool) -> Option<String> {
        let snapshots = self.registry.lock();
        let mut with = snapshots
            .records()
            .filter(|record| record.disks.iter().any(&wanted));
        with.next().map(|record| record.name.clone())
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ready(snapshots: &Objects<SnapshotKind>, name: &str) -> Result<SnapshotRecord, Failure> {
    let found = snapshots.get(name).filter(|record| is_ready(record));
    found
        .cloned()
        .ok_or_else(|| <SnapshotKind as registry::Kind>::not_found(name))
}

fn is_ready(record: &SnapshotRecord) -> bool {
    record.stage() == SnapshotStage::Ready
}

fn under_way(vm: &str, name: &str) -> Failure {
    let message = format!("snapshot \"{name}\" of VM \"{vm}\" is being taken: wait until it is complete");
    Failure::precondition("SNAPSHOT_UNDER_WAY", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notice_of_another_snapshot_is_ignored() {
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
