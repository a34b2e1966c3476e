//! All objects of one kind, by name and in memory: their records, their state, and the order of their changes
//! ([`feed`](crate::feed)).
//!
//! A [`Kind`] adds its own parts: a state beside the record, an index over all objects, and a view for clients. All
//! three are behind the lock of the registry, so that a decision about several of them is made at one time.
//!
//! Invariants:
//! - Each change of a view has a revision, and nothing else has one. [`Objects::touch`] notes such a change.
//! - A name is taken from [`Objects::add`] until the object is forgotten.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use tokio::sync::watch;
use uuid::Uuid;
use vmmd_api::v1::ObjectMetadata;
use vmmd_host::{
    failure::{self, Failure},
    text,
};
use vmmd_store::{DeletionRecords, DiskRecord, ImageRecord, NetworkRecord, SnapshotRecord, Tombstone};

use crate::feed::{Feed, Position};

/// One kind of objects.
pub trait Kind: fmt::Debug + Sized + Send + Sync + 'static {
    /// Name of the kind: "disk".
    const NAME: &'static str;
    /// Name with its article, for messages: "a disk".
    const A: &'static str;
    /// Reason of a failure: the name is taken.
    const EXISTS: &'static str;
    /// Reason of a failure: no object has the name.
    const NOT_FOUND: &'static str;
    /// The stored form of an object.
    type Record: Record;
    /// The daemon's knowledge of an object, beside its record.
    type State: fmt::Debug + Default + Send;
    /// The daemon's knowledge of all objects together.
    type Index: fmt::Debug + Default + Send;
    /// The clients' view of an object, beside its record.
    type View: Clone + fmt::Debug + PartialEq + Send + Sync;

    /// The view of an object at this time.
    fn view(objects: &Objects<Self>, record: &Self::Record, state: &Self::State) -> Self::View;

    /// Whether clients see the object.
    fn is_shown(_: &Self::Record) -> bool {
        true
    }

    /// Adds a record to the index.
    fn enter(_: &mut Self::Index, _: &Self::Record) {}

    /// Removes a record from the index.
    fn leave(_: &mut Self::Index, _: &Self::Record) {}

    /// No object has the name.
    fn not_found(name: &str) -> Failure {
        let message = format!(
            "there is no {} \"{}\" on this node",
            Self::NAME,
            text::brief(name)
        );
        Failure::new(failure::Kind::NotFound, Self::NOT_FOUND, message)
    }
}

/// The stored record of an object.
pub trait Record: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// UUID, 16 bytes.
    fn uid(&self) -> &[u8];
    /// Unique among the objects of the kind.
    fn name(&self) -> &str;
    /// The metadata for clients.
    fn metadata(&self) -> ObjectMetadata;
    /// Run and revision at which the object was made.
    fn made(&self) -> (u64, u64);
    /// Sets the generation, run and revision of a new object.
    fn begin(&mut self, generation: u64, made: (u64, u64));
}

macro_rules! metadata {
    ($record:expr, $generation:expr) => {
        ObjectMetadata {
            name: $record.name.clone(),
            uid: Uuid::from_slice(&$record.uid).unwrap_or_default().to_string(),
            generation: $generation,
            labels: $record.labels.clone(),
            annotations: $record.annotations.clone(),
            owner: $record.owner.clone(),
            create_time: text::timestamp($record.created_ms),
        }
    };
}

macro_rules! records {
    ($($record:ty),*) => {
        $(impl Record for $record {
            fn uid(&self) -> &[u8] {
                &self.uid
            }

            fn name(&self) -> &str {
                &self.name
            }

            fn metadata(&self) -> ObjectMetadata {
                metadata!(self, self.generation.max(1))
            }

            fn made(&self) -> (u64, u64) {
                (self.made_run, self.made_revision)
            }

            fn begin(&mut self, generation: u64, made: (u64, u64)) {
                self.generation = generation;
                (self.made_run, self.made_revision) = made;
            }
        })*
    };
}
records!(DiskRecord, ImageRecord, NetworkRecord);

impl Record for SnapshotRecord {
    fn uid(&self) -> &[u8] {
        &self.uid
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn metadata(&self) -> ObjectMetadata {
        metadata!(self, 1)
    }

    /// It is not stored: snapshots have no watch.
    fn made(&self) -> (u64, u64) {
        (0, 0)
    }

    fn begin(&mut self, _: u64, _: (u64, u64)) {}
}

/// An object at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen<K: Kind> {
    /// Its record.
    pub record: K::Record,
    /// The clients' view beside the record.
    pub view: K::View,
    /// Revision of this state.
    pub revision: u64,
}

/// All objects at a time.
#[derive(Clone, Debug)]
pub struct Snapshot<K: Kind> {
    /// Sorted by name.
    pub objects: Vec<Arc<Seen<K>>>,
    /// Which time.
    pub at: Position,
}

