//! A disk that somebody copies while its guest uses it.

use std::{
    fmt, io,
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use block::{Changes, Content, Extent};

use super::control::{BlkControl, Shared, SharedImage};

/// Change tracking of the workers: on or off, and the target of the marks. While no copy runs, a
/// mark costs one load of a flag.
#[derive(Debug, Default)]
pub(super) struct Tracking {
    is_on: AtomicBool,
    changes: RwLock<Option<Arc<Changes>>>,
}

impl Tracking {
    /// A range of the disk was changed, and its driver has not been told.
    pub(super) fn mark(&self, offset: u64, length: u64) {
        // A worker that reads the flag too early has its change on the disk by now: the copy begins after the flag was set.
        if !self.is_on.load(Ordering::SeqCst) {
            return;
        }
        let changes = self.changes.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(changes) = &*changes {
            changes.mark(offset, length);
        }
    }

    fn begin(&self, capacity: u64) -> io::Result<Arc<Changes>> {
        let mut changes = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        if changes.is_some() {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the disk is being copied already",
            ));
        }
        let begun = Arc::new(Changes::new(capacity));
        *changes = Some(Arc::clone(&begun));
        self.is_on.store(true, Ordering::SeqCst);
        Ok(begun)
    }

    fn end(&self) {
        self.is_on.store(false, Ordering::SeqCst);
        *self.changes.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A disk that is being copied: its content, and which blocks of it the guest has changed since this was made. Its image stays open as long as
/// this lives.
pub struct Mirror {
    content: Content,
    changes: Arc<Changes>,
    shared: Arc<Shared>,
    /// Dead when the guest has given the disk back.
    image: Weak<SharedImage>,
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror")
            .field("content", &self.content)
            .finish_non_exhaustive()
    }
}

impl BlkControl {
    /// Begins to copy the disk. One at a time; `NotConnected` when the disk is gone.
    pub fn mirror(&self) -> io::Result<Mirror> {
        let image = self.image.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let image = image.lock().unwrap_or_else(PoisonError::into_inner);
        let capacity = image.capacity();
        let content = Content::new(image.access()?, capacity)?;
        let changes = self.shared.tracking.begin(capacity)?;
        Ok(Mirror {
            content,
            changes,
            shared: Arc::clone(&self.shared),
            image: Weak::clone(&self.image),
        })
    }
}

impl Mirror {
    /// Size of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.content.capacity()
    }

    /// Returns the change map. Writers other than the disk's driver must mark their changes there.
    pub fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    /// Bytes in blocks that were changed and not [taken](Self::take) since.
    pub fn changed(&self) -> u64 {
        self.changes.bytes()
    }

    /// See [`Content::extent`].
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.is_there()?;
        self.content.extent(offset)
    }

    /// Changed blocks at `offset` or behind it, which count as unchanged from now on; see [`Changes::take`].
    pub fn take(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        self.is_there()?;
        self.changes.take(offset)
    }

    /// See [`Content::read`].
    pub fn read(&mut self, range: &Range<u64>, data: &mut Vec<u8>) -> io::Result<()> {
        self.content.read(range, data)
    }

    fn is_there(&self) -> io::Result<()> {
        match self.image.strong_count() {
            0 => Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "the disk was taken away while it was copied",
            )),
            _ => Ok(()),
        }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.shared.tracking.end();
    }
}
