//! Hextile (RFC 6143, 7.7.4).

use super::{Block, palette::Palette};
use crate::pixel::PixelFormat;

const SIDE: usize = 16;

const RAW: u8 = 1;
const BACKGROUND: u8 = 2;
const FOREGROUND: u8 = 4;
const SUBRECTS: u8 = 8;
const COLOURED: u8 = 16;

/// More colours than this are sent raw: rectangles of one colour would be longer.
const MAX_COLOURS: usize = 64;

pub(super) fn encode(block: Block<'_>, format: &PixelFormat, tile: &mut Vec<u32>, out: &mut Vec<u8>) {
    for (corner, size) in block.tiles(SIDE) {
        let part = block.part(corner, size, tile);
        let begin = out.len();
        let raw = part.values.len().saturating_mul(format.bytes());
        if !compact(part, format, out, begin.saturating_add(raw)) {
            out.truncate(begin);
            out.push(RAW);
            format.put(part.values, out);
        }
    }
}

/// Appends a tile as rectangles of one colour; false when that would end behind `limit`.
fn compact(tile: Block<'_>, format: &PixelFormat, out: &mut Vec<u8>, limit: usize) -> bool {
    let Some(palette) = Palette::of(tile.values, MAX_COLOURS) else {
        return false;
    };
    let background = most_frequent(tile.values, &palette);
    let foreground = match palette.colours() {
        [a, b] => Some(if *a == background { *b } else { *a }),
        _ => None,
    };
    let mask = match palette.colours().len() {
        1 => BACKGROUND,
        2 => BACKGROUND | FOREGROUND | SUBRECTS,
        _ => BACKGROUND | SUBRECTS | COLOURED,
    };
    out.push(mask);
    format.put(&[background], out);
    if mask & SUBRECTS == 0 {
        return true;
    }
    if let Some(foreground) = foreground {
        format.put(&[foreground], out);
    }
    let place = out.len();
    out.push(0);
    let Some(count) = subrects(
        tile,
        background,
        foreground.is_none().then_some(format),
        out,
        limit,
    ) else {
        return false;
    };
    if let Some(byte) = out.get_mut(place) {
        *byte = count;
    }
    true
}

/// Appends rectangles of one colour that cover everything but the background; gives their number.
fn subrects(
    tile: Block<'_>,
    background: u32,
    coloured: Option<&PixelFormat>,
    out: &mut Vec<u8>,
    limit: usize,
) -> Option<u8> {
    // Covered pixels count as background.
    let mut left = tile.values.to_vec();
    let at = |x: usize, y: usize| y.wrapping_mul(tile.width).wrapping_add(x);
    let mut count: u8 = 0;
    for y in 0..tile.height() {
        for x in 0..tile.width {
            let Some(colour) = left.get(at(x, y)).copied().filter(|colour| *colour != background) else {
                continue;
            };
            let run = |row: usize| {
                let rest = left.get(at(x, row)..at(tile.width, row)).unwrap_or_default();
                rest.iter().take_while(|value| **value == colour).count()
            };
            let width = run(y);
            let height = (y..tile.height()).take_while(|row| run(*row) >= width).count();
            for row in y..y.wrapping_add(height) {
                let begin = at(x, row);
                left.get_mut(begin..begin.wrapping_add(width))?.fill(background);
            }
            count = count.checked_add(1)?;
            if let Some(format) = coloured {
                format.put(&[colour], out);
            }
            let nibbles = |high: usize, low: usize| u8::try_from(high << 4 | low).unwrap_or(0);
            out.push(nibbles(x, y));
            out.push(nibbles(width.wrapping_sub(1), height.wrapping_sub(1)));
            if out.len() > limit {
                return None;
            }
        }
    }
    Some(count)
}

fn most_frequent(values: &[u32], palette: &Palette) -> u32 {
    let mut counts = [0_u16; 256];
    for value in values {
        if let Some(count) = counts.get_mut(usize::from(palette.index(*value))) {
            *count = count.saturating_add(1);
        }
    }
    let colours = palette.colours().iter().zip(counts);
    let most = colours.max_by_key(|(_, count)| *count);
    most.map_or(0, |(colour, _)| *colour)
}
