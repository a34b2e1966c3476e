//! What is below an image's tables and data: a file, and what of it is stable.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{buffers::Buffers, medium::Medium};

/// A file, and whether something was written to it that may not be stable.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) medium: Arc<dyn Medium>,
    unsynced: AtomicBool,
    /// The errno of a sync that failed. The kernel may have dropped what it could not write, and call the next sync a
    /// success (fsync(2), "EIO"): from then on each sync fails.
    lost: Mutex<Option<i32>>,
    /// For tables and compressed data.
    pub(super) buffers: Buffers,
}

impl Base {
    pub(super) fn new(medium: Arc<dyn Medium>) -> Self {
        Self {
            medium,
            unsynced: AtomicBool::new(false),
            lost: Mutex::new(None),
            buffers: Buffers::default(),
        }
    }

    /// To be called when something was written, or may have been.
    pub(super) fn written(&self) {
        self.unsynced.store(true, Ordering::Release);
    }

    pub(super) fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let result = self.medium.write_at(data, offset);
        self.written();
        result
    }

    /// On return all is stable of which [`written`](Self::written) was told before the call.
    pub(super) fn sync(&self) -> io::Result<()> {
        // Whoever finds nothing to do must have waited for another thread that does it.
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = *lost {
            return Err(io::Error::from_raw_os_error(number));
        }
        if !self.unsynced.swap(false, Ordering::AcqRel) || cfg!(feature = "mutation-flush") {
            return Ok(());
        }
        self.medium
            .sync()
            .inspect_err(|error| *lost = Some(error.raw_os_error().unwrap_or(libc::EIO)))
    }
}
