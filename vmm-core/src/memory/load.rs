//! Files into guest memory, without a copy in between and without a mapping that would stay.

#![allow(unsafe_code)]

use std::{fs::File, io, os::fd::AsRawFd};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryError, bitmap::Bitmap};
use vmm_base::GuestMemory;

/// A file that could not be read into guest memory.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file ends too early.
    #[error("the file ends {missing} bytes too early")]
    Truncated {
        /// How many bytes are missing.
        missing: u64,
    },
    /// There is no RAM at the destination.
    #[error("no memory at its destination")]
    Memory(#[from] GuestMemoryError),
    /// The read failed.
    #[error("reading failed")]
    Read(#[from] io::Error),
}

/// Reads `length` bytes at `offset` of `file` to `address`. The file's own position is neither used nor changed: the
/// description may be shared with another process.
pub fn load_file(
    memory: &GuestMemory,
    address: GuestAddress,
    file: &File,
    mut offset: u64,
    length: u64,
) -> Result<(), LoadError> {
    let length = usize::try_from(length).map_err(|_| GuestMemoryError::GuestAddressOverflow)?;
    // The destination as a whole is checked before a byte of it is written.
    let slices = memory
        .get_slices(address, length)
        .collect::<Result<Vec<_>, _>>()?;
    let mut left = length;
    for slice in slices {
        let mut done = 0;
        while done < slice.len() {
            let target = slice
                .subslice(done, slice.len().saturating_sub(done))
                .map_err(GuestMemoryError::from)?;
            let count = read_at(file, &target, offset)?;
            if count == 0 {
                return Err(LoadError::Truncated { missing: left as u64 });
            }
            target.bitmap().mark_dirty(0, count);
            done = done.saturating_add(count);
            left = left.saturating_sub(count);
            offset = offset.saturating_add(count as u64);
        }
    }
    Ok(())
}

fn read_at<B: vm_memory::bitmap::BitmapSlice>(
    file: &File,
    target: &vm_memory::VolatileSlice<'_, B>,
    offset: u64,
) -> io::Result<usize> {
    let offset = libc::off64_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    loop {
        let guard = target.ptr_guard_mut();
        // SAFETY: the slice is guest memory, mapped for its lifetime; the kernel writes at most its length there.
        // No reference to that memory exists.
        let count = unsafe { libc::pread64(file.as_raw_fd(), guard.as_ptr().cast(), target.len(), offset) };
        if let Ok(count) = usize::try_from(count) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Seek, Write};

    use vm_memory::Bytes;

    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)]).unwrap()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_part_of_a_file_lands_across_regions_and_the_position_stays() {
        let mut file = file(b"..across..");
        let memory = memory();
        load_file(&memory, GuestAddress(0xffd), &file, 2, 6).unwrap();
        let mut bytes = [0; 8];
        memory.read_slice(&mut bytes, GuestAddress(0xffc)).unwrap();
        assert_eq!(&bytes, b"\0across\0");
        assert_eq!(file.stream_position().unwrap(), 10);
    }

    #[test]
    fn short_file_and_destination_outside_ram_differ() {
        let memory = memory();
        let file = file(&[1; 100]);
        let truncated = load_file(&memory, GuestAddress(0), &file, 90, 20);
        assert!(matches!(truncated, Err(LoadError::Truncated { missing: 10 })));
        for (address, length) in [(0x1fff, 2), (u64::MAX, 2), (0, u64::MAX), (0x5000, 1)] {
            let outside = load_file(&memory, GuestAddress(address), &file, 0, length);
            assert!(
                matches!(outside, Err(LoadError::Memory(_))),
                "{address:#x} {length:#x}"
            );
        }
    }
}
