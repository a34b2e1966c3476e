//! Text read from the pixels of a guest's text console. The font is learnt from the picture itself: the guest writes the
//! alphabet into one of its rows.

use std::collections::HashMap;

use super::picture::Picture;

/// Columns and rows of a character (the kernel's font VGA8x16).
const CELL: (usize, usize) = (8, 16);

/// The characters that are read: ASCII from ! to ~.
pub fn alphabet() -> impl Iterator<Item = char> {
    '!'..='~'
}

/// Pixels of a character, from the upper left, row after row.
type Glyph = Vec<u32>;

/// Characters by their glyphs.
pub struct Font(HashMap<Glyph, char>);

impl Picture {
    fn glyph(&self, column: usize, row: usize) -> Glyph {
        let (width, height) = CELL;
        let lines = (row * height..(row + 1) * height).map(|y| y * self.width + column * width);
        lines
            .flat_map(|start| self.pixels[start..start + width].iter().copied())
            .collect()
    }

    /// Learns the font from a row of text that has the [`alphabet`]; `None` when the row has something else.
    pub fn learn(&self, row: usize) -> Option<Font> {
        let glyphs = alphabet()
            .enumerate()
            .map(|(column, character)| (self.glyph(column, row), character));
        let font: HashMap<_, _> = glyphs.collect();
        let blank = |glyph: &Glyph| glyph.iter().all(|pixel| *pixel == glyph[0]);
        let whole = font.len() == alphabet().count() && !font.keys().any(blank);
        whole.then_some(Font(font))
    }

    /// A row of text without trailing blanks. A glyph that is not in the font becomes U+FFFD.
    pub fn text(&self, font: &Font, row: usize) -> String {
        let columns = 0..self.width / CELL.0;
        let text: String = columns
            .map(|column| {
                let glyph = self.glyph(column, row);
                let blank = glyph.iter().all(|pixel| *pixel == glyph[0]);
                let known = font.0.get(&glyph).copied();
                known.unwrap_or(if blank { ' ' } else { '\u{fffd}' })
            })
            .collect();
        text.trim_end().to_owned()
    }
}
