//! Reads answered synchronously from the host's page cache.
//!
//! A read of cached data is a copy, and a ring makes the copy when it receives the read. A single
//! read is cheaper as a direct system call; a batch of reads is cheaper through the ring. Reads of
//! uncached data go to the ring.

use std::io;

/// Reads that are not tried after one that was not in the page cache: others near it are probably not there either.
const COLD: u32 = 16;

/// Whether reads are worth trying.
#[derive(Debug)]
pub(super) struct Cached {
    /// The image is read through the page cache, and its file system supports RWF_NOWAIT.
    able: bool,
    /// Reads that are not to be tried.
    skipped: u32,
}

impl Cached {
    /// For an image that is read through the page cache, or past it.
    pub(super) fn new(able: bool) -> Self {
        Self { able, skipped: 0 }
    }

    /// Whether the next read is to be tried. Asked once for each.
    pub(super) fn is_worth_trying(&mut self) -> bool {
        if !self.able {
            return false;
        }
        match self.skipped.checked_sub(1) {
            Some(left) => {
                self.skipped = left;
                false
            }
            None => true,
        }
    }

    /// Records the result of a tried read of `length` bytes. `Ok` holds the number of bytes read.
    pub(super) fn learn(&mut self, length: usize, result: &io::Result<usize>) {
        match result {
            Ok(count) if *count == length => {}
            Ok(_) => self.skipped = COLD,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => self.skipped = COLD,
                // Errors of the image come again in the ring, where they are dealt with.
                Some(libc::EIO) => {}
                // The file system, or the kernel, can't.
                _ => self.able = false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(number: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(number))
    }

    /// Returns the indices of the tried reads, of `reads` in total.
    fn tried(cached: &mut Cached, reads: u32, result: &io::Result<usize>) -> Vec<u32> {
        let mut tried = Vec::new();
        for read in 0..reads {
            if cached.is_worth_trying() {
                tried.push(read);
                cached.learn(4096, result);
            }
        }
        tried
    }

    #[test]
    fn what_is_in_the_page_cache_is_tried_each_time() {
        let mut cached = Cached::new(true);
        assert_eq!(tried(&mut cached, 3, &Ok(4096)), [0, 1, 2]);
        assert_eq!(tried(&mut cached, 3, &errno(libc::EIO)), [0, 1, 2]);
    }

    #[test]
    fn after_one_that_is_not_there_some_are_left_to_the_ring() {
        let mut cached = Cached::new(true);
        assert_eq!(tried(&mut cached, 35, &errno(libc::EAGAIN)), [0, 17, 34]);
        let mut cached = Cached::new(true);
        cached.learn(4096, &Ok(512));
        assert_eq!(tried(&mut cached, 20, &Ok(4096)), [16, 17, 18, 19]);
    }

    #[test]
    fn where_it_can_not_be_said_none_is_tried_again() {
        for number in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EPERM, libc::EINVAL] {
            let mut cached = Cached::new(true);
            assert_eq!(tried(&mut cached, 100, &errno(number)), [0]);
        }
        assert!(tried(&mut Cached::new(false), 3, &Ok(4096)).is_empty());
    }
}
