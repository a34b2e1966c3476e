//! Tight without JPEG and without the gradient filter (the community's RFB text, Tight encoding).

use super::{Block, deflate::Stream, palette::Palette};
use crate::pixel::PixelFormat;

/// Fill: one colour.
const FILL: u8 = 0x80;
/// Bits 4 and 5 of a basic control byte name the stream; bit 6 says that a filter follows.
const FILTER: u8 = 0x40;
const FILTER_PALETTE: u8 = 1;
/// Which stream has what, so that alike data are together.
const STREAM_PIXELS: u8 = 0;
const STREAM_BITS: u8 = 1;
const STREAM_INDICES: u8 = 2;
/// Data shorter than this are not compressed.
const MIN_COMPRESSED: usize = 12;

/// The streams of a client.
#[derive(Debug, Default)]
pub(super) struct Streams([Stream; 3]);

impl Streams {
    /// Appends data as the encoding does: as they are when short, else their compressed length and themselves.
    fn put(&mut self, stream: u8, data: &[u8], out: &mut Vec<u8>) {
        if data.len() < MIN_COMPRESSED {
            out.extend_from_slice(data);
            return;
        }
        let mut compressed = Vec::new();
        if let Some(stream) = self.0.get_mut(usize::from(stream)) {
            stream.append(data, &mut compressed);
        }
        put_length(compressed.len(), out);
        out.extend_from_slice(&compressed);
    }
}

/// Seven bits, seven bits, eight bits, the lowest first; bit 7 says that another byte follows.
fn put_length(length: usize, out: &mut Vec<u8>) {
    let [low, ..] = (length & 0x7f).to_le_bytes();
    let [middle, ..] = (length >> 7 & 0x7f).to_le_bytes();
    let [high, ..] = (length >> 14 & 0xff).to_le_bytes();
    if length < 1 << 7 {
        out.push(low);
    } else if length < 1 << 14 {
        out.extend_from_slice(&[low | 0x80, middle]);
    } else {
        out.extend_from_slice(&[low | 0x80, middle | 0x80, high]);
    }
}

pub(super) fn encode(
    block: Block<'_>,
    format: &PixelFormat,
    streams: &mut Streams,
    scratch: &mut Vec<u8>,
    out: &mut Vec<u8>,
) {
    let compact = format.tight();
    // An index has a byte, so a palette of more than two colours is no gain for pixels of one.
    let most = if format.bytes() == 1 { 2 } else { 256 };
    scratch.clear();
    let Some(palette) = Palette::of(block.values, most).filter(|palette| pays(palette, block)) else {
        out.push(STREAM_PIXELS << 4);
        format.put_compact(compact, block.values, scratch);
        return streams.put(STREAM_PIXELS, scratch, out);
    };
    if let [colour] = palette.colours() {
        out.push(FILL);
        return format.put_compact(compact, &[*colour], out);
    }
    let two = palette.colours().len() == 2;
    let stream = if two { STREAM_BITS } else { STREAM_INDICES };
    out.extend_from_slice(&[FILTER | stream << 4, FILTER_PALETTE]);
    out.push(u8::try_from(palette.colours().len().saturating_sub(1)).unwrap_or(0));
    format.put_compact(compact, palette.colours(), out);
    if two {
        put_bits(block, &palette, scratch);
    } else {
        scratch.extend(block.values.iter().map(|value| palette.index(*value)));
    }
    streams.put(stream, scratch, out);
}

/// Returns whether a palette saves more bytes than it takes.
fn pays(palette: &Palette, block: Block<'_>) -> bool {
    palette.colours().len() <= 2 || palette.colours().len() < block.values.len() / 4
}

/// A bit for each pixel, the first one in the highest; rows begin with a byte of their own.
fn put_bits(block: Block<'_>, palette: &Palette, out: &mut Vec<u8>) {
    for row in block.values.chunks(block.width) {
        for part in row.chunks(8) {
            let bit = |(at, value): (u32, &u32)| palette.index(*value).wrapping_shl(7_u32.wrapping_sub(at));
            out.push((0..).zip(part).map(bit).fold(0, |byte, bit| byte | bit));
        }
    }
}