/// All objects of a kind.
#[derive(Debug)]
pub struct Registry<K: Kind>(Mutex<Objects<K>>);

/// The objects while the registry is locked.
#[derive(Debug)]
pub struct Objects<K: Kind> {
    slots: BTreeMap<String, Slot<K>>,
    /// Names by UUID.
    names: BTreeMap<Vec<u8>, String>,
    /// See [`Kind::Index`].
    pub index: K::Index,
    /// Counts each object that clients saw and do not see any more.
    removals: u64,
    feed: Feed,
}

#[derive(Debug)]
struct Slot<K: Kind> {
    record: K::Record,
    state: K::State,
    /// Revision of the last change.
    revision: u64,
    /// The object since then, after the first request of a client: all watchers share it.
    seen: OnceLock<Arc<Seen<K>>>,
}

impl<K: Kind> Default for Registry<K> {
    fn default() -> Self {
        Self::new(1, [(1, 0)].into(), DeletionRecords::default())
    }
}

impl<K: Kind> Registry<K> {
    /// A registry without objects; see [`Feed::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: DeletionRecords) -> Self {
        Self(Mutex::new(Objects {
            slots: BTreeMap::new(),
            names: BTreeMap::new(),
            index: K::Index::default(),
            removals: 0,
            feed: Feed::new(run, nonces, history),
        }))
    }

    /// The objects, for decisions about more than one of them.
    pub fn lock(&self) -> MutexGuard<'_, Objects<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an object that clients see.
    ///
    /// # Errors
    ///
    /// No object has the name.
    pub fn see(&self, name: &str) -> Result<Arc<Seen<K>>, Failure> {
        let objects = self.lock();
        let slot = objects.slots.get(name).filter(|slot| slot.is_shown());
        slot.map(|slot| objects.see(slot))
            .ok_or_else(|| K::not_found(name))
    }

    /// Returns the object with this UUID, if clients see it.
    pub fn find(&self, uid: &[u8]) -> Option<Arc<Seen<K>>> {
        let objects = self.lock();
        let slot = objects.slots.get(objects.names.get(uid)?)?;
        slot.is_shown().then(|| objects.see(slot))
    }

    /// Objects after a name, and where in the order of changes that was.
    pub fn after(&self, name: Option<&str>) -> Snapshot<K> {
        self.lock().after(name)
    }

    /// Wakes up with each change.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.lock().feed.news()
    }

    /// See [`Feed::nonce`].
    pub fn nonce(&self, run: u64) -> Option<u64> {
        self.lock().feed.nonce(run)
    }

    /// Adds an object of an earlier daemon.
    pub fn restore(&self, record: K::Record) {
        self.lock().put(record);
    }

    /// Replaces the record of an object. A forgotten object stays forgotten.
    pub fn settle(&self, record: K::Record) {
        let mut objects = self.lock();
        if objects.names.contains_key(record.uid()) {
            objects.put(record);
        }
    }

    /// Begins to forget an object. Returns the record for the store. [`Self::forget`] follows.
    pub fn bury(&self, record: &K::Record) -> Tombstone {
        self.lock().bury(record.metadata())
    }

    /// Notes that an object is gone; `tombstone` is what [`Self::bury`] returned.
    pub fn forget(&self, uid: &[u8], tombstone: Tombstone) {
        let mut objects = self.lock();
        objects.remove(uid);
        objects.buried(tombstone);
    }
}

impl<K: Kind> Objects<K> {
    /// The record of a name.
    pub fn get(&self, name: &str) -> Option<&K::Record> {
        self.slots.get(name).map(|slot| &slot.record)
    }

    /// The record with this UUID.
    pub fn by_uid(&self, uid: &[u8]) -> Option<&K::Record> {
        self.get(self.names.get(uid)?)
    }

    /// Whether clients see the object with this UUID.
    pub fn shows(&self, uid: &[u8]) -> bool {
        let slot = self.names.get(uid).and_then(|name| self.slots.get(name));
        slot.is_some_and(Slot::is_shown)
    }

    /// The name of the object with this UUID.
    pub fn name_of(&self, uid: &[u8]) -> Option<&str> {
        self.names.get(uid).map(String::as_str)
    }

    /// All records, by name.
    pub fn records(&self) -> impl Iterator<Item = &K::Record> {
        self.slots.values().map(|slot| &slot.record)
    }

    /// The state of a name.
    pub fn state(&self, name: &str) -> Option<&K::State> {
        self.slots.get(name).map(|slot| &slot.state)
    }

    /// All objects with their states, by name.
    pub fn states(&self) -> impl Iterator<Item = (&K::Record, &K::State)> {
        self.slots.values().map(|slot| (&slot.record, &slot.state))
    }

