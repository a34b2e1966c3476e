//! The file or block device behind a raw image, and how a request is carried out on it by waiting for it.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{AtFlags, FallocateFlags, FileType, OFlags, SeekFrom, StatxFlags, fallocate, fcntl_getfl, statx},
    io::Errno,
};

use vmm_base::sys::{Iovecs, blockdev, file};

use super::{
    SECTOR,
    content::Extent,
    direct::{Bounce, Buffer, MAX_ALIGNMENT},
    engine::Operation,
    image::OpenError,
};

/// Type of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    BlockDevice {
        /// In bytes: what discards and zeroings have to be multiples of.
        logical_block: u32,
    },
}

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

/// Shared by an image and its engines.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) file: File,
    pub(super) kind: Kind,
    /// Alignment required of requests; [`Alignment::NONE`] without O_DIRECT.
    alignment: Alignment,
    /// Held while blocks are changed, if requests may change parts of blocks.
    changing: Option<Ranges>,
    /// Behind the end of the file there are zeroes, and writes extend it.
    pub(super) extended: bool,
    /// In bytes.
    capacity: AtomicU64,
    /// Held while the size is changed.
    growing: Mutex<()>,
    /// The errno of a flush of the page cache that failed; 0 if none did.
    lost: AtomicI32,
}

/// How to make bytes read as zero, best first.
const FREEING: [FallocateFlags; 2] = [
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE),
    FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE),
];

/// The fallocate(2) mode that makes bytes read as zero; with `unmap` their space is given back.
pub(super) fn zeroing(unmap: bool) -> FallocateFlags {
    let [freeing, keeping] = FREEING;
    if unmap { freeing } else { keeping }
}

/// Whether the host says that it has no such operation here.
pub(super) fn unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EINVAL)
    )
}

impl Target {
    /// Creates a target of an opened file. Checks that it is a regular file or a block device of
    /// whole sectors.
    pub(super) fn new(file: File) -> Result<Self, OpenError> {
        let (kind, capacity) = measure(&file).map_err(|error| OpenError::Host("look at the image", error))?;
        let kind = match kind {
            Ok(kind) => kind,
            Err(name) => return Err(OpenError::Kind(name)),
        };
        if capacity == 0 {
            return Err(OpenError::Empty);
        }
        if !capacity.is_multiple_of(SECTOR) {
            return Err(OpenError::Size(capacity));
        }
        let flags = fcntl_getfl(&file)
            .map_err(|error| OpenError::Host("look how the image is open", error.into()))?;
        let alignment = if flags.contains(OFlags::DIRECT) {
            Alignment::of(&file)
                .map_err(|error| OpenError::Host("find out the alignment of direct I/O", error))?
        } else {
            Alignment::NONE
        };
        Self::with(file, kind, capacity, alignment)
    }

    /// Creates a target of a file that is not a disk image on its own: bytes beyond its end read as
    /// zeroes, and writes extend it.
    pub(super) fn extended_by_writes(file: File, alignment: Alignment) -> Self {
        Self {
            file,
            kind: Kind::File,
            alignment,
            changing: alignment.is_coarse().then(Ranges::default),
            extended: true,
            capacity: AtomicU64::default(),
            growing: Mutex::default(),
            lost: AtomicI32::default(),
        }
    }

    fn with(file: File, kind: Kind, capacity: u64, alignment: Alignment) -> Result<Self, OpenError> {
        if !capacity.is_multiple_of(alignment.offset.into()) {
            return Err(OpenError::DirectSize {
                size: capacity,
                block: alignment.offset,
            });
        }
        Ok(Self {
            file,
            kind,
            alignment,
            changing: alignment.is_coarse().then(Ranges::default),
            extended: false,
            capacity: capacity.into(),
            growing: Mutex::default(),
            lost: AtomicI32::new(0),
        })
    }

    /// With an alignment that the host does not ask for.
    #[cfg(test)]
    pub(super) fn aligned(file: File, alignment: Alignment) -> Result<Self, OpenError> {
        let Self {
            file, kind, capacity, ..
        } = Self::new(file)?;
        Self::with(file, kind, capacity.into_inner(), alignment)
    }

