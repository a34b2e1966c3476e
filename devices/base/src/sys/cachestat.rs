//! How much of a file the page cache has that is not on the disk yet: cachestat(2), in Linux 6.5 and newer. For tests.

use std::{fs::File, io, os::fd::AsRawFd};

/// Its number; libc does not name it yet.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct Range {
    offset: u64,
    /// 0: up to the end.
    length: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Pages {
    cached: u64,
    dirty: u64,
    under_writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of a file that are dirty or on their way to the disk.
pub fn not_written_back(file: &File) -> io::Result<u64> {
    let (range, mut pages) = (Range { offset: 0, length: 0 }, Pages::default());
    // SAFETY: the call reads a range and writes a `struct cachestat` through pointers that are valid for its duration; no flags are
    // defined.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            &raw const range,
            &raw mut pages,
            0_u32,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(pages.dirty.saturating_add(pages.under_writeback))
}
