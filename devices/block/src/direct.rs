//! Alignment rules of direct I/O (O_DIRECT), and bounce buffers for requests that do not meet them.
//!
//! An unaligned request goes through a buffer of our own. If the request begins or ends within a
//! block of the host, that block is read first and written back whole ("read-modify-write"). No
//! other change of the block may be under way during that time: see [`Ranges`]. There is no second
//! descriptor without O_DIRECT as a fallback: a VM's process receives open descriptors and opens no
//! paths, and this node's page cache could hold stale data after a write by another node.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{AtFlags, StatxFlags, statx};

use super::SECTOR;

/// Size of a buffer: a multiple of every alignment.
pub(super) const BUFFER_BYTES: usize = 128 << 10;

/// Largest alignment that is met. Linux's largest logical block is 64 KiB.
const MAX_ALIGNMENT: u32 = 64 << 10;

/// Required alignment of memory addresses, offsets and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Alignment {
    /// In bytes.
    pub(super) memory: u32,
    /// In bytes; also of each buffer's length.
    pub(super) offset: u32,
}

impl Alignment {
    /// Anything goes.
    pub(super) const NONE: Self = Self { memory: 1, offset: 1 };

    /// Returns the alignment that `file`, which is open for direct I/O, requires.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let status = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
        // Zeroes when the file system reads and writes this file through the page cache all the same.
        let (memory, offset) = (status.stx_dio_mem_align, status.stx_dio_offset_align);
        if status.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && memory != 0 && offset != 0 {
            let sane = |value: u32| value.is_power_of_two() && value <= MAX_ALIGNMENT;
            if sane(memory) && sane(offset) {
                return Ok(Self { memory, offset });
            }
            return Err(io::ErrorKind::Unsupported.into());
        }
        Self::probe(file)
    }

    /// Probes for the alignment, which kernels before 6.1 and some file systems do not report.
    fn probe(file: &File) -> io::Result<Self> {
        let mut buffer = Buffer::new();
        let mut value = 512;
        loop {
            // At a place that is a multiple of this alignment, not of a larger one.
            let piece = buffer.odd_piece(value);
            match file.read_at(piece, 0) {
                Ok(_) => {
                    return Ok(Self {
                        memory: value,
                        offset: value,
                    });
                }
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) && value < MAX_ALIGNMENT => {
                    value = value.saturating_mul(2);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether requests of whole sectors may begin or end within a block.
    pub(super) fn is_coarse(self) -> bool {
        u64::from(self.offset) > SECTOR
    }

    /// The whole blocks that hold some bytes.
    pub(super) fn around(self, offset: u64, length: u64) -> Range<u64> {
        let block = u64::from(self.offset).max(1);
        let end = offset.saturating_add(length);
        let begin = offset.saturating_sub(offset.checked_rem(block).unwrap_or(0));
        begin..end.checked_next_multiple_of(block).unwrap_or(end)
    }
}

/// Memory aligned for any direct I/O.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    /// Where the first aligned byte is.
    start: usize,
}

impl Buffer {
    pub(super) fn new() -> Self {
        let room = (MAX_ALIGNMENT as usize).saturating_mul(2);
        let bytes = vec![0; BUFFER_BYTES.saturating_add(room)];
        let start = bytes.as_ptr().align_offset(room);
        Self { bytes, start }
    }

    /// Returns the first `length` bytes, at most [`BUFFER_BYTES`]. The old content remains.
    pub(super) fn get(&mut self, length: usize) -> &mut [u8] {
        let end = self.start.saturating_add(length.min(BUFFER_BYTES));
        self.bytes.get_mut(self.start..end).unwrap_or_default()
    }

    fn odd_piece(&mut self, alignment: u32) -> &mut [u8] {
        let start = self.start.saturating_add(alignment as usize);
        let end = start.saturating_add(alignment as usize);
        self.bytes.get_mut(start..end).unwrap_or_default()
    }
}

/// Disjoint ranges of an image that are being changed. Used only for images whose blocks are larger
/// than sectors.
///
/// No holder of a range waits for another range: the holders in an engine's ring wait only for the
/// host, and threads take their range when they run.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    held: Mutex<Vec<Range<u64>>>,
    released: Condvar,
}

impl Ranges {
    /// Takes a range if no part of it is taken.
    pub(super) fn try_lock(&self, range: &Range<u64>) -> bool {
        let mut held = self.locked();
        let free = is_free(&held, range);
        if free {
            held.push(range.clone());
        }
        free
    }

    /// Waits until no part of a range is taken, and takes it.
    pub(super) fn lock(&self, range: &Range<u64>) {
        let mut held = self.locked();
        while !is_free(&held, range) {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.push(range.clone());
    }

    /// Does something while it holds a range. After a panic, which the pools' threads survive, the range is free again.
    pub(super) fn while_held<T>(&self, range: &Range<u64>, action: impl FnOnce() -> T) -> T {
        struct Held<'a>(&'a Ranges, &'a Range<u64>);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.unlock(self.1);
            }
        }
        self.lock(range);
        let _held = Held(self, range);
        action()
    }

    /// Gives a taken range back.
    pub(super) fn unlock(&self, range: &Range<u64>) {
        let mut held = self.locked();
        if let Some(at) = held.iter().position(|other| other == range) {
            held.swap_remove(at);
        }
        drop(held);
        self.released.notify_all();
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_free(held: &[Range<u64>], range: &Range<u64>) -> bool {
    held.iter()
        .all(|other| other.end <= range.start || range.end <= other.start)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_around_bytes() {
        let coarse = Alignment {
            memory: 512,
            offset: 4096,
        };
        assert!(coarse.is_coarse() && !Alignment::NONE.is_coarse());
        assert_eq!(coarse.around(0, 4096), 0..4096);
        assert_eq!(coarse.around(512, 512), 0..4096);
        assert_eq!(coarse.around(3584, 1024), 0..8192);
        assert_eq!(Alignment::NONE.around(3584, 1024), 3584..4608);
    }

    #[test]
    fn overlapping_ranges_are_not_taken_together() {
        let ranges = Ranges::default();
        assert!(ranges.try_lock(&(10..20)));
        assert!(ranges.try_lock(&(20..30)));
        assert!(!ranges.try_lock(&(0..11)));
        assert!(!ranges.try_lock(&(29..40)));
        ranges.unlock(&(10..20));
        assert!(ranges.try_lock(&(0..11)));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ranges.lock(&(0..40)));
            ranges.unlock(&(20..30));
            ranges.unlock(&(0..11));
            waiter.join().unwrap();
        });
        assert!(!ranges.try_lock(&(39..40)));
    }

    #[test]
    fn a_range_is_free_after_a_panic_of_its_holder() {
        let ranges = Ranges::default();
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| ranges.while_held(&(0..10), || unreachable!("on purpose")));
            holder.join().unwrap_err();
        });
        assert!(!ranges.while_held(&(0..10), || ranges.try_lock(&(5..6))));
        assert!(ranges.try_lock(&(0..10)));
    }

    #[test]
    fn buffers_are_aligned_for_anything() {
        let mut buffer = Buffer::new();
        assert_eq!(buffer.get(usize::MAX).len(), BUFFER_BYTES);
        assert_eq!(buffer.get(512).as_ptr().align_offset(MAX_ALIGNMENT as usize), 0);
        let odd = buffer.odd_piece(4096);
        assert_eq!((odd.len(), odd.as_ptr().align_offset(4096)), (4096, 0));
        assert_ne!(odd.as_ptr().align_offset(8192), 0);
    }
}
