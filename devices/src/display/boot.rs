//! Screen of a guest without a driver for its adapter: pixels in memory that the guest writes
//! directly, as firmware hands it to a kernel (Linux's efifb and simpledrm).
//!
//! The host detects changes by querying the written pages. Therefore the viewer of the screen polls
//! the pages, and only while the screen shows this memory.

use std::{
    ops::Range,
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rfb::{Rect, Size};

use super::framebuffer::Framebuffer;
use crate::pci::function::BarMemory;

/// Bytes of a pixel: blue, green, red, and one without a meaning.
pub const PIXEL: usize = 4;

/// Memory that the guest writes pixels to.
pub trait VideoMemory: BarMemory {
    /// Returns the byte ranges written since the last call, in order; all bytes at the first call.
    /// The content is read after the call: the next call reports a later write.
    fn take_changes(&self) -> Vec<Range<usize>>;
    /// Reads from `offset` on; bytes beyond the end read as zeroes.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Writes from `offset` on; bytes beyond the end are dropped.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Makes all of it zeroes, and gives its pages back to the host.
    fn clear(&self);
}

#[derive(Debug)]
struct Shown {
    /// The screen shows this.
    now: bool,
    /// The next read covers everything, regardless of changes.
    all: bool,
}

/// See the module.
pub struct BootScreen {
    size: Size,
    memory: Arc<dyn VideoMemory>,
    framebuffer: Arc<Framebuffer>,
    /// Taken before the framebuffer's lock. Held over a poll, so that nothing is written once this is hidden.
    shown: Mutex<Shown>,
}

impl BootScreen {
    /// Bytes of the BAR behind which a screen of that size is: a power of two, at least a page.
    pub fn bar_size(size: Size) -> u64 {
        const PAGE: u64 = 4096;
        (size.pixels().saturating_mul(PIXEL) as u64)
            .next_power_of_two()
            .max(PAGE)
    }

    /// A screen of `size` in `memory`, which `framebuffer` shows from now on.
    pub fn new(framebuffer: Arc<Framebuffer>, size: Size, memory: Arc<dyn VideoMemory>) -> Self {
        let screen = Self {
            size,
            memory,
            framebuffer,
            shown: Mutex::new(Shown {
                now: false,
                all: true,
            }),
        };
        screen.show();
        screen
    }

    /// Memory behind the BAR.
    pub fn memory(&self) -> Arc<dyn VideoMemory> {
        Arc::clone(&self.memory)
    }

    /// Shows this, from the next poll on; until then the screen is black.
    pub fn show(&self) {
        let mut shown = self.lock();
        *shown = Shown { now: true, all: true };
        self.framebuffer.clear(self.size);
    }

    /// Leaves the framebuffer, which is black then, to somebody else. Does nothing when it is somebody else's already.
    pub fn hide(&self) {
        let mut shown = self.lock();
        if std::mem::take(&mut shown.now) {
            self.framebuffer.clear(self.size);
        }
    }

    /// The same for a driver of the adapter. The picture of the guest without a driver is cleared, so that no saved state has it.
    pub fn hand_over(&self) {
        if self.is_shown() {
            self.hide();
            self.memory.clear();
        }
    }

    /// Whether the screen shows this.
    pub fn is_shown(&self) -> bool {
        self.lock().now
    }

    /// Updates the framebuffer. Returns whether the guest had written to the memory; `None` if the
    /// screen shows another source, which updates the framebuffer without polling.
    pub fn poll(&self) -> Option<bool> {
        let mut shown = self.lock();
        if !shown.now {
            return None;
        }
        let changes = self.memory.take_changes();
        let rows = if std::mem::take(&mut shown.all) {
            rows(slice::from_ref(&(0..usize::MAX)), self.size)
        } else {
            rows(&changes, self.size)
        };
        for rows in &rows {
            self.copy(rows);
        }
        Some(!rows.is_empty())
    }

    fn copy(&self, rows: &Range<u16>) {
        let height = rows.end.saturating_sub(rows.start);
        let rect = Rect::new(0, rows.start, self.size.width(), height);
        let stride = stride(self.size);
        let mut bytes = vec![0; stride];
        self.framebuffer.write(rect, |y, pixels| {
            self.memory
                .read(usize::from(y).saturating_mul(stride), &mut bytes);
            for (pixel, raw) in pixels.iter_mut().zip(bytes.as_chunks::<PIXEL>().0) {
                *pixel = u32::from_le_bytes(*raw) & 0x00ff_ffff;
            }
        });
    }

    /// Returns the content of the memory without trailing zeroes.
    pub(crate) fn save(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes()];
        self.memory.read(0, &mut bytes);
        let used = bytes.iter().rposition(|byte| *byte != 0);
        bytes.truncate(used.map_or(0, |last| last.saturating_add(1)));
        bytes
    }

    /// Restores saved content; false if it exceeds the memory.
    pub(crate) fn restore(&self, saved: &[u8]) -> bool {
        let fits = saved.len() <= self.bytes();
        if fits {
            self.memory.write(0, saved);
        }
        fits
    }

    fn bytes(&self) -> usize {
        self.size.pixels().saturating_mul(PIXEL)
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stride(size: Size) -> usize {
    usize::from(size.width()).saturating_mul(PIXEL)
}

/// The rows that `changes` touch, in order and apart from each other.
fn rows(changes: &[Range<usize>], size: Size) -> Vec<Range<u16>> {
    let stride = stride(size);
    let row = |at: usize| u16::try_from(at).unwrap_or(u16::MAX).min(size.height());
    let mut rows: Vec<Range<u16>> = Vec::new();
    for change in changes.iter().filter(|change| !change.is_empty()) {
        let first = change.start.checked_div(stride).unwrap_or(0);
        let new = row(first)..row(change.end.div_ceil(stride));
        match rows.last_mut() {
            Some(last) if new.start <= last.end => last.end = last.end.max(new.end),
            _ if new.is_empty() => {}
            _ => rows.push(new),
        }
    }
    rows
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(
        clippy::unwrap_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::single_range_in_vec_init,
        reason = "lists of one range are meant"
    )]

    use rfb::Frame;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    /// Memory that the test's guest writes to.
    pub struct Memory {
        bytes: Mutex<Vec<u8>>,
        changes: Mutex<Vec<Range<usize>>>,
        pub places: Mutex<Vec<Option<u64>>>,
    }

    impl Memory {
        pub fn new(size: Size) -> Arc<Self> {
            Arc::new(Self {
                bytes: Mutex::new(vec![0; usize::try_from(BootScreen::bar_size(size)).unwrap()]),
                changes: Mutex::default(),
                places: Mutex::default(),
            })
        }
    }

    impl BarMemory for Memory {
        fn size(&self) -> u64 {
            self.bytes.lock().unwrap().len() as u64
        }

        fn moved(&self, address: Option<u64>) {
            self.places.lock().unwrap().push(address);
        }
    }

    impl VideoMemory for Memory {
        fn take_changes(&self) -> Vec<Range<usize>> {
            std::mem::take(&mut *self.changes.lock().unwrap())
        }

        fn read(&self, offset: usize, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + bytes.len()]);
        }

        fn write(&self, offset: usize, bytes: &[u8]) {
            self.bytes.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
            self.changes.lock().unwrap().push(offset..offset + bytes.len());
        }

        fn clear(&self) {
            self.bytes.lock().unwrap().fill(0);
        }
    }

    const SIZE: Size = Size::DEFAULT;

    fn screen() -> (Arc<Memory>, Arc<Framebuffer>, BootScreen) {
        let (memory, framebuffer) = (Memory::new(SIZE), Arc::new(Framebuffer::new(SIZE)));
        let screen = BootScreen::new(Arc::clone(&framebuffer), SIZE, Arc::clone(&memory) as _);
        (memory, framebuffer, screen)
    }

    fn pixel(framebuffer: &Framebuffer, x: u16, y: u16) -> u32 {
        framebuffer.snapshot().row(SIZE.rect(), y)[usize::from(x)]
    }

    #[test]
    fn what_the_guest_writes_is_on_the_screen_after_a_poll_and_only_that_is_damage() {
        let (memory, framebuffer, screen) = screen();
        assert_eq!(screen.poll(), Some(true), "all at first");
        assert_eq!(screen.poll(), Some(false));
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let mut reader = framebuffer.reader(wake).unwrap();
        let mut frame = Frame::black(SIZE);
        reader.read(&mut frame);

        let at = (5 * usize::from(SIZE.width()) + 7) * PIXEL;
        memory.write(at, &[0x33, 0x22, 0x11, 0xff]);
        assert_eq!(pixel(&framebuffer, 7, 5), 0);
        assert_eq!(screen.poll(), Some(true));
        assert_eq!(pixel(&framebuffer, 7, 5), 0x11_2233);
        let damage = reader.read(&mut frame).damage.rects();
        assert_eq!(damage, [Rect::new(0, 0, 16, 16)]);
    }

    #[test]
    fn nothing_is_drawn_over_another_source_and_all_is_there_when_the_screen_comes_back() {
        let (memory, framebuffer, screen) = screen();
        screen.poll();
        screen.hide();
        memory.write(0, &[0xff; 4]);
        assert_eq!((screen.poll(), screen.is_shown()), (None, false));
        assert_eq!(pixel(&framebuffer, 0, 0), 0);
        // Somebody else's poll took the change; it is seen nevertheless.
        memory.take_changes();
        framebuffer.clear(Size::new(640, 480).unwrap());
        screen.show();
        assert_eq!(framebuffer.size(), SIZE);
        assert_eq!(screen.poll(), Some(true));
        assert_eq!(pixel(&framebuffer, 0, 0), 0x00ff_ffff);
    }

    #[test]
    fn what_was_drawn_goes_when_a_driver_takes_over_once() {
        let (memory, _, screen) = screen();
        memory.write(0, &[0xff; 4]);
        screen.hand_over();
        assert!(screen.save().is_empty());
        memory.write(0, &[0xff; 4]);
        screen.hand_over();
        assert_eq!(screen.save(), [0xff; 4], "what is drawn behind a driver stays");
    }

    #[test]
    fn what_is_saved_ends_with_the_last_byte_that_is_not_zero_and_more_than_the_screen_is_refused() {
        let (memory, _, before) = screen();
        assert!(before.save().is_empty());
        memory.write(4096, &[1, 2, 0, 0]);
        let saved = before.save();
        assert_eq!(saved.len(), 4098);
        let (_, framebuffer, after) = screen();
        assert!(after.restore(&saved));
        after.poll();
        assert_eq!(pixel(&framebuffer, 0, 1), 0x0201);
        assert!(!after.restore(&vec![0; SIZE.pixels() * PIXEL + 1]));
    }

    #[test]
    fn changes_become_rows_once_each_and_none_is_below_the_screen() {
        let size = Size::new(1024, 4).unwrap();
        let of = |changes: &[Range<usize>]| rows(changes, size);
        assert_eq!(of(&[0..1, 4096..8192, 8192..8193]), [0..3]);
        assert_eq!(of(&[4095..4097, 12288..12289]), [0..2, 3..4]);
        assert_eq!(of(&[16384..20000, 5..5]), []);
        assert_eq!(of(&[0..usize::MAX]), [0..4]);
    }

    #[test]
    fn a_bar_has_room_for_the_screen_and_is_a_power_of_two() {
        let bar = |width, height| BootScreen::bar_size(Size::new(width, height).unwrap());
        assert_eq!(bar(1280, 800), 4 << 20);
        assert_eq!(bar(1920, 1080), 8 << 20);
        assert_eq!(bar(4096, 2304), 64 << 20);
        assert_eq!(bar(1, 1), 4096);
    }
}
