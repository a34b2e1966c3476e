//! Scatter-gather lists of guest memory for readv, writev and their kin.

mod parts;

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    ptr,
    sync::Arc,
};

use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileSlice};

use crate::{
    GuestMemory, ram,
    virtio::chain::{Segment, TooShort},
};

/// Most entries that the kernel takes in one call (UIO_MAXIOV).
const MAX_ENTRIES: usize = 1024;

/// Longest transfer of one call (the kernel's MAX_RW_COUNT, rounded down).
pub(super) const MAX_TRANSFER: usize = 0x7fff_0000;

/// Pieces of guest memory, in order, for one vectored system call. Meant to be used again, which saves allocations.
///
/// The kernel's writes into guest memory are not seen by the dirty bitmap: the caller marks them
/// ([`Chain::mark_written`](crate::virtio::chain::Chain::mark_written)).
///
/// Invariant: each entry but the first lies wholly inside a mapping of `memory`, which lives as long as this does. The first entry is
/// a place for a header of the caller's, empty outside of [`send`](Self::send).
#[derive(Debug)]
pub struct Iovecs {
    memory: Arc<GuestMemory>,
    entries: Vec<libc::iovec>,
    /// Bytes in all entries.
    length: usize,
}

// SAFETY: the pointers point into the mappings of `memory`, which any thread may use, and move along with it.
unsafe impl Send for Iovecs {}

