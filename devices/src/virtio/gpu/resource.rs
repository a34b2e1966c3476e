//! Pictures that a guest has made.

use rfb::{Rect, Size};
use vm_memory::{Bytes, GuestAddress};
use vmm_base::GuestMemory;

/// Most bytes of the host's copies of all resources together: three pictures of the largest size and more.
pub(super) const MAX_BYTES: usize = 128 << 20;
/// Most bytes of the host's copies of resources without guest memory behind them: one picture of the largest size. They are part of the
/// saved state, which a machine has to send while it stands still.
pub(super) const MAX_DETACHED: usize = 36 << 20;
/// Most resources, and most pieces of guest memory behind one, and behind all.
pub(super) const MAX_RESOURCES: usize = 1024;
pub(super) const MAX_ENTRIES: usize = 16384;
pub(super) const MAX_ALL_ENTRIES: usize = 65536;

/// Layout of a pixel in memory (5.7.6.8, `enum virtio_gpu_formats`). Formats with and without alpha
/// are equivalent here. A screen has no alpha, and Linux creates cursor pictures, in which alpha
/// defines the shape, in a format without alpha.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub number: u32,
    order: Order,
}

/// Which bytes of a pixel are which, from the first one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Blue, green, red, alpha.
    Bgra,
    /// Alpha, red, green, blue.
    Argb,
    /// Red, green, blue, alpha.
    Rgba,
    /// Alpha, blue, green, red.
    Abgr,
}

const fn format(number: u32, order: Order) -> Format {
    Format { number, order }
}

/// Names have the bytes in the order in which they are in memory.
const FORMATS: [Format; 8] = [
    // B8G8R8A8, B8G8R8X8, A8R8G8B8, X8R8G8B8
    format(1, Order::Bgra),
    format(2, Order::Bgra),
    format(3, Order::Argb),
    format(4, Order::Argb),
    // R8G8B8A8, X8B8G8R8, A8B8G8R8, R8G8B8X8
    format(67, Order::Rgba),
    format(68, Order::Abgr),
    format(121, Order::Abgr),
    format(134, Order::Rgba),
];

impl Format {
    /// The format with that number.
    pub fn from_number(number: u32) -> Option<Self> {
        FORMATS.into_iter().find(|format| format.number == number)
    }

    /// Pixels as 0xAARRGGBB into `target`, as many as both have.
    fn pixels(self, raw: &[[u8; 4]], target: &mut [u32]) {
        // The order is asked for once a row and not once a pixel.
        match self.order {
            Order::Bgra => copy(raw, target, u32::from_le_bytes),
            Order::Argb => copy(raw, target, u32::from_be_bytes),
            Order::Rgba => copy(raw, target, |raw| u32::from_be_bytes(raw).rotate_right(8)),
            Order::Abgr => copy(raw, target, |raw| u32::from_le_bytes(raw).rotate_right(8)),
        }
    }
}

fn copy(raw: &[[u8; 4]], target: &mut [u32], pixel: impl Fn([u8; 4]) -> u32) {
    for (target, raw) in target.iter_mut().zip(raw) {
        *target = pixel(*raw);
    }
}

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub address: u64,
    pub length: u32,
}

/// The guest memory behind a resource.
#[derive(Clone, Debug, Default)]
pub(super) struct Backing {
    entries: Vec<Entry>,
    /// Where in the whole each entry begins, and where the last one ends.
    starts: Vec<u64>,
}

impl Backing {
    pub fn new(entries: Vec<Entry>) -> Self {
        let mut end: u64 = 0;
        let mut starts = vec![0];
        for entry in &entries {
            end = end.saturating_add(entry.length.into());
            starts.push(end);
        }
        Self { entries, starts }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Reads from `offset` on; false when it ends before, or lies outside guest memory.
    fn read(&self, memory: &GuestMemory, mut offset: u64, mut data: &mut [u8]) -> bool {
        while !data.is_empty() {
            // The last entry that begins at or before it: entries may be empty.
            let after = self.starts.partition_point(|start| *start <= offset);
            let Some(at) = after.checked_sub(1) else {
                return false;
            };
            let (Some(entry), Some(start)) = (self.entries.get(at), self.starts.get(at)) else {
                return false;
            };
            let within = offset.saturating_sub(*start);
            let room = u64::from(entry.length).saturating_sub(within);
            let count = usize::try_from(room).unwrap_or(usize::MAX).min(data.len());
            let (now, rest) = std::mem::take(&mut data).split_at_mut(count);
            let Some(address) = entry.address.checked_add(within) else {
                return false;
            };
            if count == 0 || memory.read_slice(now, GuestAddress(address)).is_err() {
                return false;
            }
            offset = offset.saturating_add(room);
            data = rest;
        }
        true
    }
}

/// A picture.
#[derive(Debug)]
pub(super) struct Resource {
    pub format: Format,
    pub size: Size,
    pub backing: Option<Backing>,
    /// Row after row, 0xAARRGGBB; empty before the first transfer, which is black.
    pixels: Vec<u32>,
}

impl Resource {
    pub fn new(format: Format, size: Size) -> Self {
        Self {
            format,
            size,
            backing: None,
            pixels: Vec::new(),
        }
    }