    /// Changes the record or the state of an object, which clients see.
    pub fn change(&mut self, name: &str, change: impl FnOnce(&mut K::Record, &mut K::State)) {
        if let Some(slot) = self.slots.get_mut(name) {
            change(&mut slot.record, &mut slot.state);
            self.touch(name);
        }
    }

    /// Notes that the view of an object has changed.
    pub fn touch(&mut self, name: &str) {
        if let Some(slot) = self.slots.get_mut(name) {
            slot.revision = self.feed.change();
            slot.seen = OnceLock::new();
            self.removals += u64::from(!slot.is_shown());
        }
    }

    /// Refuses a name that is taken.
    ///
    /// # Errors
    ///
    /// An object has the name.
    pub fn check_free(&self, name: &str) -> Result<(), Failure> {
        if !self.slots.contains_key(name) {
            return Ok(());
        }
        let message = format!("there is {} \"{name}\" already", K::A);
        Err(Failure::new(failure::Kind::Exists, K::EXISTS, message))
    }

    /// Gives a new object its generation and the place of its creation in the order of changes.
    pub fn begin(&mut self, record: &mut K::Record) {
        let made = (self.feed.run(), self.feed.change());
        record.begin(self.feed.first_generation(), made);
    }

    /// Adds a new object. Returns its record with generation, run and revision.
    pub fn add(&mut self, mut record: K::Record) -> K::Record {
        self.begin(&mut record);
        self.put(record.clone());
        record
    }

    /// Adds an object, or replaces its record.
    pub fn put(&mut self, record: K::Record) {
        let name = record.name().to_owned();
        let state = self.take_out(&name).unwrap_or_default();
        K::enter(&mut self.index, &record);
        self.names.insert(record.uid().to_vec(), name.clone());
        let slot = Slot {
            record,
            state,
            revision: self.feed.change(),
            seen: OnceLock::new(),
        };
        self.removals += u64::from(!slot.is_shown());
        self.slots.insert(name, slot);
    }

    /// Removes the object with this UUID. Returns its record.
    pub fn remove(&mut self, uid: &[u8]) -> Option<K::Record> {
        let name = self.names.get(uid)?.clone();
        let record = self.get(&name).cloned();
        self.take_out(&name);
        self.removals += 1;
        record
    }

    /// Begins a deletion. Returns the record for the store. [`Self::buried`] or [`Self::kept`] follows.
    pub fn bury(&mut self, metadata: ObjectMetadata) -> Tombstone {
        self.feed.bury(metadata)
    }

    /// Ends a deletion: from now on watchers can see it.
    pub fn buried(&mut self, tombstone: Tombstone) {
        self.feed.buried(tombstone);
    }

    /// A deletion did not come about.
    pub fn kept(&mut self, tombstone: &Tombstone) {
        self.feed.kept(tombstone);
    }

    fn take_out(&mut self, name: &str) -> Option<K::State> {
        let slot = self.slots.remove(name)?;
        self.names.remove(slot.record.uid());
        K::leave(&mut self.index, &slot.record);
        Some(slot.state)
    }

    /// The order of changes.
    pub fn feed(&self) -> &Feed {
        &self.feed
    }

    /// A number that is another one when an object that clients saw is gone.
    pub fn removals(&self) -> u64 {
        self.removals
    }

    /// The objects that have changed after a revision, or all, in the order of their changes.
    pub fn changed(&self, since: Option<u64>) -> Vec<Arc<Seen<K>>> {
        let changed = |slot: &&Slot<K>| since.is_none_or(|since| slot.revision > since);
        let slots = self.slots.values().filter(changed);
        let mut objects: Vec<_> = slots
            .filter(|slot| slot.is_shown())
            .map(|slot| self.see(slot))
            .collect();
        objects.sort_by_key(|seen| seen.revision);
        objects
    }

    fn after(&self, name: Option<&str>) -> Snapshot<K> {
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let slots = self.slots.range::<str, _>((from, Bound::Unbounded));
        let shown = slots.map(|(_, slot)| slot).filter(|slot| slot.is_shown());
        Snapshot {
            objects: shown.map(|slot| self.see(slot)).collect(),
            at: self.feed.position(),
        }
    }

    fn see(&self, slot: &Slot<K>) -> Arc<Seen<K>> {
        let seen = || Seen {
            record: slot.record.clone(),
            view: K::view(self, &slot.record, &slot.state),
            revision: slot.revision,
        };
        Arc::clone(slot.seen.get_or_init(|| Arc::new(seen())))
    }
}

impl<K: Kind> Slot<K> {
    fn is_shown(&self) -> bool {
        K::is_shown(&self.record)
    }
}

#[cfg(test)]
mod tests;