    /// Size in bytes by now.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Alignment required of requests.
    pub(super) fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Returns the outcome of a request, given the host's result. After a failed flush of the page
    /// cache, the kernel may have dropped its content and report success for the next flush
    /// (fsync(2), "EIO"). Therefore every later flush fails.
    pub(super) fn outcome(&self, operation: Operation, result: io::Result<()>) -> io::Result<()> {
        let flushes = matches!(
            operation,
            Operation::Flush | Operation::Write { stable: true, .. }
        );
        if !flushes || self.alignment != Alignment::NONE {
            return result;
        }
        if let Err(error) = &result {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            // The first one stays. A write that found no space was not taken into the page cache.
            if operation == Operation::Flush {
                let _first = self
                    .lost
                    .compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
            }
        }
        match self.lost.load(Ordering::Acquire) {
            0 => result,
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }

    /// See [`Image::grow`](super::image::Image::grow).
    pub(super) fn grow(&self, wanted: Option<u64>) -> io::Result<()> {
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        let _one_at_a_time = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, size) = measure(&self.file)?;
        let capacity = wanted.unwrap_or(size);
        let before = self.capacity();
        if capacity < before {
            return refuse(format!(
                "a disk does not shrink: it has {before} bytes, not {capacity}"
            ));
        }
        let unit = SECTOR.max(self.alignment.offset.into());
        if !capacity.is_multiple_of(unit) {
            return refuse(format!("{capacity} bytes is not a multiple of {unit}"));
        }
        if capacity > size {
            if self.kind != Kind::File {
                return refuse(format!(
                    "the block device has {size} bytes: make it larger first, to {capacity}"
                ));
            }
            self.file.set_len(capacity)?;
            // The size is metadata that a guest's flush would not write if it wrote nothing there.
            self.file.sync_all()?;
        }
        self.capacity.store(capacity, Ordering::Release);
        Ok(())
    }

    /// Whether the host takes a request as it is.
    pub(super) fn takes(&self, operation: Operation, buffers: &Iovecs) -> bool {
        let (Operation::Read { offset } | Operation::Write { offset, .. }) = operation else {
            return true;
        };
        self.alignment == Alignment::NONE
            || offset.is_multiple_of(self.alignment.offset.into())
                && buffers.aligned(self.alignment.memory, self.alignment.offset)
    }

    /// Returns the range to hold in [`changing`](Self::changing) during an operation, if any.
    pub(super) fn changes(&self, operation: Operation, buffers: &Iovecs) -> Option<(&Ranges, Range<u64>)> {
        let changing = self.changing.as_ref()?;
        let (offset, length) = match operation {
            Operation::Read { .. } | Operation::Flush => return None,
            Operation::Write { offset, .. } => (offset, buffers.len() as u64),
            Operation::Discard { offset, length } | Operation::WriteZeroes { offset, length, .. } => {
                (offset, length)
            }
        };
        Some((changing, self.alignment.around(offset, length)))
    }

    /// The ranges that are held while blocks are changed.
    pub(super) fn changing(&self) -> Option<&Ranges> {
        self.changing.as_ref()
    }

    /// Carries out a request; returns when it is done. Uses the buffers up.
    pub(super) fn execute(
        &self,
        operation: Operation,
        buffers: &mut Iovecs,
        bounce: &mut Bounce,
    ) -> io::Result<()> {
        let change = self.changes(operation, buffers).map(|(_, range)| range);
        self.while_held(change, || {
            let result = self.carry_out(operation, buffers, bounce);
            self.outcome(operation, result)
        })
    }

    /// Changes a range while excluding all other changes in its blocks.
    pub(super) fn alone<T>(&self, offset: u64, length: u64, change: impl FnOnce() -> T) -> T {
        self.while_held(Some(self.alignment.around(offset, length)), change)
    }

    fn while_held<T>(&self, range: Option<Range<u64>>, action: impl FnOnce() -> T) -> T {
        match self.changing.as_ref().zip(range) {
            Some((changing, range)) => changing.while_held(&range, action),
            None => action(),
        }
    }

    fn carry_out(&self, operation: Operation, buffers: &mut Iovecs, bounce: &mut Bounce) -> io::Result<()> {
        let takes = self.takes(operation, buffers);
        let length = buffers.len() as u64;
        match operation {
            Operation::Read { offset } if takes => buffers.read_exact_at(&self.file, offset),
            Operation::Read { offset } => self.read(offset, length, bounce, |data| buffers.put(data)),
            Operation::Write { offset, stable } if takes => buffers.write_all_at(&self.file, offset, stable),
            Operation::Write { offset, stable } => {
                self.write(offset, length, stable, bounce, |data| buffers.take(data))
            }
            Operation::Flush if cfg!(feature = "mutation-flush") => Ok(()),
            Operation::Flush => self.file.sync_data(),
            Operation::Discard { offset, length } => self.discard(offset, length),
            Operation::WriteZeroes {
                offset,
                length,
                unmap,
            } => self.write_zeroes(offset, length, unmap, bounce),
        }
    }