    /// One with these pixels, which are as many as its size has, or none.
    pub fn with_pixels(self, pixels: Vec<u32>) -> Option<Self> {
        let whole = pixels.is_empty() || pixels.len() == self.size.pixels();
        whole.then_some(Self { pixels, ..self })
    }

    /// Bytes that the host's copy has at most.
    pub fn bytes(size: Size) -> usize {
        size.pixels().saturating_mul(4)
    }

    /// Bytes of the host's copy that no guest memory is behind.
    pub fn detached_bytes(&self) -> usize {
        match self.backing {
            Some(_) => 0,
            None => self.pixels.len().saturating_mul(4),
        }
    }

    /// All pixels; empty before the first transfer.
    pub fn pixels(&self) -> &[u32] {
        &self.pixels
    }

    /// The pixels of `rect` in row `y`, which is counted from the top; empty before the first transfer.
    pub fn row(&self, rect: Rect, y: u16) -> &[u32] {
        let begin = usize::from(y)
            .saturating_mul(self.size.width().into())
            .saturating_add(rect.x.into());
        self.pixels
            .get(begin..begin.saturating_add(rect.width.into()))
            .unwrap_or_default()
    }

    /// Copies `rect` from guest memory, in which its first pixel is at `offset` bytes. `rect` must
    /// lie within the resource. Returns false if the resource has no or too little memory behind
    /// it. Rows copied before a failure stay.
    pub fn transfer(&mut self, memory: &GuestMemory, rect: Rect, offset: u64, scratch: &mut Vec<u8>) -> bool {
        let Some(backing) = &self.backing else {
            return false;
        };
        let stride = u64::from(self.size.width()).saturating_mul(4);
        let bytes = u64::from(rect.width).saturating_mul(4);
        let rows = u64::from(rect.height).saturating_sub(1);
        let end = stride.saturating_mul(rows).saturating_add(bytes);
        if offset.checked_add(end).is_none_or(|end| end > backing.len()) {
            return false;
        }
        if self.pixels.is_empty() {
            self.pixels = vec![0; self.size.pixels()];
        }
        scratch.resize(usize::from(rect.width).saturating_mul(4), 0);
        for (row, y) in (0_u64..).zip(rect.y..rect.y.saturating_add(rect.height)) {
            let place = offset.saturating_add(stride.saturating_mul(row));
            if !backing.read(memory, place, scratch) {
                return false;
            }
            let begin = usize::from(y)
                .saturating_mul(self.size.width().into())
                .saturating_add(rect.x.into());
            let Some(target) = self.pixels.get_mut(begin..) else {
                return false;
            };
            self.format.pixels(scratch.as_chunks().0, target);
        }
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_format_has_its_colours_where_its_name_says() {
        for (number, raw) in [
            (1, [0x33, 0x22, 0x11, 0x80]),
            (2, [0x33, 0x22, 0x11, 0x80]),
            (3, [0x80, 0x11, 0x22, 0x33]),
            (4, [0x80, 0x11, 0x22, 0x33]),
            (67, [0x11, 0x22, 0x33, 0x80]),
            (68, [0x80, 0x33, 0x22, 0x11]),
            (121, [0x80, 0x33, 0x22, 0x11]),
            (134, [0x11, 0x22, 0x33, 0x80]),
        ] {
            let format = Format::from_number(number).unwrap();
            let mut pixel = [0];
            format.pixels(&[raw], &mut pixel);
            assert_eq!(pixel, [0x80_11_22_33], "{number}");
        }
        assert_eq!(Format::from_number(5), None);
    }

    #[test]
    fn memory_in_pieces_is_read_across_their_ends_and_not_beyond_the_last() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        memory.write_slice(b"cdef", GuestAddress(0x10)).unwrap();
        memory.write_slice(b"ab", GuestAddress(0x100)).unwrap();
        let entry = |address, length| Entry { address, length };
        let backing = Backing::new(vec![
            entry(0x100, 2),
            entry(0x200, 0),
            entry(0x10, 4),
            entry(0xffff_0000, 8),
            entry(u64::MAX, 8),
        ]);
        let read = |offset, length| {
            let mut data = vec![0; length];
            backing.read(&memory, offset, &mut data).then_some(data)
        };
        assert_eq!(read(0, 6).unwrap(), b"abcdef");
        assert_eq!(read(1, 3).unwrap(), b"bcd");
        assert_eq!(read(5, 2), None);
        assert_eq!(read(14, 2), None);
        assert_eq!(read(15, 1), None);
        assert_eq!(read(22, 1), None);
        assert_eq!(read(u64::MAX, 1), None);
    }
}
