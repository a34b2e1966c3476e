//! A file as imago uses it.

use std::{
    fmt, io,
    sync::{Arc, Mutex, PoisonError},
};

use imago::{
    FormatAccess, Storage,
    io_buffers::{IoVector, IoVectorMut},
    storage::drivers::CommonStorageHelper,
};

use super::{base::Base, medium::Medium, stage::Stage};

/// One image file of a chain. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Layer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    base: Arc<Base>,
    /// Where changes of tables wait; `None` for files that are only read, or whose state does not matter until the end.
    stage: Option<Mutex<Stage>>,
    helper: CommonStorageHelper,
}

impl Layer {
    /// All writes go to the file at once.
    pub(super) fn direct(medium: Arc<dyn Medium>) -> Self {
        Self::with(Arc::new(Base::new(medium)), None)
    }

    /// Changes of tables wait for [`Stage::commit`].
    pub(super) fn staged(base: Arc<Base>, stage: Stage) -> Self {
        Self::with(base, Some(Mutex::new(stage)))
    }

    fn with(base: Arc<Base>, stage: Option<Mutex<Stage>>) -> Self {
        Self(Arc::new(Shared {
            base,
            stage,
            helper: CommonStorageHelper::default(),
        }))
    }

    /// The file itself, for data. Its tables may be out of date.
    pub(super) fn base(&self) -> &Base {
        &self.0.base
    }

    /// Does something with the changes that wait, if it is a file whose changes do.
    pub(super) fn stage<T>(&self, action: impl FnOnce(&mut Stage) -> T) -> Option<T> {
        let mut stage = self
            .0
            .stage
            .as_ref()?
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Some(action(&mut stage))
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an image file")
    }
}

// The trait has these methods `unsafe` because its own wrappers take care of alignment and of writes at the same place
// and time; nothing in them is unsafe.
#[allow(unsafe_code)]
impl Storage for Layer {
    fn size(&self) -> io::Result<u64> {
        self.base().medium.size()
    }

    unsafe fn pure_readv(&self, mut bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let length = usize::try_from(bufv.len()).unwrap_or(0);
        self.base().buffers.with(length, |data| {
            match self.stage(|stage| stage.read(data, offset)) {
                Some(result) => result?,
                None => self.base().medium.read_at(data, offset)?,
            }
            bufv.copy_from_slice(data);
            Ok(())
        })
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let length = usize::try_from(bufv.len()).unwrap_or(0);
        self.base().buffers.with(length, |data| {
            bufv.copy_into_slice(data);
            match self.stage(|stage| stage.write(data, offset)) {
                Some(result) => result,
                None => self.base().medium.write_at(data, offset),
            }
        })
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.stage(|stage| stage.zero(offset, length, false)) {
            Some(result) => result,
            None => self.base().medium.punch(offset, length),
        }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.stage(|stage| stage.zero(offset, length, true)) {
            Some(result) => result,
            None => self.base().medium.allocate_zeroes(offset, length),
        }
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.0.helper
    }
}

// imago requires exclusive access to the image for the removal of clusters, because another request
// may still use an earlier mapping. The users of a range exclude each other here (`disk::ranges`),
// so requests elsewhere continue.

/// Gives up the clusters of a range without mappings in use: the range shows the image below.
/// `length` is within one L2 table.
#[allow(unsafe_code)]
pub(super) fn unmap(access: &FormatAccess<Layer>, offset: u64, length: u64) -> io::Result<()> {
    // SAFETY: the caller holds the range exclusively, so no mapping of the range is in use; memory
    // does not depend on mappings.
    unsafe { access.discard_to_backing_unsafe(offset, length) }
}

/// Gives up the clusters of a range without mappings in use: the range reads as zeroes.
#[allow(unsafe_code)]
pub(super) fn unmap_to_zero(access: &FormatAccess<Layer>, offset: u64, length: u64) -> io::Result<()> {
    // SAFETY: as above.
    unsafe { access.discard_to_zero_unsafe(offset, length) }
}
