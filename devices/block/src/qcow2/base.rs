//! File below an image's tables and data, and the state of its writes on stable storage.

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
    /// Errno of a failed sync. The kernel may have dropped the data of failed writes and report
    /// success for the next sync (fsync(2), "EIO"). Therefore every later sync fails.
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

    /// Makes stable every write that was reported to [`written`](Self::written) before the call.
    pub(super) fn sync(&self) -> io::Result<()> {
        // The lock is held across the sync: a caller that finds `unsynced` clear has waited for the
        // thread that syncs.
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
