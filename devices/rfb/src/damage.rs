//! Which parts of a picture have changed, in tiles of 16 × 16 pixels.
//!
//! A record of tiles is as large as the picture makes it, a bit for each tile, however many rectangles are added to it.

use crate::geometry::{Rect, Size};

/// Side of a tile in pixels.
pub const TILE: u16 = 16;
/// Most rectangles that [`Damage::rects`] gives; a picture whose damage is more scattered gives one for each row of tiles, of
/// which there are 512 at most.
const MAX_RECTS: usize = 512;

/// A set of tiles of a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    size: Size,
    columns: usize,
    /// Row after row, without gaps.
    tiles: Vec<bool>,
    count: usize,
}

impl Damage {
    /// No damage of a picture of that size.
    pub fn none(size: Size) -> Self {
        let columns = usize::from(size.width().div_ceil(TILE));
        let rows = usize::from(size.height().div_ceil(TILE));
        Self {
            size,
            columns,
            tiles: vec![false; columns.saturating_mul(rows)],
            count: 0,
        }
    }

    /// The whole of a picture of that size.
    pub fn all(size: Size) -> Self {
        let mut damage = Self::none(size);
        damage.tiles.fill(true);
        damage.count = damage.tiles.len();
        damage
    }

    /// Size of the picture.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds all tiles that overlap `rect`; the part outside the picture is ignored.
    pub fn add(&mut self, rect: Rect) {
        self.set(rect, true);
    }

    /// Removes all tiles that have a pixel of `rect`.
    pub fn remove(&mut self, rect: Rect) {
        self.set(rect, false);
    }

    /// Adds what `other` has; one of a picture of another size makes this one complete.
    pub fn add_all(&mut self, other: &Self) {
        if other.size != self.size {
            *self = Self::all(self.size);
            return;
        }
        for (own, other) in self.tiles.iter_mut().zip(&other.tiles) {
            if *other && !*own {
                *own = true;
                self.count = self.count.saturating_add(1);
            }
        }
    }

    /// Whether a tile that has a pixel of `rect` is in it.
    pub fn touches(&self, rect: Rect) -> bool {
        !self.is_empty()
            && self
                .rows(rect)
                .any(|range| self.tiles.get(range).unwrap_or_default().contains(&true))
    }

    /// The tiles that have a pixel of `rect` as a record of their own, which this one loses.
    pub fn take(&mut self, rect: Rect) -> Self {
        let mut taken = Self::none(self.size);
        let ranges: Vec<_> = self.rows(rect).collect();
        for range in ranges {
            let (Some(from), Some(to)) = (self.tiles.get_mut(range.clone()), taken.tiles.get_mut(range))
            else {
                continue;
            };
            for (from, to) in from.iter_mut().zip(to) {
                if std::mem::take(from) {
                    *to = true;
                    taken.count = taken.count.saturating_add(1);
                    self.count = self.count.saturating_sub(1);
                }
            }
        }
        taken
    }

    /// The tiles as rectangles that do not overlap and lie within the picture: at most 512. When the tiles are too
    /// scattered, the rectangles have more than the tiles.
    pub fn rects(&self) -> Vec<Rect> {
        if self.is_empty() || self.columns == 0 {
            return Vec::new();
        }
        let exact = self.merged(runs);
        if exact.len() <= MAX_RECTS {
            return exact;
        }
        self.merged(|row| {
            let first = row.iter().position(|tile| *tile);
            let last = row.iter().rposition(|tile| *tile);
            first
                .zip(last)
                .map(|(first, last)| (first, last.saturating_add(1)))
                .into_iter()
                .collect()
        })
    }

    /// Rectangles of the runs of tiles that `split` finds in each row; rows with the same runs are one.
    fn merged(&self, split: impl Fn(&[bool]) -> Vec<(usize, usize)>) -> Vec<Rect> {
        let mut rects = Vec::new();
        let mut open: (Vec<(usize, usize)>, u16, u16) = (Vec::new(), 0, 0);
        for (row, tiles) in (0_u16..).zip(self.tiles.chunks(self.columns)) {
            let found = split(tiles);
            if found == open.0 {
                open.2 = row.saturating_add(1);
                continue;
            }
            self.close(&open, &mut rects);
            open = (found, row, row.saturating_add(1));
        }
        self.close(&open, &mut rects);
        rects
    }

    fn close(&self, (runs, top, bottom): &(Vec<(usize, usize)>, u16, u16), rects: &mut Vec<Rect>) {
        let pixel = |tile: usize| u16::try_from(tile).unwrap_or(u16::MAX).saturating_mul(TILE);
        let (y, end) = (top.saturating_mul(TILE), bottom.saturating_mul(TILE));
        for (left, right) in runs {
            let (x, right) = (pixel(*left), pixel(*right));
            let rect = Rect::new(x, y, right.saturating_sub(x), end.saturating_sub(y));
            rects.push(rect.intersection(self.size.rect()));
        }
    }

