//! All images of the node by name.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{Semaphore, SemaphorePermit, watch};
use uuid::Uuid;
use vmmd_api::v1;
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::feed::{Buried, Expired, Feed, Position};
use vmmd_objects::operation::Pending;
use vmmd_store::{BuriedRecords, ImageRecord, ImageStage, Tombstone};

/// Most imports of one caller under way at once: an agent of a cluster has all of the node's tenants.
const IMPORTS: usize = 64;
/// Images that are made at once: each has a process with up to four threads and 2 GiB.
const TURNS: usize = 4;

/// The images.
#[derive(Debug)]
pub struct Images {
    inner: Mutex<Inner>,
    /// Held while files get or lose the name of their content.
    names: tokio::sync::Mutex<()>,
    /// For making images.
    turns: Semaphore,
}

#[derive(Debug)]
struct Inner {
    images: BTreeMap<String, Slot>,
    feed: Feed,
}

#[derive(Debug)]
struct Slot {
    record: ImageRecord,
    /// The import under way.
    import: Option<Pending>,
    revision: u64,
}

/// An image at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Record of the image.
    pub record: ImageRecord,
    /// Id of the operation under way; empty when there is none.
    pub operation: String,
    /// Of this state.
    pub revision: u64,
}

impl Images {
    /// One without images; see [`Feed::new`].
    pub fn new(run: u64, nonces: BTreeMap<u64, u64>, history: BuriedRecords) -> Self {
        Self {
            inner: Mutex::new(Inner {
                images: BTreeMap::new(),
                feed: Feed::new(run, nonces, history),
            }),
            names: tokio::sync::Mutex::default(),
            turns: Semaphore::new(TURNS),
        }
    }

