//! The picture on the screen, which devices write and others read.
//!
//! Invariant: the damage of each reader has the framebuffer's size. The lock is held while pixels are copied and never longer, so a vCPU or a device's worker waits for a copy at most.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rfb::{Cursor, Damage, Frame, Rect, Size, TILE};
use vmm_sys_util::eventfd::EventFd;

/// Most readers at once.
const MAX_READERS: usize = 8;
/// Largest side of a cursor in pixels: that of virtio-gpu (virtio 1.3, 5.7.6.10).
pub(crate) const MAX_CURSOR: u16 = 64;

/// Changes that a reader has not read yet.
#[derive(Debug)]
struct Reading {
    id: u64,
    damage: Damage,
    /// The cursor is another one than the reader knows.
    cursor: bool,
    /// The reader waits for a change and is to be woken.
    armed: bool,
    wake: Arc<EventFd>,
}

impl Reading {
    fn wake_up(&mut self) {
        if std::mem::take(&mut self.armed) {
            // It fails only when the counter is full, and then the reader is awake.
            let _full = self.wake.write(1);
        }
    }
}

#[derive(Debug)]
struct Inner {
    frame: Frame,
    cursor: Arc<Cursor>,
    readers: Vec<Reading>,
    next_id: u64,
}

/// The picture on the screen. Writers and readers share it.
#[derive(Debug)]
pub struct Framebuffer {
    inner: Mutex<Inner>,
}

impl Default for Framebuffer {
    fn default() -> Self {
        Self::new(Size::DEFAULT)
    }
}

impl Framebuffer {
    /// A black screen.
    pub fn new(size: Size) -> Self {
        Self {
            inner: Mutex::new(Inner {
                frame: Frame::black(size),
                cursor: Arc::default(),
                readers: Vec::new(),
                next_id: 0,
            }),
        }
    }

    /// Its size now.
    pub fn size(&self) -> Size {
        self.lock().frame.size()
    }

    /// Gives it a size and makes it black.
    pub fn clear(&self, size: Size) {
        let mut inner = self.lock();
        inner.frame = Frame::black(size);
        for reader in &mut inner.readers {
            reader.damage = Damage::all(size);
            reader.wake_up();
        }
    }

    /// Writes the part of `rect` that lies on the screen: `row` is called for each of its rows, with the row's number from the
    /// top of the screen and its pixels (0x00RRGGBB), from the first column of that part on.
    pub fn write(&self, rect: Rect, mut row: impl FnMut(u16, &mut [u32])) {
        let mut inner = self.lock();
        let rect = rect.intersection(inner.frame.size().rect());
        if rect.is_empty() {
            return;
        }
        for y in rect.y..rect.y.saturating_add(rect.height) {
            row(y, inner.frame.row_mut(rect, y));
        }
        for reader in &mut inner.readers {
            reader.damage.add(rect);
            reader.wake_up();
        }
    }

    /// Shows another cursor.
    pub fn set_cursor(&self, cursor: Cursor) {
        let mut inner = self.lock();
        if *inner.cursor == cursor {
            return;
        }
        inner.cursor = Arc::new(cursor);
        for reader in &mut inner.readers {
            reader.cursor = true;
            reader.wake_up();
        }
    }

    /// A copy of the picture.
    pub fn snapshot(&self) -> Frame {
        self.lock().frame.clone()
    }

