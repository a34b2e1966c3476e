//! Pages between guest memory and a buffer.

use std::{os::unix::fs::FileExt, sync::LazyLock};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_base::GuestMemory;

use super::{
    error::SnapshotError,
    format::{PAGE, PAGE_BYTES},
};

/// How many bytes are worked on at a time: a multiple of a page.
pub(crate) const PIECE: u64 = 1 << 20;

const ZEROES: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// The checksum of a page of zeroes.
pub(crate) static CHECKSUM_OF_ZEROES: LazyLock<u32> = LazyLock::new(|| crc32c::crc32c(&ZEROES));

/// Whether a page has only zeroes.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page == ZEROES
}

/// Copies `length` bytes of guest memory into `buffer`, which has as many then. Memory in a file is read through that: a read of a mapping
/// would allocate each page that was never touched, or that the guest has given back.
pub(crate) fn read(
    memory: &GuestMemory,
    address: u64,
    length: u64,
    buffer: &mut Vec<u8>,
) -> Result<(), SnapshotError> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    buffer.resize(length, 0);
    let start = GuestAddress(address);
    let in_file = memory.find_region(start).and_then(|region| {
        let within = region.to_region_addr(start)?.0;
        let whole = within.checked_add(length as u64)? <= region.len();
        let place = region.file_offset().filter(|_| whole)?;
        Some((place.file(), place.start().saturating_add(within)))
    });
    match in_file {
        Some((file, offset)) => file.read_exact_at(buffer, offset).map_err(SnapshotError::reading),
        None => Ok(memory.read_slice(buffer, start)?),
    }
}

/// The pieces of at most [`PIECE`] bytes of a range of `length` bytes: where each begins, and its length.
pub(crate) fn pieces(length: u64) -> impl Iterator<Item = (u64, u64)> {
    let count = length.div_ceil(PIECE);
    (0..count).map(move |piece| {
        let start = piece.saturating_mul(PIECE);
        (start, PIECE.min(length.saturating_sub(start)))
    })
}

/// Joins pages that lie side by side, in order: (address, bytes), at most [`PIECE`] bytes each.
pub(crate) fn runs(pages: impl IntoIterator<Item = u64>) -> impl Iterator<Item = (u64, u64)> {
    let mut pages = pages.into_iter().peekable();
    std::iter::from_fn(move || {
        let first = pages.next()?;
        let mut length = PAGE;
        while length < PIECE
            && pages
                .next_if(|next| Some(*next) == first.checked_add(length))
                .is_some()
        {
            length = length.saturating_add(PAGE);
        }
        Some((first, length))
    })
}