impl Iovecs {
    /// An empty list over `memory`.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self {
            memory,
            entries: vec![EMPTY],
            length: 0,
        }
    }

    /// Bytes in the list.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether the kernel takes the list, with a header, in one call.
    pub fn fits_one_call(&self) -> bool {
        self.entries.len() <= MAX_ENTRIES && self.length <= MAX_TRANSFER
    }

    /// Empties the list.
    pub fn clear(&mut self) {
        self.entries.truncate(1);
        self.length = 0;
    }

    /// Appends `length` bytes of `segments` from `offset` bytes into them on. After an error the list is as before.
    pub fn append(&mut self, segments: &[Segment], offset: u32, length: u32) -> Result<(), TooShort> {
        // Mostly it is one piece of the first one, in one region.
        if length > 0
            && let Some(first) = segments.first()
            && first
                .length
                .checked_sub(offset)
                .is_some_and(|rest| rest >= length)
            && let Some(address) = first.address.0.checked_add(offset.into())
            && let Some(piece) = ram::slice(&self.memory, GuestAddress(address), length as usize)
        {
            return self.push_entry(piece.ptr_guard_mut().as_ptr(), piece.len());
        }
        let before = (self.entries.len(), self.length);
        let result = self.try_append(segments, offset, length);
        if result.is_err() {
            self.entries.truncate(before.0);
            self.length = before.1;
        }
        result
    }

    fn try_append(&mut self, segments: &[Segment], offset: u32, length: u32) -> Result<(), TooShort> {
        let (mut skip, mut left) = (offset, length);
        for segment in segments {
            if left == 0 {
                break;
            }
            let Some(room) = segment.length.checked_sub(skip).filter(|room| *room > 0) else {
                skip = skip.saturating_sub(segment.length);
                continue;
            };
            let take = room.min(left);
            let address = segment.address.0.checked_add(u64::from(skip)).ok_or(TooShort)?;
            self.push(address, take)?;
            (skip, left) = (0, left.saturating_sub(take));
        }
        if left == 0 { Ok(()) } else { Err(TooShort) }
    }

    fn push(&mut self, address: u64, length: u32) -> Result<(), TooShort> {
        let (address, length) = (GuestAddress(address), length as usize);
        // Mostly it lies in one region, which is quicker.
        if let Some(piece) = ram::slice(&self.memory, address, length) {
            let base = piece.ptr_guard_mut().as_ptr();
            return self.push_entry(base, length);
        }
        let memory = Arc::clone(&self.memory);
        for piece in GuestMemoryBackend::get_slices(&*memory, address, length) {
            let piece = piece.map_err(|_| TooShort)?;
            self.push_entry(piece.ptr_guard_mut().as_ptr(), piece.len())?;
        }
        Ok(())
    }

    fn push_entry(&mut self, base: *mut u8, length: usize) -> Result<(), TooShort> {
        self.length = self.length.checked_add(length).ok_or(TooShort)?;
        self.entries.push(libc::iovec {
            iov_base: base.cast(),
            iov_len: length,
        });
        Ok(())
    }

    /// Takes the first `count` bytes off the list.
    #[inline]
    pub fn skip(&mut self, count: usize) {
        if count >= self.length {
            // Mostly.
            return self.clear();
        }
        self.skip_part(count);
    }

    /// Less than all.
    fn skip_part(&mut self, count: usize) {
        let mut left = count;
        self.length = self.length.saturating_sub(left);
        let mut consumed = 0_usize;
        for entry in self.entries.iter_mut().skip(1) {
            if entry.iov_len > left {
                entry.iov_base = entry.iov_base.wrapping_byte_add(left);
                entry.iov_len = entry.iov_len.saturating_sub(left);
                break;
            }
            left = left.saturating_sub(entry.iov_len);
            consumed = consumed.saturating_add(1);
        }
        self.entries.drain(1..consumed.saturating_add(1));
    }

    /// What one call may be given: pointer and number of entries.
    pub(super) fn window(&self) -> (*const libc::iovec, u32) {
        let entries = self.entries.get(1..).unwrap_or_default();
        let entries = entries.get(..MAX_ENTRIES).unwrap_or(entries);
        (entries.as_ptr(), u32::try_from(entries.len()).unwrap_or(0))
    }

    /// Address and length of the only entry, if there is just one that one call may transfer.
    pub(super) fn only(&self) -> Option<(*mut u8, u32)> {
        match self.entries.as_slice() {
            [_, entry] if entry.iov_len <= MAX_TRANSFER => {
                Some((entry.iov_base.cast(), u32::try_from(entry.iov_len).ok()?))
            }
            _ => None,
        }
    }

    /// Whether all entries' addresses are multiples of `address` and their lengths of `length`, powers of two.
    pub fn aligned(&self, address: u32, length: u32) -> bool {
        let address = (address as usize).wrapping_sub(1);
        let length = (length as usize).wrapping_sub(1);
        self.entries
            .iter()
            .skip(1)
            .all(|entry| entry.iov_base.addr() & address == 0 && entry.iov_len & length == 0)
    }

    /// Fills `data` from the front of the list, as far as that goes, and takes it off the list.
    pub fn take(&mut self, mut data: &mut [u8]) {
        let mut count = 0_usize;
        for entry in self.entries.iter().skip(1) {
            let length = entry.iov_len.min(data.len());
            let (now, rest) = std::mem::take(&mut data).split_at_mut(length);
            // SAFETY: the entry lies in mapped guest memory (see the type's invariant).
            let guest = unsafe { VolatileSlice::new(entry.iov_base.cast(), length) };
            guest.copy_to(now);
            count = count.saturating_add(length);
            data = rest;
        }
        self.skip(count);
    }

    /// Writes `data` to the front of the list, as far as that goes, and takes that off the list.
    pub fn put(&mut self, mut data: &[u8]) {
        let mut count = 0_usize;
        for entry in self.entries.iter().skip(1) {
            let (now, rest) = data.split_at(entry.iov_len.min(data.len()));
            // SAFETY: the entry lies in mapped guest memory (see the type's invariant).
            let guest = unsafe { VolatileSlice::new(entry.iov_base.cast(), now.len()) };
            guest.copy_from(now);
            count = count.saturating_add(now.len());
            data = rest;
        }
        self.skip(count);
    }

    fn call_window(&self) -> (*const libc::iovec, libc::c_int) {
        let (entries, count) = self.window();
        (entries, libc::c_int::try_from(count).unwrap_or(0))
    }

    /// Fills the list from `file` at byte `offset`, wholly. Uses the list up.
    ///
    /// Ends with `UnexpectedEof` where the file does.
    pub fn read_exact_at(&mut self, file: impl AsFd, offset: u64) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        self.transfer(
            offset,
            io::ErrorKind::UnexpectedEof,
            |(entries, count), offset| {
                // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant);
                // nothing in Rust holds references into guest memory, so that the kernel may write to it.
                unsafe { libc::preadv(fd, entries, count, offset) }
            },
        )
    }

    /// Fills the front of the list from `file` at byte `offset`, as far as the page cache has it, and takes that off the
    /// list (RWF_NOWAIT). Returns how many bytes; fails with EAGAIN when there are none, and with EOPNOTSUPP where the file
    /// system does not know.
    pub fn read_cached_at(&mut self, file: impl AsFd, offset: u64) -> io::Result<usize> {
        let fd = file.as_fd().as_raw_fd();
        let offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (entries, count) = self.call_window();
        // SAFETY: as in `read_exact_at`.
        let done = checked(|| unsafe { libc::preadv2(fd, entries, count, offset, libc::RWF_NOWAIT) })?;
        self.skip(done);
        Ok(done)
    }

    /// Writes the list to `file` at byte `offset`, wholly; with `stable` it is on stable storage on return
    /// (RWF_DSYNC). Uses the list up.
    pub fn write_all_at(&mut self, file: impl AsFd, offset: u64, stable: bool) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        let flags = if stable { libc::RWF_DSYNC } else { 0 };
        self.transfer(offset, io::ErrorKind::WriteZero, |(entries, count), offset| {
            // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant),
            // which the kernel only reads.
            unsafe { libc::pwritev2(fd, entries, count, offset, flags) }
        })
    }

    /// Calls until all is done; `call` is one preadv or pwritev.
    fn transfer(
        &mut self,
        offset: u64,
        at_end: io::ErrorKind,
        call: impl Fn((*const libc::iovec, libc::c_int), libc::off_t) -> libc::ssize_t,
    ) -> io::Result<()> {
        let mut offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        while !self.is_empty() {
            match checked(|| call(self.call_window(), offset))? {
                0 => return Err(at_end.into()),
                done => {
                    self.skip(done);
                    let done = libc::off_t::try_from(done)
                        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
                    offset = offset
                        .checked_add(done)
                        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
                }
            }
        }
        Ok(())
    }

    /// Receives one packet into the list (one readv); returns its length. What does not fit is cut off.
    pub fn receive(&self, socket: impl AsFd) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        let (entries, count) = self.call_window();
        // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant);
        // nothing in Rust holds references into guest memory, so that the kernel may write to it.
        checked(|| unsafe { libc::readv(fd, entries, count) })
    }

    /// Sends `header` and the list as one packet (one writev).
    pub fn send(&mut self, socket: impl AsFd, header: &[u8]) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        if !self.fits_one_call() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if let Some(first) = self.entries.first_mut() {
            *first = libc::iovec {
                iov_base: header.as_ptr().cast_mut().cast(),
                iov_len: header.len(),
            };
        }
        let count = libc::c_int::try_from(self.entries.len()).unwrap_or(0);
        let entries = self.entries.as_ptr();
        // SAFETY: `entries` are `count` entries: the first is `header`, the others point into mapped guest memory
        // (see the type's invariant); the kernel only reads them.
        let sent = checked(|| unsafe { libc::writev(fd, entries, count) });
        if let Some(first) = self.entries.first_mut() {
            *first = EMPTY;
        }
        sent
    }
}

