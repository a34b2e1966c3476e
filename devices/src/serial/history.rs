//! Output of a serial port, in bounded memory.
//!
//! The first bytes (the boot messages) are kept permanently, and so are the last ones; bytes in
//! between are overwritten. Positions count from the port's first byte. A reader is only a
//! position, so any number of readers is possible, and none delays the guest or another reader.

use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How many of the first and of the last bytes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of first bytes.
    pub first: usize,
    /// Number of last bytes behind the first ones, at least 1.
    pub last: usize,
}

impl Default for Capacity {
    /// 256 KiB and 1 MiB.
    fn default() -> Self {
        Self {
            first: 256 << 10,
            last: 1 << 20,
        }
    }
}

/// Memory is taken in steps of this many bytes as the ring fills.
const STEP: usize = 16 << 10;

/// The first and the last bytes that were printed.
#[derive(Debug)]
pub struct History {
    ring: Mutex<Ring>,
    news: EventFd,
}

#[derive(Debug)]
struct Ring {
    /// The first bytes; it never changes once it is full.
    head: Vec<u8>,
    capacity: Capacity,
    /// The last bytes behind `head`; byte number `n` of those is at `n % capacity.last`.
    bytes: Vec<u8>,
    /// Where the next byte goes.
    next: usize,
    /// Bytes printed so far.
    end: u64,
    /// The next byte signals `news`.
    armed: bool,
}

/// What [`History::read`] gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Bytes copied.
    pub bytes: usize,
    /// Bytes that were overwritten before they were read; they come before those copied.
    pub lost: u64,
}

