//! All images of the node by name.

use tokio::sync::{Semaphore, SemaphorePermit};
use vmmd_host::{
    failure::{Failure, Kind},
    text,
};
use vmmd_objects::{
    operation::Pending,
    registry::{self, Objects, Registry},
};
use vmmd_store::{ImageRecord, ImageStage};

/// Most imports of one caller under way at once: an agent of a cluster has all of the node's tenants.
const IMPORTS: usize = 64;
/// Images that are made at once: each has a process with up to four threads and 2 GiB.
const TURNS: usize = 4;

/// The images.
#[derive(Debug)]
pub struct Images {
    /// All images in any phase.
    pub registry: Registry<ImageKind>,
    /// Held while files get or lose the name of their content.
    names: tokio::sync::Mutex<()>,
    /// For making images.
    turns: Semaphore,
}

/// Images of the ImageService.
#[derive(Clone, Debug, PartialEq)]
pub enum ImageKind {}

/// An image at a time. Its view is the id of the operation under way; empty without one.
pub type Seen = registry::Seen<ImageKind>;

impl registry::Kind for ImageKind {
    const NAME: &'static str = "image";
    const A: &'static str = "an image";
    const EXISTS: &'static str = "IMAGE_EXISTS";
    const NOT_FOUND: &'static str = "IMAGE_NOT_FOUND";
    type Record = ImageRecord;
    /// The import under way.
    type State = Option<Pending>;
    type Index = ();
    type View = String;

    fn view(_: &Objects<Self>, _: &ImageRecord, import: &Option<Pending>) -> String {
        let operation = import.as_ref().map(|import| import.operation().id);
        operation.unwrap_or_default()
    }
}

impl Images {
    /// The images of this registry.
    pub fn new(registry: Registry<ImageKind>) -> Self {
        Self {
            registry,
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
        let images = self.registry.lock();
        let imports = images.states().filter_map(|(_, import)| import.as_ref());
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

    /// An image that can be used.
    pub fn get(&self, name: &str) -> Result<ImageRecord, Failure> {
        let record = self.registry.see(name)?.record.clone();
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
        let images = self.registry.lock();
        let found = images
            .records()
            .find(|image| image.stage() == ImageStage::Ready && image.digest == digest);
        found.cloned()
    }

    /// Notes that a disk is created from an image. Fails if the image was replaced. Returns the
    /// record for the store.
    pub fn take(&self, record: &ImageRecord) -> Result<ImageRecord, Failure> {
        let now = self.get(&record.name)?;
        if now.uid != record.uid {
            return Err(no_image(&record.name));
        }
        let mut images = self.registry.lock();
        images.change(&record.name, |record, _| record.used_ms = text::now_ms());
        drop(images);
        self.get(&record.name)
    }

    /// Reserves the name of a new image. Returns the record with its generation and creation
    /// revision.
    pub fn reserve(&self, record: ImageRecord) -> Result<ImageRecord, Failure> {
        let mut images = self.registry.lock();
        images.check_free(&record.name)?;
        Ok(images.add(record))
    }

    /// Notes that an import is under way.
    pub fn begin(&self, name: &str, import: Pending) {
        let mut images = self.registry.lock();
        images.change(name, |_, under_way| *under_way = Some(import));
    }

    /// The import under way of the image with this UUID.
    pub fn import_of(&self, uid: &[u8]) -> Option<Pending> {
        let images = self.registry.lock();
        images.state(images.name_of(uid)?)?.clone()
    }

    /// Notes what an image is now. One that was forgotten meanwhile stays so.
    pub fn settle(&self, record: ImageRecord) {
        let mut images = self.registry.lock();
        if images.by_uid(&record.uid).is_none() {
            return;
        }
        let name = record.name.clone();
        images.change(&name, |known, import| {
            if record.stage() != ImageStage::Importing {
                *import = None;
            }
            *known = record;
        });
    }

    /// Takes an image out of use, or returns what ends its import.
    pub fn begin_delete(
        &self,
        name: &str,
        check: impl FnOnce(&ImageRecord) -> Result<(), Failure>,
    ) -> Result<Deletion, Failure> {
        let mut images = self.registry.lock();
        let found = images.get(name);
        let before = found.filter(|record| record.stage() != ImageStage::Deleting);
        let before = before.ok_or_else(|| no_image(name))?.clone();
        check(&before)?;
        if before.stage() == ImageStage::Importing {
            return match images.state(name).and_then(Option::as_ref) {
                Some(import) => Ok(Deletion::Importing(import.operation().id)),
                None => Err(Failure::precondition(
                    "BUSY",
                    "the import is about to begin: try again",
                )),
            };
        }
        images.change(name, |record, _| record.stage = ImageStage::Deleting.into());
        Ok(Deletion::Ready(Box::new(before)))
    }

    /// Whether another image has the same content.
    pub fn is_shared(&self, record: &ImageRecord) -> bool {
        let images = self.registry.lock();
        images
            .records()
            .any(|other| other.uid != record.uid && other.digest == record.digest)
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

/// There is no image with this name.
pub fn no_image(name: &str) -> Failure {
    <ImageKind as registry::Kind>::not_found(name)
}
