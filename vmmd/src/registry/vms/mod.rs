//! All VMs of the node by name, with the last state that each actor published, and a feed of
//! changes.
//!
//! A read does not wait for an actor. A state is stored and sent to the watchers under one lock, so
//! that a watcher receives each change after its first snapshot exactly once and in order.
//!
//! Each change has a revision. Revisions grow from 1 in each run of the daemon. The registry
//! remembers deletions, including deletions of earlier runs ([`vmmd_store`]), so that a client
//! that knows the state at a revision can receive the changes since. A deletion has a first
//! revision before it is written to the store and another one when watchers receive it. A later
//! daemon must assume that a watcher with only the first revision has not seen the deletion.

pub mod command;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Bound,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, broadcast, watch};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_objects::feed::{Expired, Position};
use vmmd_store::{HistoryRecords, MAX_TOMBSTONES, Tombstone};

use crate::registry::vms::command::Mailbox;

/// Changes kept for a slow watcher. A watcher that falls behind further starts with a new snapshot.
const CHANGES: usize = 512;

/// The VMs.
#[derive(Debug)]
pub struct Vms {
    vms: Mutex<Inner>,
    /// Some name is not reserved any more.
    released: Notify,
    /// Some NIC is gone, or a VM that had some.
    nics_gone: Notify,
    changes: broadcast::Sender<Change>,
    /// Number of the daemon's current run.
    run: u64,
    /// Nonce of each run of the daemon, to distinguish it from runs of other stores.
    nonces: BTreeMap<u64, u64>,
}

#[derive(Debug, Default)]
struct Inner {
    by_name: BTreeMap<String, Slot>,
    /// Names of VMs that are being made.
    reserved: BTreeSet<String>,
    /// Revision of the last change.
    revision: u64,
    /// First revisions of deletions that have not been told yet, with [`Buried::owned`].
    being_buried: BTreeMap<u64, u64>,
    /// Deletions, the oldest first.
    tombstones: VecDeque<Buried>,
    /// The last one that was forgotten.
    trimmed: (u64, u64),
    /// The greatest generation of a VM that was deleted.
    generation_floor: u64,
}

#[derive(Debug)]
struct Slot {
    entry: Entry,
    /// Run and revision of its creation.
    made: (u64, u64),
    /// Revision of its current state.
    revision: u64,
    /// Number of failures of the VM's task.
    failures: u32,
}

/// How a VM is reached.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The VM.
    pub uid: Uuid,
    /// Its actor.
    pub mailbox: Mailbox,
    /// Last state that the actor published.
    pub state: watch::Receiver<Arc<v1::Vm>>,
}

/// Change of a VM.
#[derive(Clone, Debug)]
pub struct Change {
    /// What.
    pub kind: ChangeKind,
    /// Its state after that, or the last one.
    pub vm: Arc<v1::Vm>,
    /// Where that is in the order of changes.
    pub at: Position,
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// It is new.
    Added,
    /// Its state is another.
    Modified,
    /// It is gone.
    Deleted,
}

/// The state of a VM at a time.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What it is.
    pub vm: Arc<v1::Vm>,
    /// Run and revision of its creation.
    pub made: (u64, u64),
    /// Of this state.
    pub revision: u64,
}

/// A VM that was deleted.
#[derive(Clone, Debug)]
pub struct Buried {
    /// Last known metadata.
    pub vm: Arc<v1::Vm>,
    /// Run and revision at which watchers received the deletion; for an earlier run, its first
    /// revision.
    pub at: (u64, u64),
    /// The last migration up to which the VM was this node's; 0 when it never was.
    pub owned: u64,
}

/// All VMs at a time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Sorted by name.
    pub vms: Vec<Seen>,
    /// Which time.
    pub at: Position,
}

/// Reservation of a name until it is dropped.
#[derive(Debug)]
pub struct Reservation<'a> {
    vms: &'a Vms,
    name: String,
}

impl Default for Vms {
    fn default() -> Self {
        let nonces = [(1, 0)].into();
        Self::new(HistoryRecords {
            run: 1,
            nonces,
            ..HistoryRecords::default()
        })
    }
}

impl vmmd_network::Users for Vms {
    fn vms(&self) -> Vec<Arc<v1::Vm>> {
        self.list()
    }
}

impl Vms {
    /// Creates a registry without VMs, with the history of the store.
    pub fn new(history: HistoryRecords) -> Self {
        let tombstones = history.tombstones.into_iter().map(|tombstone| Buried {
            at: (tombstone.run, tombstone.revision),
            owned: tombstone.owned,
            vm: Arc::new(v1::Vm {
                metadata: tombstone.metadata.map(Into::into),
                ..v1::Vm::default()
            }),
        });
        let vms = Inner {
            tombstones: tombstones.collect(),
            trimmed: history.trimmed,
            generation_floor: history.generation_floor,
            ..Inner::default()
        };
        Self {
            vms: Mutex::new(vms),
            released: Notify::new(),
            nics_gone: Notify::new(),
            changes: broadcast::channel(CHANGES).0,
            run: history.run,
            nonces: history.nonces,
        }
    }

