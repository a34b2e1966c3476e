//! A client for tests, and pictures for it.

pub mod decoder;

use crate::{Frame, Rect, Size};

pub use decoder::Decoder;

/// A size that a screen may have.
pub fn size(width: u32, height: u32) -> Size {
    Size::new(width, height).unwrap()
}

/// A picture whose rows `row` paints, by their number from the top.
pub fn painted(size: Size, row: impl FnMut(u16, &mut [u32])) -> Frame {
    let mut frame = Frame::black(size);
    paint(&mut frame, size.rect(), row);
    frame
}

/// Paints a part of a picture that lies within it.
pub fn paint(frame: &mut Frame, rect: Rect, mut row: impl FnMut(u16, &mut [u32])) {
    for y in rect.y..rect.y + rect.height {
        row(y, frame.row_mut(rect, y));
    }
}

/// A picture that has something for each kind of tile: one colour, two, few, many, runs, noise.
pub fn pattern(size: Size, seed: u32) -> Frame {
    painted(size, |y, row| {
        for (x, pixel) in (0_u32..).zip(row) {
            let y = u32::from(y);
            let noise = (x ^ y.rotate_left(7) ^ seed).wrapping_mul(0x9e37_79b1);
            let colour = match (x / 80 + 2 * (y / 72) + seed) % 8 {
                0 => 0x20_40_60 + seed,
                1 => [0, 0xff_ff_ff][(noise >> 31) as usize],
                2 => (noise >> 29) * 0x1f_2f_3f,
                3 => (noise >> 26) * 0x01_03_05,
                4 => x / 7 * 0x05_00_09,
                5 => y / 40 * 0x2a_11_07,
                6 => (noise >> 25) * 0x01_01_01,
                _ => noise >> 8,
            };
            *pixel = colour & 0xff_ff_ff;
        }
    })
}
