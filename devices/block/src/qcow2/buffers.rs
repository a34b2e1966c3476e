//! Reusable buffers. For a large buffer, the allocator of a `vmm` maps memory and unmaps it
//! afterwards, and each unmapping interrupts the processors of all vCPUs.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers that are kept, which are memory of an idle `vmm` as well. Mostly one thread is at work: it needs one for compressed
/// data and one for the table that says where the data is.
const KEPT: usize = 2;
/// A larger buffer is not kept, in bytes: one cluster at the most is so large.
const MAX_KEPT: usize = 2 << 20;

/// Unused buffers.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// Calls `action` with a buffer of `length` zero bytes.
    pub(super) fn with<T>(&self, length: usize, action: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut buffer = self.kept().pop().unwrap_or_default();
        buffer.clear();
        buffer.resize(length, 0);
        let result = action(&mut buffer);
        let mut kept = self.kept();
        if kept.len() < KEPT && buffer.capacity() <= MAX_KEPT {
            kept.push(buffer);
        }
        result
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_and_has_nothing_of_before() {
        let buffers = Buffers::default();
        let fill = |length| {
            buffers.with(length, |data| {
                assert!(data.len() == length && data.iter().all(|byte| *byte == 0));
                data.fill(7);
                data.as_ptr()
            })
        };
        let first = fill(100_000);
        assert_eq!(fill(4096), first);
        assert_eq!(fill(100_000), first);
        assert_eq!(buffers.kept().len(), 1);
    }

    #[test]
    fn those_in_use_at_once_are_others_and_what_is_too_large_is_not_kept() {
        let buffers = Buffers::default();
        buffers.with(1, |_| buffers.with(1, |_| ()));
        assert_eq!(buffers.kept().len(), 2);
        let buffers = Buffers::default();
        buffers.with(MAX_KEPT + 1, |_| ());
        assert!(buffers.kept().is_empty());
    }
}