    /// The VM of this name.
    pub fn get(&self, name: &str) -> Option<Entry> {
        self.vms().by_name.get(name).map(|slot| slot.entry.clone())
    }

    /// The VM with this UUID.
    pub fn find(&self, uid: Uuid) -> Option<Entry> {
        let vms = self.vms();
        let mut slots = vms.by_name.values();
        slots
            .find(|slot| slot.entry.uid == uid)
            .map(|slot| slot.entry.clone())
    }

    /// The states of all VMs, by name.
    pub fn list(&self) -> Vec<Arc<v1::Vm>> {
        self.vms().by_name.values().map(Slot::state).collect()
    }

    /// The first `limit` VMs after a name of which `wanted` holds, whether there are more, and where in the order of
    /// changes that was.
    pub fn page(
        &self,
        after: Option<&str>,
        limit: usize,
        wanted: impl Fn(&v1::Vm) -> bool,
    ) -> (Vec<Arc<v1::Vm>>, bool, Position) {
        let vms = self.vms();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let found = vms.by_name.range::<str, _>((from, Bound::Unbounded));
        let mut found = found.map(|(_, slot)| slot.state()).filter(|vm| wanted(vm));
        let page = found.by_ref().take(limit).collect();
        (page, found.next().is_some(), self.position(&vms))
    }

    /// All VMs, and all changes from then on.
    pub fn subscribe(&self) -> (Snapshot, broadcast::Receiver<Change>) {
        let vms = self.vms();
        (self.snapshot(&vms), self.changes.subscribe())
    }

    /// The same, with the deletions since `position`, the oldest first.
    pub fn resume(
        &self,
        position: Position,
    ) -> Result<(Vec<Buried>, Snapshot, broadcast::Receiver<Change>), Expired> {
        let vms = self.vms();
        let Position {
            run,
            revision,
            buried,
        } = position;
        if run > self.run || (run == self.run && revision > vms.revision) {
            return Err(Expired);
        }
        // Deletions of this run are remembered with the revision at which they were told.
        let known = (run, if run == self.run { revision } else { buried });
        if vms.trimmed > known {
            return Err(Expired);
        }
        let since = vms.tombstones.iter().filter(|buried| buried.at > known);
        Ok((
            since.cloned().collect(),
            self.snapshot(&vms),
            self.changes.subscribe(),
        ))
    }

