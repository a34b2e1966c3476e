//! What a serial port printed, in bounded memory.
//!
//! Bytes are counted from the port's first one on; a reader is a position in that count and nothing else, so that
//! there may be any number of them, and none can hold anything up.

use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// What is kept when nothing else is asked for, in bytes.
pub const DEFAULT_CAPACITY: usize = 256 << 10;

/// Memory is taken in steps of this many bytes as the ring fills.
const STEP: usize = 16 << 10;

/// The last bytes that were printed.
#[derive(Debug)]
pub struct History {
    ring: Mutex<Ring>,
    news: EventFd,
}

#[derive(Debug)]
struct Ring {
    /// Byte number `n` is at `n % capacity`.
    bytes: Vec<u8>,
    capacity: usize,
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
    /// An empty one that keeps the last `capacity` bytes (at least 1).
    pub fn new(capacity: usize) -> io::Result<Self> {
        let ring = Ring {
            bytes: Vec::new(),
            capacity: capacity.max(1),
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
        let mut ring = self.lock();
        ring.push(byte);
        let news = std::mem::take(&mut ring.armed);
        drop(ring);
        if news {
            // It can only fail when the counter is full, and then it is readable.
            let _ = self.news.write(1);
        }
    }

    /// How many bytes were printed so far: the position of a reader that wants only what comes.
    pub fn end(&self) -> u64 {
        self.lock().end
    }

    /// The position of the oldest byte that is still there.
    pub fn begin(&self) -> u64 {
        self.lock().begin()
    }

    /// Copies what follows `position` into `buffer` and moves `position` on; nothing when there is no more.
    pub fn read(&self, position: &mut u64, buffer: &mut [u8]) -> Read {
        self.lock().read(position, buffer)
    }

    /// All that is there, and the position behind it.
    pub fn snapshot(&self) -> (Vec<u8>, u64) {
        let ring = self.lock();
        let mut bytes = vec![0; ring.bytes.len()];
        let mut position = ring.begin();
        let read = ring.read(&mut position, &mut bytes);
        bytes.truncate(read.bytes);
        (bytes, position)
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
    fn push(&mut self, byte: u8) {
        match self.bytes.get_mut(self.next) {
            Some(place) => *place = byte,
            // Filling for the first time: `next` is the length.
            None => {
                if self.bytes.len() == self.bytes.capacity() {
                    let left = self.capacity.saturating_sub(self.bytes.len());
                    self.bytes.reserve_exact(left.min(STEP));
                }
                self.bytes.push(byte);
            }
        }
        self.end = self.end.saturating_add(1);
        self.next = match self.next.saturating_add(1) {
            next if next < self.capacity => next,
            _ => 0,
        };
    }

    fn begin(&self) -> u64 {
        self.end.saturating_sub(self.bytes.len() as u64)
    }

    fn read(&self, position: &mut u64, buffer: &mut [u8]) -> Read {
        let begin = self.begin();
        let lost = begin.saturating_sub(*position);
        let start = (*position).clamp(begin, self.end);
        // How far back from the newest byte; at most the ring's length.
        let back = usize::try_from(self.end.saturating_sub(start)).unwrap_or(usize::MAX);
        let length = back.min(buffer.len());
        // The ring in order of age: from `next` to the end, then from the beginning.
        let split = self.next.min(self.bytes.len());
        let (newer, older) = self.bytes.split_at_checked(split).unwrap_or((&[], &self.bytes));
        let skip = self.bytes.len().saturating_sub(back);
        let rest = older.get(skip..).unwrap_or_default();
        let from_newer = newer.get(skip.saturating_sub(older.len())..).unwrap_or_default();
        for (to, from) in buffer.iter_mut().take(length).zip(rest.iter().chain(from_newer)) {
            *to = *from;
        }
        *position = start.saturating_add(length as u64);
        Read { bytes: length, lost }
    }
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

    fn print(history: &History, text: &[u8]) {
        text.iter().for_each(|byte| history.push(*byte));
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
        let history = History::new(16).unwrap();
        let (mut early, mut late) = (0, 0);
        print(&history, b"hello");
        assert_eq!(read_all(&history, &mut early), (b"hello".to_vec(), 0));
        print(&history, b" world");
        assert_eq!(read_all(&history, &mut late), (b"hello world".to_vec(), 0));
        assert_eq!(read_all(&history, &mut early), (b" world".to_vec(), 0));
        assert_eq!(read_all(&history, &mut early), (Vec::new(), 0));
        assert_eq!(history.snapshot(), (b"hello world".to_vec(), 11));
    }

    #[test]
    fn a_reader_that_is_too_slow_is_told_how_much_it_lost() {
        let history = History::new(4).unwrap();
        let mut position = 0;
        print(&history, b"0123456789");
        assert_eq!(read_all(&history, &mut position), (b"6789".to_vec(), 6));
        assert_eq!((history.begin(), history.end()), (6, 10));
    }

    #[test]
    fn memory_is_taken_as_the_ring_fills_and_never_beyond_its_capacity() {
        let history = History::new(100_000).unwrap();
        assert_eq!(history.lock().bytes.capacity(), 0);
        print(&history, &[1; 100]);
        assert_eq!(history.lock().bytes.capacity(), STEP);
        print(&history, &[1; 300_000]);
        assert_eq!(history.lock().bytes.capacity(), 100_000);
    }

    #[test]
    fn one_signal_is_given_for_all_that_comes_after_arming() {
        let history = History::new(64).unwrap();
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
            capacity in 1_usize..40,
            steps in proptest::collection::vec((0_usize..60, proptest::option::of(1_usize..50)), 1..40),
        ) {
            let history = History::new(capacity).unwrap();
            let (mut printed, mut position, mut seen) = (Vec::<u8>::new(), 0, 0_usize);
            for (count, read) in steps {
                for _ in 0..count {
                    let byte = u8::try_from(printed.len() % 251).unwrap();
                    history.push(byte);
                    printed.push(byte);
                }
                if let Some(length) = read {
                    let mut buffer = vec![0; length];
                    let read = history.read(&mut position, &mut buffer);
                    seen += usize::try_from(read.lost).unwrap();
                    prop_assert_eq!(&buffer[..read.bytes], &printed[seen..seen + read.bytes]);
                    seen += read.bytes;
                    prop_assert_eq!(position, seen as u64);
                    prop_assert!(read.bytes == length || seen == printed.len());
                }
            }
        }
    }
}