    fn set(&mut self, rect: Rect, value: bool) {
        let ranges: Vec<_> = self.rows(rect).collect();
        for range in ranges {
            for tile in self.tiles.get_mut(range).unwrap_or_default() {
                if std::mem::replace(tile, value) != value {
                    self.count = if value {
                        self.count.saturating_add(1)
                    } else {
                        self.count.saturating_sub(1)
                    };
                }
            }
        }
    }

    /// Where in `tiles` the rows of tiles are that have a pixel of `rect`.
    fn rows(&self, rect: Rect) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let rect = rect.intersection(self.size.rect());
        let columns = self.columns;
        let tile = |pixel: u32| usize::try_from(pixel.div_ceil(TILE.into())).unwrap_or(usize::MAX);
        let (left, right) = (usize::from(rect.x / TILE), tile(rect.right()));
        let (top, bottom) = (usize::from(rect.y / TILE), tile(rect.bottom()));
        let rows = if rect.is_empty() { 0..0 } else { top..bottom };
        rows.map(move |row| {
            let begin = row.saturating_mul(columns);
            begin.saturating_add(left)..begin.saturating_add(right)
        })
    }
}

/// Runs of set tiles: the first, and the one behind the last.
fn runs(row: &[bool]) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (at, _) in row.iter().enumerate().filter(|(_, tile)| **tile) {
        let next = at.saturating_add(1);
        match found.last_mut() {
            Some((_, end)) if *end == at => *end = next,
            _ => found.push((at, next)),
        }
    }
    found
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn size(width: u32, height: u32) -> Size {
        Size::new(width, height).unwrap()
    }

    /// How often each pixel is in one of the rectangles.
    fn cover(size: Size, rects: &[Rect]) -> Vec<u8> {
        let mut cover = vec![0; size.pixels()];
        for rect in rects {
            assert!(!rect.is_empty());
            for y in usize::from(rect.y)..usize::from(rect.y + rect.height) {
                for x in usize::from(rect.x)..usize::from(rect.x + rect.width) {
                    cover[y * usize::from(size.width()) + x] += 1;
                }
            }
        }
        cover
    }

    fn rect() -> impl Strategy<Value = Rect> {
        let side = || prop_oneof![0..120_u16, any::<u16>()];
        (side(), side(), side(), side()).prop_map(|(x, y, width, height)| Rect::new(x, y, width, height))
    }

    proptest! {
        #[test]
        fn the_rectangles_cover_what_was_added_once_and_lie_within_the_picture(
            added in prop::collection::vec(rect(), 0..8),
            removed in rect(),
        ) {
            let size = size(100, 75);
            let mut damage = Damage::none(size);
            for rect in &added {
                damage.add(*rect);
            }
            let covered = cover(size, &damage.rects());
            prop_assert!(covered.iter().all(|times| *times <= 1));
            for rect in &added {
                let rect = rect.intersection(size.rect());
                prop_assert!(rect.is_empty() || damage.touches(rect));
                let inside = cover(size, if rect.is_empty() { &[] } else { std::slice::from_ref(&rect) });
                prop_assert!(inside.iter().zip(&covered).all(|(inside, covered)| inside <= covered));
            }
            let whole = damage.clone();
            let taken = damage.take(removed);
            prop_assert!(!damage.touches(removed));
            let mut again = damage.clone();
            again.add_all(&taken);
            prop_assert_eq!(&again, &whole);
            again.remove(removed);
            prop_assert_eq!(again, damage);
        }
    }

    #[test]
    fn scattered_damage_gives_a_bounded_number_of_rectangles_that_cover_it() {
        let size = size(4096, 2304);
        let mut damage = Damage::none(size);
        for (row, y) in (0..2304).step_by(16).enumerate() {
            for x in (0..4096).step_by(32) {
                damage.add(Rect::new(x + 16 * (u16::try_from(row).unwrap() % 2), y, 1, 1));
            }
        }
        let rects = damage.rects();
        assert!(rects.len() <= MAX_RECTS, "{}", rects.len());
        let covered = cover(size, &rects);
        assert!(
            (0..2304)
                .step_by(16)
                .all(|y| covered[y * 4096 + 32 + 16 * (y / 16 % 2)] == 1)
        );
    }

    #[test]
    fn damage_of_another_size_is_damage_of_everything() {
        let mut damage = Damage::none(size(64, 64));
        damage.add_all(&Damage::none(size(64, 65)));
        assert_eq!(damage, Damage::all(size(64, 64)));
        assert_eq!(damage.rects(), [Rect::new(0, 0, 64, 64)]);
    }
}