    /// Nonce that distinguishes a run of the daemon from runs of other stores, if the run is known.
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.nonces.get(&run).copied()
    }

    /// Run of the daemon and revision.
    pub fn now(&self) -> (u64, u64) {
        (self.run, self.vms().revision)
    }

    /// Reserves the name of a new VM; `None` if the name is taken. Waits for another creation of
    /// this name, because its result decides.
    pub async fn reserve(&self, name: &str) -> Option<Reservation<'_>> {
        loop {
            let mut released = pin!(self.released.notified());
            // Releases from here on wake this task.
            released.as_mut().enable();
            {
                let mut vms = self.vms();
                if vms.by_name.contains_key(name) {
                    return None;
                }
                if vms.reserved.insert(name.to_owned()) {
                    return Some(Reservation {
                        vms: self,
                        name: name.to_owned(),
                    });
                }
            }
            released.await;
        }
    }

    /// Adds a VM, or replaces a failed actor; `made` is a run and revision at or before the VM's
    /// creation.
    pub fn insert(&self, name: &str, entry: Entry, made: (u64, u64)) {
        let mut vms = self.vms();
        vms.revision += 1;
        // The exact revision of a VM of this run is this one.
        let made = if made.0 == self.run {
            (self.run, vms.revision)
        } else {
            made
        };
        let revision = vms.revision;
        let before = vms.by_name.get(name);
        let (kind, made, failures) = match before {
            Some(before) => (ChangeKind::Modified, before.made, before.failures),
            None => (ChangeKind::Added, made, 0),
        };
        let slot = Slot {
            entry,
            made,
            revision,
            failures,
        };
        let vm = slot.state();
        vms.by_name.insert(name.to_owned(), slot);
        self.tell(&vms, kind, vm);
    }

    /// Counts a failure of a VM's task. Returns the number of failures.
    pub fn failed(&self, name: &str) -> u32 {
        let mut vms = self.vms();
        vms.by_name.get_mut(name).map_or(0, |slot| {
            slot.failures = slot.failures.saturating_add(1);
            slot.failures
        })
    }

    /// Removes a VM whose record is gone already.
    pub fn drop_out(&self, name: &str) {
        let metadata = self.vms().by_name.get(name).map(Slot::state);
        let metadata = metadata.and_then(|vm| vm.metadata.clone()).unwrap_or_default();
        let tombstone = self.bury(metadata, 0);
        self.remove(name, tombstone.revision);
    }

    /// Publishes a VM's new state.
    pub fn publish(&self, publisher: &watch::Sender<Arc<v1::Vm>>, state: Arc<v1::Vm>) {
        let mut vms = self.vms();
        vms.revision += 1;
        let revision = vms.revision;
        let before = publisher.send_replace(Arc::clone(&state));
        if !nics(&before).is_subset(&nics(&state)) {
            self.nics_gone.notify_one();
        }
        let name = state.metadata.as_ref().map_or("", |metadata| &metadata.name);
        if let Some(slot) = vms.by_name.get_mut(name) {
            slot.revision = revision;
        }
        self.tell(&vms, ChangeKind::Modified, state);
    }

    /// Waits until a NIC is gone since this was last waited for, of a VM or with it.
    pub async fn nic_gone(&self) {
        self.nics_gone.notified().await;
    }

    /// Begins a deletion. Returns the record for the store. `owned` is the last migration up to
    /// which the VM belonged to this node. [`Self::remove`] follows, or [`Self::unbury`].
    pub fn bury(&self, metadata: v1::ObjectMetadata, owned: u64) -> Tombstone {
        let mut vms = self.vms();
        vms.revision += 1;
        let revision = vms.revision;
        vms.being_buried.insert(revision, owned);
        vms.generation_floor = vms.generation_floor.max(metadata.generation);
        Tombstone {
            run: self.run,
            revision,
            metadata: Some(metadata.into()),
            owned,
            moved: false,
        }
    }

    /// The last migration up to which a VM that was deleted was this node's, as far as that is remembered; 0 when it never was.
    pub fn owned(&self, uid: Uuid) -> u64 {
        let uid = uid.to_string();
        let vms = self.vms();
        let of_it = vms.tombstones.iter().filter(|buried| {
            let metadata = buried.vm.metadata.as_ref();
            metadata.is_some_and(|it| it.uid == uid)
        });
        of_it.map(|buried| buried.owned).max().unwrap_or_default()
    }

    /// The generation that a new VM begins with: above that of each VM that was deleted, also of one that had its name.
    pub fn first_generation(&self) -> u64 {
        self.vms().generation_floor.saturating_add(1)
    }

    /// Takes the beginning of a deletion back.
    pub fn unbury(&self, revision: u64) {
        self.vms().being_buried.remove(&revision);
    }

    /// Removes a VM whose deletion is in the store; `buried` is the revision that it has there.
    pub fn remove(&self, name: &str, buried: u64) {
        let mut vms = self.vms();
        let owned = vms.being_buried.remove(&buried).unwrap_or_default();
        let Some(slot) = vms.by_name.remove(name) else {
            return;
        };
        vms.revision += 1;
        let vm = slot.state();
        if !nics(&vm).is_empty() {
            self.nics_gone.notify_one();
        }
        // Only the metadata is kept, as after a restart, to save memory.
        let remembered = v1::Vm {
            metadata: vm.metadata.clone(),
            ..v1::Vm::default()
        };
        let at = (self.run, vms.revision);
        vms.tombstones.push_back(Buried {
            vm: Arc::new(remembered),
            at,
            owned,
        });
        while u64::try_from(vms.tombstones.len()).is_ok_and(|count| count > MAX_TOMBSTONES) {
            if let Some(oldest) = vms.tombstones.pop_front() {
                vms.trimmed = oldest.at;
            }
        }
        self.tell(&vms, ChangeKind::Deleted, vm);
    }

    fn tell(&self, vms: &Inner, kind: ChangeKind, vm: Arc<v1::Vm>) {
        let at = self.position(vms);
        let _ = self.changes.send(Change { kind, vm, at });
    }

    fn position(&self, vms: &Inner) -> Position {
        let pending = vms.being_buried.keys().next();
        Position {
            run: self.run,
            revision: vms.revision,
            buried: pending.map_or(vms.revision, |first| first.saturating_sub(1)),
        }
    }

    fn snapshot(&self, vms: &Inner) -> Snapshot {
        let seen = vms.by_name.values().map(|slot| Seen {
            vm: slot.state(),
            made: slot.made,
            revision: slot.revision,
        });
        Snapshot {
            vms: seen.collect(),
            at: self.position(vms),
        }
    }

    fn vms(&self) -> MutexGuard<'_, Inner> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names of a VM's NICs, each with that of the network that it is in: of its spec, and of its machine.
fn nics(vm: &v1::Vm) -> BTreeSet<(&str, &str)> {
    let wanted = vm.spec.iter().flat_map(|spec| &spec.nics);
    let wanted = wanted.filter_map(|nic| match &nic.attachment {
        Some(v1::nic_spec::Attachment::Network(network)) => Some((nic.name.as_str(), network.as_str())),
        _ => None,
    });
    let there = vm.status.iter().flat_map(|status| &status.nics);
    let there = there.map(|nic| (nic.name.as_str(), nic.network.as_str()));
    wanted
        .chain(there.filter(|(_, network)| !network.is_empty()))
        .collect()
}

impl Slot {
    fn state(&self) -> Arc<v1::Vm> {
        Arc::clone(&self.entry.state.borrow())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.vms.vms().reserved.remove(&self.name);
        self.vms.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
