//! Pages of guest RAM that the VMM itself has written.
//!
//! KVM's dirty log covers only the guest's writes; this module marks writes of devices (used rings,
//! read data). Without a migration no state is kept: a mark is one load of a flag that never
//! changes, without an atomic read-modify-write on a cache line shared by all queues, and no memory
//! is allocated. [`DirtyBitmap::start`] allocates one bit per page.

use std::{
    any::Any,
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

/// Bytes covered by one bit (log2).
const PAGE_SHIFT: u32 = 12;
const WORD_BITS: usize = 64;

/// Whether any bitmap was ever started.
static USED: AtomicBool = AtomicBool::new(false);

/// Whether there may be a bitmap that marks: where not, one need not look for it.
pub fn is_used() -> bool {
    USED.load(Ordering::Acquire)
}

/// The dirty bitmap of one region of guest RAM.
#[derive(Default)]
pub struct DirtyBitmap {
    enabled: AtomicBool,
    pages: usize,
    words: OnceLock<Box<[AtomicU64]>>,
    /// Owner of the mapping, which must live as long as the region: the bitmap is the only part of
    /// a region that is dropped with it.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for DirtyBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyBitmap")
            .field("enabled", &self.enabled)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

impl DirtyBitmap {
    /// The bitmap of a region of `bytes`, which also keeps `owner` (the mapping behind the region) alive.
    pub fn with_owner(bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            _owner: Some(owner),
            ..Self::with_len(bytes)
        }
    }

    /// Begins to mark. Writes that other threads do at this very moment may go unmarked: read all memory after it.
    pub fn start(&self) {
        self.words.get_or_init(|| {
            (0..self.pages.div_ceil(WORD_BITS))
                .map(|_| AtomicU64::new(0))
                .collect()
        });
        USED.store(true, Ordering::SeqCst);
        self.enabled.store(true, Ordering::SeqCst);
    }

    /// Ends marking and forgets the marks.
    pub fn stop(&self) {
        self.enabled.store(false, Ordering::SeqCst);
        self.take();
    }

    /// The marks since the last call, one bit per page of 4 KiB from the region's start, and clears them. Empty when
    /// marking was never started.
    pub fn take(&self) -> Vec<u64> {
        self.words
            .get()
            .map(|words| words.iter().map(|word| word.swap(0, Ordering::AcqRel)).collect())
            .unwrap_or_default()
    }

    fn word(&self, page: usize) -> Option<(&AtomicU64, u64)> {
        if page >= self.pages {
            return None;
        }
        let word = self.words.get()?.get(page.checked_div(WORD_BITS)?)?;
        Some((word, 1 << (page % WORD_BITS)))
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for DirtyBitmap {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if !self.enabled.load(Ordering::Acquire) {
            return;
        }
        let Some(last) = len.checked_sub(1).map(|len| offset.saturating_add(len)) else {
            return;
        };
        for page in offset >> PAGE_SHIFT..=last >> PAGE_SHIFT {
            match self.word(page) {
                Some((word, bit)) => word.fetch_or(bit, Ordering::AcqRel),
                None => return,
            };
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.word(offset >> PAGE_SHIFT)
            .is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for DirtyBitmap {
    fn with_len(bytes: usize) -> Self {
        Self {
            pages: bytes.div_ceil(1 << PAGE_SHIFT),
            ..Self::default()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn nothing_is_marked_and_nothing_allocated_before_the_start() {
        let bitmap = DirtyBitmap::with_len(1 << 20);
        bitmap.mark_dirty(0, 1 << 20);
        assert!(!bitmap.dirty_at(0));
        assert!(bitmap.words.get().is_none());
        assert!(bitmap.take().is_empty());
    }

    #[test]
    fn each_page_that_a_write_touches_is_marked_once() {
        let bitmap = DirtyBitmap::with_len(65 << PAGE_SHIFT);
        bitmap.start();
        bitmap.mark_dirty(0xfff, 2);
        bitmap.mark_dirty(64 << PAGE_SHIFT, 1);
        bitmap.mark_dirty(0x5000, 0);
        assert!(bitmap.dirty_at(0) && bitmap.dirty_at(0x1000) && !bitmap.dirty_at(0x5000));
        assert_eq!(bitmap.take(), [0b11, 1]);
        assert_eq!(bitmap.take(), [0, 0]);
        bitmap.mark_dirty(0, 1);
        bitmap.stop();
        assert_eq!(bitmap.take(), [0, 0]);
    }

    #[test]
    fn marks_past_the_end_are_ignored() {
        let bitmap = DirtyBitmap::with_len(0x1001);
        bitmap.start();
        bitmap.mark_dirty(0x1000, usize::MAX);
        assert_eq!(bitmap.take(), [0b10]);
        bitmap.mark_dirty(usize::MAX, usize::MAX);
        assert_eq!(bitmap.take(), [0]);
        assert!(!bitmap.dirty_at(usize::MAX));
    }

    #[test]
    fn a_slice_marks_with_its_offset() {
        let bitmap = DirtyBitmap::with_len(16 << PAGE_SHIFT);
        bitmap.start();
        bitmap.slice_at(0x3000).slice_at(0x1000).mark_dirty(0, 1);
        assert_eq!(bitmap.take(), [1 << 4]);
    }

    #[test]
    fn the_owner_lives_as_long_as_the_bitmap() {
        let owner = Arc::new(());
        let bitmap = DirtyBitmap::with_owner(1 << PAGE_SHIFT, Box::new(Arc::clone(&owner)));
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(bitmap);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
