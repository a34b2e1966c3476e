//! ZRLE before it is compressed (RFC 6143, 7.7.6).

use super::{Block, palette::Palette};
use crate::pixel::{Compact, PixelFormat};

const SIDE: usize = 64;
const RAW: u8 = 0;
const SOLID: u8 = 1;
const PLAIN_RLE: u8 = 128;
/// Most colours of a packed palette, and of a palette with runs.
const MAX_PACKED: usize = 16;
const MAX_PALETTE: usize = 127;

pub(super) fn encode(block: Block<'_>, format: &PixelFormat, tile: &mut Vec<u32>, out: &mut Vec<u8>) {
    let compact = format.compact();
    for (corner, size) in block.tiles(SIDE) {
        let part = block.part(corner, size, tile);
        encode_tile(part, format, compact, out);
    }
}

/// Runs of equal values: how long, and which.
fn runs(values: &[u32]) -> impl Iterator<Item = (usize, u32)> {
    values
        .chunk_by(|a, b| a == b)
        .filter_map(|run| run.first().map(|value| (run.len(), *value)))
}

fn encode_tile(tile: Block<'_>, format: &PixelFormat, compact: Compact, out: &mut Vec<u8>) {
    let bytes = format.compact_bytes(compact);
    let palette = Palette::of(tile.values, MAX_PALETTE);
    if let Some([colour]) = palette.as_ref().map(Palette::colours) {
        out.push(SOLID);
        format.put_compact(compact, &[*colour], out);
        return;
    }
    let run_bytes = |length: usize| length.wrapping_sub(1) / 255;
    let (mut plain, mut indexed) = (0_usize, 0_usize);
    for (length, _) in runs(tile.values) {
        let extra = run_bytes(length).wrapping_add(1);
        plain = plain.wrapping_add(bytes).wrapping_add(extra);
        // A single pixel has no length.
        indexed = indexed.wrapping_add(if length == 1 { 1 } else { extra.wrapping_add(1) });
    }
    let raw = tile.values.len().wrapping_mul(bytes);
    let best_plain = plain.min(raw);
    if let Some(palette) = palette {
        let table = palette.colours().len().wrapping_mul(bytes);
        let indexed = indexed.wrapping_add(table);
        let packed = if palette.colours().len() <= MAX_PACKED {
            let row = tile.width.wrapping_mul(bits(palette.colours().len())).div_ceil(8);
            row.wrapping_mul(tile.height()).wrapping_add(table)
        } else {
            usize::MAX
        };
        if packed.min(indexed) < best_plain {
            return if packed <= indexed {
                put_packed(tile, format, compact, &palette, out);
            } else {
                put_indexed(tile, format, compact, &palette, out);
            };
        }
    }
    if plain < raw {
        out.push(PLAIN_RLE);
        for (length, value) in runs(tile.values) {
            format.put_compact(compact, &[value], out);
            put_length(length, out);
        }
    } else {
        out.push(RAW);
        format.put_compact(compact, tile.values, out);
    }
}

/// Bits of an index into a packed palette.
fn bits(colours: usize) -> usize {
    match colours {
        0..=2 => 1,
        3..=4 => 2,
        _ => 4,
    }
}

fn put_length(length: usize, out: &mut Vec<u8>) {
    let rest = length.wrapping_sub(1);
    out.extend(std::iter::repeat_n(255, rest / 255));
    out.push(u8::try_from(rest % 255).unwrap_or(0));
}

fn put_packed(tile: Block<'_>, format: &PixelFormat, compact: Compact, palette: &Palette, out: &mut Vec<u8>) {
    out.push(u8::try_from(palette.colours().len()).unwrap_or(0));
    format.put_compact(compact, palette.colours(), out);
    let bits = bits(palette.colours().len());
    // Rows begin with a byte of their own.
    for row in tile.values.chunks(tile.width) {
        for part in row.chunks(8_usize.checked_div(bits).unwrap_or(8)) {
            let mut byte = 0;
            for (at, value) in part.iter().enumerate() {
                let shift = 8_usize.wrapping_sub(bits.wrapping_mul(at.wrapping_add(1)));
                byte |= palette
                    .index(*value)
                    .wrapping_shl(u32::try_from(shift).unwrap_or(0));
            }
            out.push(byte);
        }
    }
}

fn put_indexed(
    tile: Block<'_>,
    format: &PixelFormat,
    compact: Compact,
    palette: &Palette,
    out: &mut Vec<u8>,
) {
    let colours = u8::try_from(palette.colours().len()).unwrap_or(0);
    out.push(PLAIN_RLE | colours);
    format.put_compact(compact, palette.colours(), out);
    for (length, value) in runs(tile.values) {
        let index = palette.index(value);
        if length == 1 {
            out.push(index);
        } else {
            out.push(index | 0x80);
            put_length(length, out);
        }
    }
}