    /// One more reader, for which all is damage at first; `None` when there are too many. `wake` is written to when
    /// something changes after [`Reader::arm`].
    pub fn reader(self: &Arc<Self>, wake: Arc<EventFd>) -> Option<Reader> {
        let mut inner = self.lock();
        if inner.readers.len() >= MAX_READERS {
            return None;
        }
        let id = inner.next_id;
        inner.next_id = id.wrapping_add(1);
        let damage = Damage::all(inner.frame.size());
        inner.readers.push(Reading {
            id,
            damage,
            cursor: true,
            armed: false,
            wake,
        });
        drop(inner);
        Some(Reader {
            framebuffer: Arc::clone(self),
            id,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes since the last read of a reader.
#[derive(Debug)]
pub struct Update {
    /// The parts of the picture that differ, or may differ.
    pub damage: Damage,
    /// The cursor, if it is another one.
    pub cursor: Option<Arc<Cursor>>,
}

/// Follows a framebuffer.
#[derive(Debug)]
pub struct Reader {
    framebuffer: Arc<Framebuffer>,
    id: u64,
}

impl Reader {
    /// Updates `frame` and returns the changes. `frame` must be the frame that this reader filled
    /// in the last call; any frame in the first call. Only damaged parts are copied. Only parts
    /// with different pixels count as changed, in whole tiles.
    pub fn read(&mut self, frame: &mut Frame) -> Update {
        let mut inner = self.framebuffer.lock();
        let Inner {
            frame: current,
            cursor,
            readers,
            ..
        } = &mut *inner;
        let Some(reading) = readers.iter_mut().find(|reading| reading.id == self.id) else {
            return Update {
                damage: Damage::none(frame.size()),
                cursor: None,
            };
        };
        let reported = std::mem::replace(&mut reading.damage, Damage::none(current.size()));
        let cursor = std::mem::take(&mut reading.cursor).then(|| Arc::clone(cursor));
        if frame.size() != current.size() {
            *frame = current.clone();
            return Update {
                damage: Damage::all(current.size()),
                cursor,
            };
        }
        let mut damage = Damage::none(current.size());
        for rect in reported.rects() {
            copy(current, frame, rect, &mut damage);
        }
        Update { damage, cursor }
    }

    /// Asks to be woken when something changes. True when something has changed already; then nobody wakes.
    pub fn arm(&mut self) -> bool {
        let mut inner = self.framebuffer.lock();
        let Some(reading) = inner.readers.iter_mut().find(|reading| reading.id == self.id) else {
            return false;
        };
        let changed = reading.cursor || !reading.damage.is_empty();
        reading.armed = !changed;
        changed
    }

    /// Does not want to be woken any more.
    pub fn disarm(&mut self) {
        let mut inner = self.framebuffer.lock();
        if let Some(reading) = inner.readers.iter_mut().find(|reading| reading.id == self.id) {
            reading.armed = false;
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.framebuffer
            .lock()
            .readers
            .retain(|reading| reading.id != self.id);
    }
}

/// Copies `rect`, which begins with a tile as all rectangles of damage do, and adds the tiles that were different to `damage`.
fn copy(from: &Frame, to: &mut Frame, rect: Rect, damage: &mut Damage) {
    let mut different = vec![false; rect.width.div_ceil(TILE).into()];
    let bottom = rect.y.saturating_add(rect.height);
    for top in (rect.y..bottom).step_by(TILE.into()) {
        different.fill(false);
        for y in top..bottom.min(top.saturating_add(TILE)) {
            let (source, target) = (from.row(rect, y), to.row_mut(rect, y));
            if source == target {
                continue;
            }
            let tiles = source.chunks(TILE.into()).zip(target.chunks_mut(TILE.into()));
            for ((source, target), different) in tiles.zip(&mut different) {
                // A tile with a known difference needs no further comparison.
                if *different || source != target {
                    target.copy_from_slice(source);
                    *different = true;
                }
            }
        }
        let columns = (rect.x..).step_by(TILE.into()).zip(&different);
        for (x, _) in columns.filter(|(_, different)| **different) {
            damage.add(Rect::new(x, top, 1, 1));
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
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn size(width: u32, height: u32) -> Size {
        Size::new(width, height).unwrap()
    }

    fn wake() -> (Arc<EventFd>, Arc<EventFd>) {
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        (Arc::clone(&wake), wake)
    }

    fn paint(framebuffer: &Framebuffer, rect: Rect, colour: u32) {
        framebuffer.write(rect, |_, row| row.fill(colour));
    }

    #[test]
    fn each_reader_gets_what_changed_since_it_read_last_itself() {
        let framebuffer = Arc::new(Framebuffer::new(size(100, 50)));
        let mut readers: Vec<_> = (0..2)
            .map(|_| (framebuffer.reader(wake().0).unwrap(), Frame::black(size(1, 1))))
            .collect();
        paint(&framebuffer, Rect::new(0, 0, 100, 50), 0x123456);
        let (first, frame) = &mut readers[0];
        assert_eq!(first.read(frame).damage, Damage::all(size(100, 50)));
        paint(&framebuffer, Rect::new(20, 20, 1, 1), 0xffffff);
        let update = first.read(frame);
        assert_eq!(update.damage.rects(), [Rect::new(16, 16, 16, 16)]);
        assert_eq!(*frame, framebuffer.snapshot());
        assert!(first.read(frame).damage.is_empty());
        let (second, frame) = &mut readers[1];
        assert_eq!(second.read(frame).damage, Damage::all(size(100, 50)));
        assert_eq!(*frame, framebuffer.snapshot());
    }

    #[test]
    fn what_was_painted_as_it_was_is_no_change() {
        let framebuffer = Arc::new(Framebuffer::new(size(64, 64)));
        let (mut reader, mut frame) = (framebuffer.reader(wake().0).unwrap(), Frame::black(size(64, 64)));
        reader.read(&mut frame);
        paint(&framebuffer, Rect::new(0, 0, 64, 64), 0);
        assert!(reader.read(&mut frame).damage.is_empty());
    }

    #[test]
    fn a_reader_is_woken_once_and_only_after_it_asked() {
        let framebuffer = Arc::new(Framebuffer::new(size(64, 64)));
        let (theirs, wake) = wake();
        let mut reader = framebuffer.reader(theirs).unwrap();
        let mut frame = Frame::black(size(64, 64));
        assert!(reader.arm(), "a new reader has all to read");
        reader.read(&mut frame);
        paint(&framebuffer, Rect::new(0, 0, 1, 1), 1);
        assert!(wake.read().is_err());
        assert!(reader.arm());
        reader.read(&mut frame);
        assert!(!reader.arm());
        paint(&framebuffer, Rect::new(0, 0, 1, 1), 2);
        paint(&framebuffer, Rect::new(0, 0, 1, 1), 3);
        assert_eq!(wake.read().unwrap(), 1);
        reader.read(&mut frame);
        assert!(!reader.arm());
        framebuffer.set_cursor(Cursor {
            width: 1,
            height: 1,
            hotspot: (0, 0),
            pixels: vec![7],
        });
        assert_eq!(wake.read().unwrap(), 1);
        assert!(reader.read(&mut frame).cursor.is_some());
        assert!(!reader.arm());
        reader.disarm();
        paint(&framebuffer, Rect::new(0, 0, 1, 1), 4);
        assert!(wake.read().is_err());
    }

    #[test]
    fn another_size_is_black_and_all_of_it_damage() {
        let framebuffer = Arc::new(Framebuffer::new(size(64, 64)));
        let (mut reader, mut frame) = (framebuffer.reader(wake().0).unwrap(), Frame::black(size(64, 64)));
        paint(&framebuffer, Rect::new(0, 0, 64, 64), 5);
        reader.read(&mut frame);
        framebuffer.clear(size(32, 16));
        let update = reader.read(&mut frame);
        assert_eq!(update.damage, Damage::all(size(32, 16)));
        assert_eq!(frame, Frame::black(size(32, 16)));
        // Pixels outside the picture are not written.
        paint(&framebuffer, Rect::new(31, 15, u16::MAX, u16::MAX), 9);
        paint(&framebuffer, Rect::new(32, 0, 5, 5), 9);
        assert_eq!(
            framebuffer
                .snapshot()
                .pixels()
                .iter()
                .filter(|pixel| **pixel == 9)
                .count(),
            1
        );
    }

    #[test]
    fn there_is_a_most_of_readers_and_one_that_goes_makes_room() {
        let framebuffer = Arc::new(Framebuffer::default());
        let mut readers: Vec<_> = (0..MAX_READERS)
            .map(|_| framebuffer.reader(wake().0).unwrap())
            .collect();
        assert!(framebuffer.reader(wake().0).is_none());
        readers.pop();
        assert!(framebuffer.reader(wake().0).is_some());
    }
}
