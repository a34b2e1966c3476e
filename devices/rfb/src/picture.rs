//! A copy of the picture on a screen, and the picture of its pointer.
//!
//! Invariant: a frame has exactly `size.pixels()` pixels.

use crate::geometry::{Rect, Size};

/// The picture of the pointer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Columns, at most 64; 0 for an invisible cursor.
    pub width: u16,
    /// Rows, at most 64; 0 for an invisible cursor.
    pub height: u16,
    /// Which of its pixels points.
    pub hotspot: (u16, u16),
    /// Row after row, 0xAARRGGBB: alpha, red, green, blue; colours as the guest multiplied them.
    pub pixels: Vec<u32>,
}

/// A copy of the picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    size: Size,
    /// Row after row, 0x00RRGGBB.
    pixels: Vec<u32>,
}

impl Frame {
    /// A black one.
    pub fn black(size: Size) -> Self {
        Self {
            size,
            pixels: vec![0; size.pixels()],
        }
    }

    /// Its size.
    #[inline]
    pub fn size(&self) -> Size {
        self.size
    }

    /// All pixels, row after row from the upper left corner, 0x00RRGGBB.
    #[inline]
    pub fn pixels(&self) -> &[u32] {
        &self.pixels
    }

    /// The pixels of `rect` in row `y`, which is counted from the top of the frame; empty outside the frame.
    #[inline]
    pub fn row(&self, rect: Rect, y: u16) -> &[u32] {
        self.pixels.get(range(self.size, rect, y)).unwrap_or_default()
    }

    /// The same, to be written.
    #[inline]
    pub fn row_mut(&mut self, rect: Rect, y: u16) -> &mut [u32] {
        self.pixels.get_mut(range(self.size, rect, y)).unwrap_or_default()
    }
}

#[inline]
fn range(size: Size, rect: Rect, y: u16) -> std::ops::Range<usize> {
    let rect = rect.intersection(size.rect());
    if y >= size.height() {
        return 0..0;
    }
    let begin = usize::from(y)
        .saturating_mul(size.width().into())
        .saturating_add(rect.x.into());
    begin..begin.saturating_add(rect.width.into())
}