const EMPTY: libc::iovec = libc::iovec {
    iov_base: ptr::null_mut(),
    iov_len: 0,
};

/// Result of a system call, which is repeated when a signal interrupted it.
fn checked(call: impl Fn() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use std::{io::Write, os::unix::fs::FileExt, os::unix::net::UnixDatagram};

    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    fn memory() -> Arc<GuestMemory> {
        let memory =
            GuestMemory::from_ranges(&[(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x4_0000)]).unwrap();
        Arc::new(memory)
    }

    fn segment(address: u64, length: u32) -> Segment {
        Segment {
            address: GuestAddress(address),
            length,
        }
    }

    #[test]
    fn a_list_is_cut_out_of_segments_across_regions_of_memory() {
        let mut list = Iovecs::new(memory());
        let segments = [segment(0x10, 4), segment(0x3ffe, 4), segment(0x5000, 100)];
        list.append(&segments, 2, 6).unwrap();
        assert_eq!((list.len(), list.entries.len() - 1), (6, 3));
        list.append(&segments, 8, 100).unwrap();
        assert_eq!(list.len(), 106);
        assert_eq!(list.append(&segments, 8, 101), Err(TooShort));
        assert_eq!((list.len(), list.entries.len() - 1), (106, 4));
        list.clear();
        assert!(list.is_empty());
    }

    #[test]
    fn what_is_written_at_an_offset_is_read_back_through_other_cuts() {
        let memory = memory();
        let pattern: Vec<u8> = (0..=255).cycle().take(5000).collect();
        memory.write_slice(&pattern, GuestAddress(0x100)).unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut list = Iovecs::new(memory.clone());
        for stable in [false, true] {
            list.append(&[segment(0x100, 5000)], 0, 5000).unwrap();
            list.write_all_at(&file, 512, stable).unwrap();
            assert!(list.is_empty());
        }
        let pieces: Vec<_> = (0..50).map(|n| segment(0x8000 + n * 0x200, 100)).collect();
        list.append(&pieces, 0, 5000).unwrap();
        list.read_exact_at(&file, 512).unwrap();
        for (n, piece) in pieces.iter().enumerate() {
            let mut data = [0; 100];
            memory.read_slice(&mut data, piece.address).unwrap();
            assert_eq!(data[..], pattern[n * 100..][..100]);
        }
    }

    #[test]
    fn more_entries_than_the_kernel_takes_at_once_are_worked_off_in_turns() {
        let memory = memory();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 3000]).unwrap();
        let mut list = Iovecs::new(memory.clone());
        for n in 0..3000 {
            list.append(&[segment(0x4000 + n * 2, 1)], 0, 1).unwrap();
        }
        assert!(!list.fits_one_call());
        list.read_exact_at(&file, 0).unwrap();
        for n in 0..3000 {
            assert_eq!(
                memory.read_obj::<[u8; 2]>(GuestAddress(0x4000 + n * 2)).unwrap(),
                [7, 0]
            );
        }
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 100], 0).unwrap();
        let mut list = Iovecs::new(memory());
        list.append(&[segment(0, 200)], 0, 200).unwrap();
        assert_eq!(
            list.read_exact_at(&file, 0).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn skipping_takes_whole_and_partial_entries_off() {
        let mut list = Iovecs::new(memory());
        list.append(&[segment(0, 10), segment(100, 10), segment(200, 10)], 0, 30)
            .unwrap();
        let base = list.entries[1].iov_base;
        list.skip(3);
        assert_eq!(
            (list.entries[1].iov_base, list.len()),
            (base.wrapping_byte_add(3), 27)
        );
        list.skip(17);
        assert_eq!((list.entries.len(), list.len()), (2, 10));
        list.skip(100);
        assert!(list.is_empty() && list.entries.len() == 1);
    }

    #[test]
    fn data_is_copied_out_and_in_piece_by_piece() {
        let memory = memory();
        memory.write_slice(b"0123456789", GuestAddress(0x3ffa)).unwrap();
        let mut list = Iovecs::new(memory.clone());
        list.append(&[segment(0x3ffa, 10), segment(0x100, 5)], 0, 15)
            .unwrap();
        let mut data = [0; 8];
        list.take(&mut data);
        assert_eq!((&data, list.len()), (b"01234567", 7));
        list.put(b"abc");
        list.put(b"defg+++");
        assert!(list.is_empty());
        assert_eq!(&memory.read_obj::<[u8; 2]>(GuestAddress(0x4002)).unwrap(), b"ab");
        assert_eq!(
            &memory.read_obj::<[u8; 6]>(GuestAddress(0x100)).unwrap(),
            b"cdefg\0"
        );
    }

    #[test]
    fn alignment_is_that_of_the_worst_entry() {
        let mut list = Iovecs::new(memory());
        list.append(&[segment(0x400, 0x400), segment(0x1200, 0x200)], 0, 0x600)
            .unwrap();
        assert!(list.aligned(512, 512) && list.aligned(1, 1));
        assert!(!list.aligned(1024, 512) && !list.aligned(512, 1024));
    }

    #[test]
    fn packets_are_sent_with_a_header_and_received_whole() {
        let memory = memory();
        memory.write_slice(b"payload", GuestAddress(0x20)).unwrap();
        let (a, b) = UnixDatagram::pair().unwrap();
        let mut list = Iovecs::new(memory.clone());
        list.append(&[segment(0x20, 3), segment(0x23, 4)], 0, 7).unwrap();
        assert_eq!(list.send(&a, b"head").unwrap(), 11);
        let mut into = Iovecs::new(memory.clone());
        into.append(&[segment(0x1000, 5), segment(0x2000, 1000)], 0, 1005)
            .unwrap();
        assert_eq!(into.receive(&b).unwrap(), 11);
        assert_eq!(
            &memory.read_obj::<[u8; 5]>(GuestAddress(0x1000)).unwrap(),
            b"headp"
        );
        assert_eq!(
            &memory.read_obj::<[u8; 6]>(GuestAddress(0x2000)).unwrap(),
            b"ayload"
        );
        b.set_nonblocking(true).unwrap();
        assert_eq!(into.receive(&b).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
