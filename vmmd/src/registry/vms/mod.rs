//! All VMs of the node by name, with the last state that each actor published, and a feed of
//! changes.
//!
//! A read does not wait for an actor. A state is stored and sent to the watchers under one lock, so
//! that a watcher receives each change after its first snapshot exactly once and in order.
//!
//! Each change has a revision ([`vmmd_objects::feed`]).

pub mod command;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Notify, broadcast, watch};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_objects::feed::{Deletion, Expired, Feed, Position};
use vmmd_store::{DeletionRecords, Tombstone};

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
}

#[derive(Debug)]
struct Inner {
    by_name: BTreeMap<String, Slot>,
    /// Names of VMs that are being made.
    reserved: BTreeSet<String>,
    feed: Feed,
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
        Self::new(1, [(1, 0)].into(), DeletionRecords::default())
    }
}

impl vmmd_network::Users for Vms {
    fn vms(&self) -> Vec<Arc<v1::Vm>> {
        self.list()
    }
}

impl Vms {
    /// Creates a registry without VMs; see [`Feed::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: DeletionRecords) -> Self {
        let vms = Inner {
            by_name: BTreeMap::new(),
            reserved: BTreeSet::new(),
            feed: Feed::new(run, nonces, history),
        };
        Self {
            vms: Mutex::new(vms),
            released: Notify::new(),
            nics_gone: Notify::new(),
            changes: broadcast::channel(CHANGES).0,
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
        (page, found.next().is_some(), vms.feed.position())
    }

    /// All VMs, and all changes from then on.
    pub fn subscribe(&self) -> (Snapshot, broadcast::Receiver<Change>) {
        let vms = self.vms();
        (vms.snapshot(), self.changes.subscribe())
    }

    /// The same, with the deletions since `position`, the oldest first.
    pub fn resume(
        &self,
        position: Position,
    ) -> Result<(Vec<Deletion>, Snapshot, broadcast::Receiver<Change>), Expired> {
        let vms = self.vms();
        let buried = vms.feed.deletions_since(position)?;
        Ok((buried, vms.snapshot(), self.changes.subscribe()))
    }

    /// Nonce that distinguishes a run of the daemon from runs of other stores, if the run is known.
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.vms().feed.nonce(run)
    }

    /// Run of the daemon and revision.
    pub fn now(&self) -> (u64, u64) {
        let Position { run, revision, .. } = self.vms().feed.position();
        (run, revision)
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
        let revision = vms.feed.change();
        // The exact revision of a VM of this run is this one.
        let run = vms.feed.run();
        let made = if made.0 == run { (run, revision) } else { made };
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
        self.remove(name, tombstone);
    }

    /// Publishes a VM's new state.
    pub fn publish(&self, publisher: &watch::Sender<Arc<v1::Vm>>, state: Arc<v1::Vm>) {
        let mut vms = self.vms();
        let revision = vms.feed.change();
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
        Tombstone {
            owned,
            ..self.vms().feed.bury(metadata)
        }
    }

    /// The last migration up to which a VM that was deleted was this node's, as far as that is remembered; 0 when it never was.
    pub fn owned(&self, uid: Uuid) -> u64 {
        self.vms().feed.owned(&uid.to_string())
    }

    /// The generation that a new VM begins with: above that of each VM that was deleted, also of one that had its name.
    pub fn first_generation(&self) -> u64 {
        self.vms().feed.first_generation()
    }

    /// Takes the beginning of a deletion back.
    pub fn unbury(&self, tombstone: &Tombstone) {
        self.vms().feed.kept(tombstone);
    }

    /// Removes a VM whose deletion is in the store.
    pub fn remove(&self, name: &str, tombstone: Tombstone) {
        let mut vms = self.vms();
        let Some(slot) = vms.by_name.remove(name) else {
            vms.feed.kept(&tombstone);
            return;
        };
        let vm = slot.state();
        if !nics(&vm).is_empty() {
            self.nics_gone.notify_one();
        }
        vms.feed.buried(tombstone);
        self.tell(&vms, ChangeKind::Deleted, vm);
    }

    fn tell(&self, vms: &Inner, kind: ChangeKind, vm: Arc<v1::Vm>) {
        let at = vms.feed.position();
        let _ = self.changes.send(Change { kind, vm, at });
    }

    fn vms(&self) -> MutexGuard<'_, Inner> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn snapshot(&self) -> Snapshot {
        let seen = self.by_name.values().map(|slot| Seen {
            vm: slot.state(),
            made: slot.made,
            revision: slot.revision,
        });
        Snapshot {
            vms: seen.collect(),
            at: self.feed.position(),
        }
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