    /// Waits until another image may be made, and reserves that place until the permit is dropped.
    pub async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.turns.acquire().await.ok()
    }

    /// Refuses another import of a caller that has many under way.
    pub fn check_imports(&self, initiator: &str) -> Result<(), Failure> {
        let inner = self.inner();
        let imports = inner.images.values().filter_map(|slot| slot.import.as_ref());
        let own = imports.filter(|import| import.operation().initiator == initiator);
        if own.count() < IMPORTS {
            return Ok(());
        }
        let message = format!(
            "{initiator} has {IMPORTS} imports of images under way, the most at once: wait until one has ended"
        );
        Err(Failure::new(Kind::Exhausted, "TOO_MANY_IMPORTS", message))
    }

    /// For giving files the name of their content, and for taking them away.
    pub async fn names(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.names.lock().await
    }

    /// Returns an image in any phase.
    pub fn see(&self, name: &str) -> Result<Seen, Failure> {
        let inner = self.inner();
        inner
            .images
            .get(name)
            .map(Slot::seen)
            .ok_or_else(|| no_image(name))
    }

    /// Returns the image with this UUID, in any phase.
    pub fn find(&self, uid: &[u8]) -> Option<Seen> {
        let inner = self.inner();
        let slot = inner.images.values().find(|slot| slot.record.uid == uid);
        slot.map(Slot::seen)
    }

    /// Images after a name, and where in the order of changes that was.
    pub fn after(&self, name: Option<&str>) -> (Vec<Seen>, Position) {
        let inner = self.inner();
        let from = name.map_or(Bound::Unbounded, Bound::Excluded);
        let slots = inner.images.range::<str, _>((from, Bound::Unbounded));
        (
            slots.map(|(_, slot)| slot.seen()).collect(),
            inner.feed.position(),
        )
    }

    /// All images, and deletions since a position.
    pub fn since(&self, position: Position) -> Result<(Vec<Buried>, Vec<Seen>, Position), Expired> {
        let inner = self.inner();
        let buried = inner.feed.buried_since(position)?;
        let all = inner.images.values().map(Slot::seen).collect();
        Ok((buried, all, inner.feed.position()))
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

    /// An image that can be used.
    pub fn get(&self, name: &str) -> Result<ImageRecord, Failure> {
        let record = self.see(name)?.record;
        match record.stage() {
            ImageStage::Ready => Ok(record),
            ImageStage::Importing => {
                let message = format!("image \"{name}\" is being imported: wait for its operation");
                Err(Failure::precondition("IMAGE_NOT_READY", message))
            }
            ImageStage::Deleting => Err(no_image(name)),
        }
    }

    /// An image that can be used and has this digest.
    pub fn with_digest(&self, digest: &[u8]) -> Option<ImageRecord> {
        let inner = self.inner();
        let mut images = inner.images.values().map(|slot| &slot.record);
        let found = images.find(|image| image.stage() == ImageStage::Ready && image.digest == digest);
        found.cloned()
    }

    /// Notes that a disk is created from an image. Fails if the image was replaced. Returns the
    /// record for the store.
    pub fn take(&self, record: &ImageRecord) -> Result<ImageRecord, Failure> {
        let now = self.get(&record.name)?;
        if now.uid != record.uid {
            return Err(no_image(&record.name));
        }
        self.change(&record.name, |slot| slot.record.used_ms = text::now_ms());
        self.get(&record.name)
    }

    /// Reserves the name of a new image. Returns the record with its generation and creation
    /// revision.
    pub fn reserve(&self, mut record: ImageRecord) -> Result<ImageRecord, Failure> {
        let mut inner = self.inner();
        if inner.images.contains_key(&record.name) {
            let message = format!("there is an image \"{}\" already", record.name);
            return Err(Failure::new(Kind::Exists, "IMAGE_EXISTS", message));
        }
        record.generation = inner.feed.first_generation();
        let revision = inner.feed.change();
        (record.made_run, record.made_revision) = (inner.feed.run(), revision);
        inner.put(record.clone(), revision);
        Ok(record)
    }

    /// Adds an image of an earlier daemon.
    pub fn restore(&self, record: ImageRecord) {
        let mut inner = self.inner();
        let revision = inner.feed.change();
        inner.put(record, revision);
    }

    /// Notes that an import is under way.
    pub fn begin(&self, name: &str, import: Pending) {
        self.change(name, |slot| slot.import = Some(import));
    }

    /// The import under way of the image with this UUID.
    pub fn import_of(&self, uid: &[u8]) -> Option<Pending> {
        let inner = self.inner();
        let slot = inner.images.values().find(|slot| slot.record.uid == uid)?;
        slot.import.clone()
    }

    /// Notes what an image is now. One that was forgotten meanwhile stays so.
    pub fn settle(&self, record: ImageRecord) {
        let name = record.name.clone();
        self.change(&name, |slot| {
            if slot.record.uid == record.uid {
                slot.import = slot
                    .import
                    .take()
                    .filter(|_| record.stage() == ImageStage::Importing);
                slot.record = record;
            }
        });
    }

    /// Takes an image out of use, or returns what ends its import.
    pub fn begin_delete(
        &self,
        name: &str,
        check: impl FnOnce(&ImageRecord) -> Result<(), Failure>,
    ) -> Result<Deletion, Failure> {
        let mut inner = self.inner();
        let inner = &mut *inner;
        let found = inner.images.get_mut(name);
        let slot = found.filter(|slot| slot.record.stage() != ImageStage::Deleting);
        let slot = slot.ok_or_else(|| no_image(name))?;
        check(&slot.record)?;
        if slot.record.stage() == ImageStage::Importing {
            return Ok(match &slot.import {
                Some(import) => Deletion::Importing(import.operation().id),
                None => {
                    return Err(Failure::precondition(
                        "BUSY",
                        "the import is about to begin: try again",
                    ));
                }
            });
        }
        let before = slot.record.clone();
        slot.record.stage = ImageStage::Deleting.into();
        slot.revision = inner.feed.change();
        Ok(Deletion::Ready(Box::new(before)))
    }

    /// Whether another image has the same content.
    pub fn is_shared(&self, record: &ImageRecord) -> bool {
        let inner = self.inner();
        let mut others = inner.images.values().map(|slot| &slot.record);
        others.any(|other| other.uid != record.uid && other.digest == record.digest)
    }

    /// Begins to forget an image. Returns the record for the store. [`Self::forget`] follows.
    pub fn bury(&self, record: &ImageRecord) -> Tombstone {
        self.inner().feed.bury(metadata(record))
    }

    /// Notes that an image is gone; `tombstone` is what [`Self::bury`] returned.
    pub fn forget(&self, record: &ImageRecord, tombstone: Tombstone) {
        let mut inner = self.inner();
        let same = |slot: &Slot| slot.record.uid == record.uid;
        if inner.images.get(&record.name).is_some_and(same) {
            inner.images.remove(&record.name);
        }
        inner.feed.buried(tombstone);
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Slot)) {
        let mut inner = self.inner();
        let revision = inner.feed.change();
        if let Some(slot) = inner.images.get_mut(name) {
            change(slot);
            slot.revision = revision;
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of an image at the begin of its deletion.
#[derive(Debug)]
pub enum Deletion {
    /// The image is out of use. Its previous record.
    Ready(Box<ImageRecord>),
    /// Id of the operation that makes it.
    Importing(String),
}

impl Inner {
    fn put(&mut self, record: ImageRecord, revision: u64) {
        let slot = Slot {
            record,
            import: None,
            revision,
        };
        self.images.insert(slot.record.name.clone(), slot);
    }
}

impl Slot {
    fn seen(&self) -> Seen {
        Seen {
            record: self.record.clone(),
            operation: self
                .import
                .as_ref()
                .map(|import| import.operation().id)
                .unwrap_or_default(),
            revision: self.revision,
        }
    }
}

/// There is no image with this name.
pub fn no_image(name: &str) -> Failure {
    let message = format!("there is no image \"{}\" on this node", text::brief(name));
    Failure::new(Kind::NotFound, "IMAGE_NOT_FOUND", message)
}

/// The metadata of an image.
pub fn metadata(record: &ImageRecord) -> v1::ObjectMetadata {
    v1::ObjectMetadata {
        name: record.name.clone(),
        uid: Uuid::from_slice(&record.uid).unwrap_or_default().to_string(),
        generation: record.generation.max(1),
        labels: record.labels.clone(),
        annotations: record.annotations.clone(),
        owner: record.owner.clone(),
        create_time: text::timestamp(record.created_ms),
    }
}