    /// Returns how far data or a hole extends from `offset` on, below the capacity. A file system
    /// without support for this reports data everywhere.
    pub(super) fn extent(&self, offset: u64) -> io::Result<Extent> {
        let extent = |end: u64, is_hole| Extent {
            length: end.saturating_sub(offset).max(1),
            is_hole,
        };
        if self.kind != Kind::File {
            return Ok(extent(self.capacity(), false));
        }
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => Ok(extent(data, true)),
            // It may be punched in this moment.
            Ok(_) => Ok(extent(
                rustix::fs::seek(&self.file, SeekFrom::Hole(offset))?,
                false,
            )),
            Err(Errno::NXIO) => Ok(extent(self.capacity(), true)),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(extent(self.capacity(), false)),
            Err(error) => Err(error.into()),
        }
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let result = match self.kind {
            Kind::File => repeat(|| fallocate(&self.file, zeroing(true), offset, length)),
            Kind::BlockDevice { logical_block } => match whole_blocks(offset, length, logical_block) {
                Some((offset, length)) => blockdev::discard(&self.file, offset, length),
                None => Ok(()),
            },
        };
        match result {
            // It was only a hint.
            Err(error) if unsupported(&error) => Ok(()),
            result => result,
        }
    }

    /// Makes bytes within the file read as zeroes, and gives their space back with `unmap`. To be done
    /// [`alone`](Self::alone).
    pub(super) fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        unmap: bool,
        bounce: &mut Bounce,
    ) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        for flags in FREEING.into_iter().skip(usize::from(!unmap)) {
            match repeat(|| fallocate(&self.file, flags, offset, length)) {
                Err(error) if unsupported(&error) => {}
                result => return result,
            }
        }
        self.write(offset, length, false, bounce, |data| data.fill(0))
    }
}

/// The whole blocks in a range, if there are any.
fn whole_blocks(offset: u64, length: u64, block: u32) -> Option<(u64, u64)> {
    let block = u64::from(block);
    let first = offset.checked_next_multiple_of(block)?;
    let end = offset.checked_add(length)?;
    let end = end.checked_sub(end.checked_rem(block)?)?;
    let length = end.checked_sub(first)?;
    (length > 0).then_some((first, length))
}

/// A system call, again when a signal interrupted it.
fn repeat(call: impl Fn() -> rustix::io::Result<()>) -> io::Result<()> {
    rustix::io::retry_on_intr(call).map_err(io::Error::from)
}

/// Returns the kind of the file (or the name of its unsupported type) and its size in bytes.
fn measure(file: &File) -> io::Result<(Result<Kind, &'static str>, u64)> {
    let status = file::status(file)?;
    match status.kind {
        FileType::RegularFile => Ok((Ok(Kind::File), status.length)),
        FileType::BlockDevice => {
            let logical_block = blockdev::logical_block(file)?;
            Ok((Ok(Kind::BlockDevice { logical_block }), blockdev::size(file)?))
        }
        other => Ok((Err(kind_name(other)), 0)),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "file of unknown kind",
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

    fn target(alignment: Alignment) -> Target {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Target::aligned(file, alignment).unwrap()
    }

    fn errno(result: io::Result<()>) -> Option<i32> {
        result.err().and_then(|error| error.raw_os_error())
    }

    #[test]
    fn once_the_page_cache_could_not_be_flushed_no_flush_succeeds_again() {
        let target = target(Alignment::NONE);
        let failed = || Err(io::Error::from_raw_os_error(libc::EIO));
        let write = Operation::Write {
            offset: 0,
            stable: false,
        };
        let stable = Operation::Write {
            offset: 0,
            stable: true,
        };
        assert_eq!(errno(target.outcome(write, failed())), Some(libc::EIO));
        assert_eq!(errno(target.outcome(Operation::Flush, Ok(()))), None);
        assert_eq!(errno(target.outcome(Operation::Flush, failed())), Some(libc::EIO));
        assert_eq!(errno(target.outcome(Operation::Flush, Ok(()))), Some(libc::EIO));
        assert_eq!(errno(target.outcome(stable, Ok(()))), Some(libc::EIO));
        assert_eq!(errno(target.outcome(write, Ok(()))), None);
        let mut bounce = Bounce::default();
        let mut none = Iovecs::new(std::sync::Arc::new(vmm_base::GuestMemory::default()));
        assert_eq!(
            errno(target.execute(Operation::Flush, &mut none, &mut bounce)),
            Some(libc::EIO)
        );
    }

    #[test]
    fn without_the_page_cache_a_flush_may_be_tried_again() {
        let target = target(Alignment {
            memory: 512,
            offset: 512,
        });
        let failed = Err(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(errno(target.outcome(Operation::Flush, failed)), Some(libc::EIO));
        assert_eq!(errno(target.outcome(Operation::Flush, Ok(()))), None);
    }

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
}