impl History {
    /// An empty one that keeps as much as `capacity` says.
    pub fn new(capacity: Capacity) -> io::Result<Self> {
        let ring = Ring {
            head: Vec::new(),
            capacity: Capacity {
                last: capacity.last.max(1),
                ..capacity
            },
            bytes: Vec::new(),
            next: 0,
            end: 0,
            armed: false,
        };
        Ok(Self {
            ring: Mutex::new(ring),
            news: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Appends a byte.
    pub fn push(&self, byte: u8) {
        self.extend(&[byte]);
    }

    /// Appends bytes.
    pub fn extend(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut ring = self.lock();
        ring.extend(bytes);
        let news = std::mem::take(&mut ring.armed);
        drop(ring);
        if news {
            // It can only fail when the counter is full, and then it is readable.
            let _ = self.news.write(1);
        }
    }

    /// Number of bytes printed so far: the initial position of a reader that wants only new output.
    pub fn end(&self) -> u64 {
        self.lock().end
    }

    /// Copies what follows `position` into `buffer` and moves `position` on; nothing when there is no more.
    pub fn read(&self, position: &mut u64, buffer: &mut [u8]) -> Read {
        self.lock().read(position, buffer)
    }

    /// Returns the stored output and the position behind it. A [`notice`] replaces overwritten
    /// bytes. If more than `most` bytes are stored, only the last `most` are returned.
    pub fn replay(&self, most: usize) -> (Vec<u8>, u64) {
        self.lock().replay(most)
    }

    /// Has [`news`](Self::news) signalled once by the next byte behind `position`; says whether there are some
    /// already (then nothing is signalled).
    pub fn arm(&self, position: u64) -> bool {
        let mut ring = self.lock();
        let behind = ring.end > position;
        ring.armed = !behind;
        behind
    }

    /// The eventfd that [`arm`](Self::arm) speaks of. It belongs to one thread, which serves all readers.
    pub fn news(&self) -> &EventFd {
        &self.news
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn extend(&mut self, bytes: &[u8]) {
        self.end = self.end.saturating_add(bytes.len() as u64);
        let room = self.capacity.first.saturating_sub(self.head.len());
        let (head, mut rest) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
        append(&mut self.head, self.capacity.first, head);
        while !rest.is_empty() {
            let room = self.capacity.last.saturating_sub(self.next);
            let (now, later) = rest.split_at_checked(room).unwrap_or((rest, &[]));
            // While the ring fills for the first time, `next` is its length.
            let over = copy(self.bytes.get_mut(self.next..).unwrap_or_default(), now);
            append(
                &mut self.bytes,
                self.capacity.last,
                now.get(over..).unwrap_or_default(),
            );
            self.next = match self.next.saturating_add(now.len()) {
                next if next < self.capacity.last => next,
                _ => 0,
            };
            rest = later;
        }
    }

    fn read(&self, position: &mut u64, buffer: &mut [u8]) -> Read {
        let start = usize::try_from(*position).unwrap_or(usize::MAX);
        if let Some(rest @ [_, ..]) = self.head.get(start..) {
            let bytes = copy(buffer, rest);
            *position = position.saturating_add(bytes as u64);
            return Read { bytes, lost: 0 };
        }
        let begin = self.end.saturating_sub(self.bytes.len() as u64);
        let lost = begin.saturating_sub(*position);
        let start = (*position).clamp(begin, self.end);
        // How far back from the newest byte; at most the ring's length.
        let back = usize::try_from(self.end.saturating_sub(start)).unwrap_or(usize::MAX);
        // The ring in order of age: from `next` to the end, then from the beginning.
        let split = self.next.min(self.bytes.len());
        let (newer, older) = self.bytes.split_at_checked(split).unwrap_or((&[], &self.bytes));
        let skip = self.bytes.len().saturating_sub(back);
        let rest = older.get(skip..).unwrap_or_default();
        let from_newer = newer.get(skip.saturating_sub(older.len())..).unwrap_or_default();
        let first = copy(buffer, rest);
        let space = buffer.get_mut(first..).unwrap_or_default();
        let bytes = first.saturating_add(copy(space, from_newer));
        *position = start.saturating_add(bytes as u64);
        Read { bytes, lost }
    }

    fn replay(&self, most: usize) -> (Vec<u8>, u64) {
        let kept = self.head.len().saturating_add(self.bytes.len());
        let mut text = Vec::new();
        let mut position = 0;
        if kept > most {
            position = self.end.saturating_sub(most as u64);
            text = notice(position);
        }
        let mut piece = vec![0; STEP];
        loop {
            let read = self.read(&mut position, &mut piece);
            if read.lost > 0 {
                text.extend(notice(read.lost));
            }
            if read.bytes == 0 {
                return (text, position);
            }
            text.extend_from_slice(piece.get(..read.bytes).unwrap_or_default());
        }
    }
}

/// Notice that replaces lost output for a reader.
pub(super) fn notice(lost: u64) -> Vec<u8> {
    format!("\r\n[{lost} bytes of output lost]\r\n").into_bytes()
}

/// Appends to a buffer that grows in steps up to its capacity.
fn append(bytes: &mut Vec<u8>, capacity: usize, more: &[u8]) {
    let length = bytes.len().saturating_add(more.len());
    if length > bytes.capacity() {
        let stepped = length.checked_next_multiple_of(STEP).unwrap_or(length);
        let wanted = stepped.min(capacity).max(length);
        bytes.reserve_exact(wanted.saturating_sub(bytes.len()));
    }
    bytes.extend_from_slice(more);
}

/// Copies as much as there is and fits, as whole slices: a reader that copies holds the lock that the guest's next output waits for.
fn copy(to: &mut [u8], from: &[u8]) -> usize {
    let count = to.len().min(from.len());
    if let (Some(to), Some(from)) = (to.get_mut(..count), from.get(..count)) {
        to.copy_from_slice(from);
    }
    count
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn history(first: usize, last: usize) -> History {
        History::new(Capacity { first, last }).unwrap()
    }

    fn print(history: &History, text: &[u8]) {
        history.extend(text);
    }

    fn read_all(history: &History, position: &mut u64) -> (Vec<u8>, u64) {
        let (mut text, mut lost, mut buffer) = (Vec::new(), 0, [0; 7]);
        loop {
            let read = history.read(position, &mut buffer);
            lost += read.lost;
            text.extend_from_slice(&buffer[..read.bytes]);
            if read.bytes == 0 {
                return (text, lost);
            }
        }
    }

    #[test]
    fn readers_have_positions_of_their_own() {
        let history = history(5, 16);
        let (mut early, mut late) = (0, 0);
        print(&history, b"hello");
        assert_eq!(read_all(&history, &mut early), (b"hello".to_vec(), 0));
        print(&history, b" world");
        assert_eq!(read_all(&history, &mut late), (b"hello world".to_vec(), 0));
        assert_eq!(read_all(&history, &mut early), (b" world".to_vec(), 0));
        assert_eq!(read_all(&history, &mut early), (Vec::new(), 0));
        assert_eq!(history.replay(100), (b"hello world".to_vec(), 11));
    }

    #[test]
    fn a_reader_that_is_too_slow_is_told_how_much_it_lost() {
        let history = history(0, 4);
        let mut position = 0;
        print(&history, b"0123456789");
        assert_eq!(read_all(&history, &mut position), (b"6789".to_vec(), 6));
        assert_eq!(history.end(), 10);
    }

    #[test]
    fn a_replay_has_the_first_and_the_last_bytes_and_says_what_is_gone_between() {
        let history = history(3, 4);
        print(&history, b"0123456");
        assert_eq!(history.replay(100), (b"0123456".to_vec(), 7));
        print(&history, b"789");
        let (text, end) = history.replay(100);
        assert_eq!(
            (String::from_utf8(text).unwrap().as_str(), end),
            ("012\r\n[3 bytes of output lost]\r\n6789", 10)
        );
        let (text, end) = history.replay(2);
        assert_eq!(
            (String::from_utf8(text).unwrap().as_str(), end),
            ("\r\n[8 bytes of output lost]\r\n89", 10)
        );
    }

    #[test]
    fn memory_is_taken_as_the_ring_fills_and_never_beyond_its_capacity() {
        let history = history(20_000, 100_000);
        let taken = || {
            let ring = history.lock();
            (ring.head.capacity(), ring.bytes.capacity())
        };
        assert_eq!(taken(), (0, 0));
        print(&history, &[1; 100]);
        assert_eq!(taken(), (STEP, 0));
        print(&history, &[1; 300_000]);
        assert_eq!(taken(), (20_000, 100_000));
    }

    #[test]
    fn one_signal_is_given_for_all_that_comes_after_arming() {
        let history = history(1, 64);
        print(&history, b"a");
        assert!(history.news().read().is_err());
        assert!(history.arm(0));
        assert!(!history.arm(1));
        print(&history, b"bcd");
        assert_eq!(history.news().read().unwrap(), 1);
        print(&history, b"e");
        assert!(history.news().read().is_err());
    }

    proptest! {
        #[test]
        fn every_reader_sees_the_stream_less_what_it_is_told_it_lost(
            first in 0_usize..20,
            last in 1_usize..40,
            steps in proptest::collection::vec((0_usize..100, proptest::option::of(1_usize..50)), 1..40),
        ) {
            let history = history(first, last);
            let (mut printed, mut position, mut seen) = (Vec::<u8>::new(), 0, 0_usize);
            for (count, read) in steps {
                let numbers = printed.len()..printed.len() + count;
                let text: Vec<u8> = numbers.map(|number| u8::try_from(number % 251).unwrap()).collect();
                history.extend(&text);
                printed.extend(text);
                if let Some(length) = read {
                    let mut buffer = vec![0; length];
                    let read = history.read(&mut position, &mut buffer);
                    seen += usize::try_from(read.lost).unwrap();
                    prop_assert_eq!(&buffer[..read.bytes], &printed[seen..seen + read.bytes]);
                    seen += read.bytes;
                    prop_assert_eq!(position, seen as u64);
                    // A read may end where the first bytes do.
                    prop_assert!(read.bytes == length || seen == printed.len() || seen == first);
                }
            }
        }
    }
}
