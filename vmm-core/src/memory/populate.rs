//! Work on all of guest RAM, by several threads: on one, the kernel clears some gigabytes in a second.

#![allow(unsafe_code)]

use std::{
    io,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use rustix::{
    io::Errno,
    mm::{Advice, madvise},
};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, bitmap::Bitmap};
use vmm_base::{
    GuestMemory,
    thread::{ThreadKind, spawn_scoped},
};

/// Most threads: from here on the memory's bandwidth is the limit.
const MAX_THREADS: usize = 16;
/// A thread takes that many bytes at a time; with larger pages, one page.
const PIECE: usize = 64 << 20;

/// Bytes of a mapping of this process, which no other code uses meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    address: *mut u8,
    length: usize,
    /// Guest-physical address.
    guest: u64,
}

impl Piece {
    /// Its guest-physical addresses.
    pub fn guest(&self) -> Range<u64> {
        self.guest..self.guest.saturating_add(self.length as u64)
    }
}

// SAFETY: only an address; the code that accesses it is responsible for the access.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// Makes the kernel allocate all pages, writable, with new pages zeroed (MADV_POPULATE_WRITE).
/// Existing content stays. Fails like the first access: with ENOMEM, or with EFAULT instead of a
/// SIGBUS.
pub(super) fn touch(memory: &GuestMemory, page: u64) -> io::Result<()> {
    in_parallel(memory, page, |piece| {
        loop {
            // SAFETY: the range is a part of a mapping that is alive while `memory` is; its contents don't change.
            let done = unsafe { madvise(piece.address.cast(), piece.length, Advice::LinuxPopulateWrite) };
            match done {
                Err(Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    })
}

/// Writes zeroes over all of it and marks it as changed. No vCPU and no device may run.
pub(super) fn zero(memory: &GuestMemory, page: u64) -> io::Result<()> {
    in_parallel(memory, page, |piece| {
        // SAFETY: the range is a part of a writable mapping that is alive while `memory` is. No
        // references into guest memory exist, and by the caller's promise no other code writes to
        // it.
        unsafe { piece.address.write_bytes(0, piece.length) };
        Ok::<_, io::Error>(())
    })?;
    for region in memory.iter() {
        region.bitmap().mark_dirty(0, region.size());
    }
    Ok(())
}

/// Processors that this thread may run on. Not [`thread::available_parallelism`]: that one opens files of cgroups.
fn processors() -> usize {
    let allowed = rustix::thread::sched_getaffinity(None);
    let count = allowed.map_or(1, |processors| processors.count());
    usize::try_from(count).unwrap_or(1).max(1)
}

/// Does `work` on all of memory, in pieces of whole pages of this size. The first error ends it.
pub(crate) fn in_parallel<E: Send>(
    memory: &GuestMemory,
    page: u64,
    work: impl Fn(Piece) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let size = usize::try_from(page).unwrap_or(PIECE).max(PIECE);
    let mut pieces = Vec::new();
    for region in memory.iter() {
        let length = region.size();
        pieces.extend((0..length).step_by(size).map(|offset| Piece {
            address: region.as_ptr().wrapping_add(offset),
            length: size.min(length.saturating_sub(offset)),
            guest: region.start_addr().0.saturating_add(offset as u64),
        }));
    }
    let threads = processors().min(MAX_THREADS);
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let worker = || {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(*piece) {
                // The others have nothing to do any more.
                next.store(pieces.len(), Ordering::Relaxed);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(pieces.len()) {
            let started = spawn_scoped(scope, ThreadKind::Helper, "memory", worker);
            // With fewer threads it takes longer.
            drop(started);
        }
        worker();
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use vm_memory::GuestAddress;

    use super::*;

    #[test]
    fn every_byte_is_worked_on_once_and_the_first_error_ends_it() {
        let ranges = [(GuestAddress(0), 3 * PIECE + 4096), (GuestAddress(1 << 32), 4096)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        let (bytes, calls) = (AtomicU64::new(0), AtomicU64::new(0));
        in_parallel(&memory, 4096, |piece| {
            bytes.fetch_add(piece.length as u64, Ordering::Relaxed);
            calls.fetch_add(1, Ordering::Relaxed);
            Ok::<_, io::Error>(())
        })
        .unwrap();
        assert_eq!(bytes.into_inner(), 3 * PIECE as u64 + 2 * 4096);
        assert_eq!(calls.into_inner(), 5);
        let error = in_parallel(&memory, 4096, |_| Err(io::ErrorKind::OutOfMemory));
        assert_eq!(error.unwrap_err(), io::ErrorKind::OutOfMemory);
    }
}
