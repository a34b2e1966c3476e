//! Sizes and rectangles in pixels.

/// Largest width and height of a screen, in pixels.
pub const MAX_SIDE: u16 = 8192;
/// Most pixels of a screen: 4096 × 2304. At 4 bytes each a framebuffer has 36 MiB at most.
pub const MAX_PIXELS: usize = 4096 * 2304;

/// Width and height of a screen in pixels. Neither is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    width: u16,
    height: u16,
}

impl Size {
    /// Initial size of a screen.
    pub const DEFAULT: Self = Self {
        width: 1024,
        height: 768,
    };

    /// A size within [`MAX_SIDE`] and [`MAX_PIXELS`]; `None` for any other.
    pub fn new(width: u32, height: u32) -> Option<Self> {
        let (width, height) = (u16::try_from(width).ok()?, u16::try_from(height).ok()?);
        let size = Self { width, height };
        let fits = (1..=MAX_SIDE).contains(&width) && (1..=MAX_SIDE).contains(&height);
        (fits && size.pixels() <= MAX_PIXELS).then_some(size)
    }

    /// Pixels from left to right.
    pub const fn width(self) -> u16 {
        self.width
    }

    /// Pixels from top to bottom.
    pub const fn height(self) -> u16 {
        self.height
    }

    /// Number of pixels.
    pub fn pixels(self) -> usize {
        usize::from(self.width).saturating_mul(usize::from(self.height))
    }

    /// All of it.
    pub const fn rect(self) -> Rect {
        Rect {
            x: 0,
            y: 0,
            width: self.width,
            height: self.height,
        }
    }
}

/// A rectangle in pixels from the upper left corner of a screen. It may be empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// First column.
    pub x: u16,
    /// First row.
    pub y: u16,
    /// Number of columns.
    pub width: u16,
    /// Number of rows.
    pub height: u16,
}

impl Rect {
    /// A rectangle.
    pub const fn new(x: u16, y: u16, width: u16, height: u16) -> Self {
        Self { x, y, width, height }
    }

    /// The first column to the right of it.
    pub fn right(self) -> u32 {
        u32::from(self.x).saturating_add(self.width.into())
    }

    /// The first row below it.
    pub fn bottom(self) -> u32 {
        u32::from(self.y).saturating_add(self.height.into())
    }

    /// Whether it has no pixels.
    pub const fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }

    /// Number of pixels.
    pub fn pixels(self) -> usize {
        usize::from(self.width).saturating_mul(usize::from(self.height))
    }

    /// What both have; empty when they have nothing in common.
    pub fn intersection(self, other: Self) -> Self {
        let (x, y) = (self.x.max(other.x), self.y.max(other.y));
        let right = self.right().min(other.right());
        let bottom = self.bottom().min(other.bottom());
        let span = |end: u32, begin: u16| u16::try_from(end.saturating_sub(begin.into())).unwrap_or(0);
        let both = Self::new(x, y, span(right, x), span(bottom, y));
        if both.is_empty() { Self::default() } else { both }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bounded_by_side_and_by_area() {
        assert_eq!(Size::new(4096, 2304).map(Size::pixels), Some(MAX_PIXELS));
        assert!(Size::new(8192, 1).is_some());
        for (width, height) in [(0, 1), (1, 0), (8193, 1), (4097, 2304), (u32::MAX, u32::MAX)] {
            assert_eq!(Size::new(width, height), None, "{width} × {height}");
        }
    }

    #[test]
    fn an_intersection_is_what_both_have() {
        let a = Rect::new(10, 10, 20, 20);
        assert_eq!(
            a.intersection(Rect::new(20, 5, 100, 10)),
            Rect::new(20, 10, 10, 5)
        );
        assert_eq!(a.intersection(Rect::new(30, 10, 5, 5)), Rect::default());
        let huge = Rect::new(u16::MAX, u16::MAX, u16::MAX, u16::MAX);
        assert_eq!(huge.intersection(huge), huge);
        assert_eq!(a.intersection(huge), Rect::default());
    }
}
