//! Encodings of rectangles (RFC 6143, 7.7; Tight is the community's).
//!
//! An encoder gets the pixels of a rectangle as values of the client's format, row after row, and appends what follows the
//! rectangle's header.

mod deflate;
mod hextile;
mod palette;
mod tight;
mod zrle;

use self::deflate::Stream;
use crate::pixel::PixelFormat;

/// How the pixels of a rectangle are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// As they are.
    #[default]
    Raw,
    /// Tiles of 16 × 16 with rectangles of one colour.
    Hextile,
    /// Compressed tiles of 64 × 64 with palettes and runs.
    Zrle,
    /// Compressed rectangles with palettes.
    Tight,
}

impl Encoding {
    /// The encoding with that number, if the server has it.
    pub fn from_number(number: i32) -> Option<Self> {
        [Self::Raw, Self::Hextile, Self::Zrle, Self::Tight]
            .into_iter()
            .find(|encoding| encoding.number() == number)
    }

    /// Its number.
    pub const fn number(self) -> i32 {
        match self {
            Self::Raw => 0,
            Self::Hextile => 5,
            Self::Tight => 7,
            Self::Zrle => 16,
        }
    }
}

/// The pixels of a rectangle as values of the client's format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    /// Row after row, `width` in each; not empty.
    pub values: &'a [u32],
    /// Columns.
    pub width: usize,
}

impl<'a> Block<'a> {
    /// A part of it: `width` columns from `x` on of `height` rows from `y` on, row after row, into `part`.
    fn part(
        self,
        (x, y): (usize, usize),
        (width, height): (usize, usize),
        part: &'a mut Vec<u32>,
    ) -> Block<'a> {
        part.clear();
        for row in self.values.chunks(self.width).skip(y).take(height) {
            let row = row.get(x..).unwrap_or_default();
            part.extend_from_slice(row.get(..width).unwrap_or(row));
        }
        Block { values: part, width }
    }

    fn height(self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Upper left corners and sizes of tiles with that side, from left to right and from top to bottom.
    fn tiles(self, side: usize) -> impl Iterator<Item = ((usize, usize), (usize, usize))> + use<> {
        let (width, height) = (self.width, self.height());
        let size = move |at: usize, whole: usize| side.min(whole.saturating_sub(at));
        (0..height).step_by(side).flat_map(move |y| {
            (0..width)
                .step_by(side)
                .map(move |x| ((x, y), (size(x, width), size(y, height))))
        })
    }
}

/// Encoders of a client, with the streams that continue across rectangles.
#[derive(Debug, Default)]
pub(super) struct Encoders {
    zrle: Stream,
    tight: tight::Streams,
    scratch: Vec<u8>,
    tile: Vec<u32>,
}

impl Encoders {
    /// Appends the pixels of a rectangle.
    pub fn encode(&mut self, encoding: Encoding, block: Block<'_>, format: &PixelFormat, out: &mut Vec<u8>) {
        match encoding {
            Encoding::Raw => format.put(block.values, out),
            Encoding::Hextile => hextile::encode(block, format, &mut self.tile, out),
            Encoding::Zrle => {
                self.scratch.clear();
                zrle::encode(block, format, &mut self.tile, &mut self.scratch);
                // The length comes first.
                let begin = out.len();
                out.extend_from_slice(&[0; 4]);
                self.zrle.append(&self.scratch, out);
                let length = out.len().saturating_sub(begin).saturating_sub(4);
                let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
                if let Some(place) = out.get_mut(begin..).and_then(<[u8]>::first_chunk_mut) {
                    *place = length;
                }
            }
            Encoding::Tight => tight::encode(block, format, &mut self.tight, &mut self.scratch, out),
        }
    }
}
