//! Detects scrolling of a picture, so that the server can send clients a move of existing pixels
//! (CopyRect).
//!
//! Only scrolling of the full width is detected, as on a text console. Rows are compared by a hash
//! of all their pixels. A scroll is one contiguous run of rows of the new picture with the content
//! of old rows, all at the same distance. A hash has 64 bits; a guest that constructs rows with
//! equal hashes damages only the displayed picture of its own screen.

use std::collections::HashMap;

use rfb::{Damage, Frame, Rect, Size, session::Move};

/// Minimum number of moved rows, and of rows that vote for a distance, for a scroll to be used.
const MIN_ROWS: usize = 32;
const MIN_VOTES: usize = 4;
/// Rows of a tile of [`Damage`].
const TILE: u16 = 16;

/// Hashes of the rows of a picture.
#[derive(Debug)]
pub(super) struct Rows {
    size: Size,
    hashes: Vec<u64>,
}

impl Rows {
    /// Hashes all rows of a picture.
    pub fn of(frame: &Frame) -> Self {
        let hashes = frame.pixels().chunks(frame.size().width().into()).map(hash);
        Self {
            size: frame.size(),
            hashes: hashes.collect(),
        }
    }

    /// Takes note of a picture of which `damage` is new. Gives what moved, if much did, and what else is damaged.
    pub fn update(&mut self, frame: &Frame, damage: &Damage) -> Option<(Move, Damage)> {
        if frame.size() != self.size {
            *self = Self::of(frame);
            return None;
        }
        let old = self.hashes.clone();
        // Several rectangles may be beside each other.
        let mut damaged = vec![false; self.hashes.len()];
        for rect in damage.rects() {
            let rows = usize::from(rect.y)..usize::from(rect.y.saturating_add(rect.height));
            damaged.get_mut(rows).unwrap_or_default().fill(true);
        }
        let rows = frame.pixels().chunks(self.size.width().into());
        for ((place, row), _) in self
            .hashes
            .iter_mut()
            .zip(rows)
            .zip(damaged)
            .filter(|(_, damaged)| *damaged)
        {
            *place = hash(row);
        }
        self.find(&old, damage)
    }

    fn find(&self, old: &[u64], damage: &Damage) -> Option<(Move, Damage)> {
        let changed = || {
            let rows = self.hashes.iter().zip(old).enumerate();
            rows.filter(|(_, (new, old))| new != old)
                .map(|(y, (new, _))| (y, *new))
        };
        if changed().count() < MIN_ROWS {
            return None;
        }
        // Where each row was that was there once only.
        let mut places: HashMap<u64, Option<usize>> = HashMap::with_capacity(old.len());
        for (y, hash) in old.iter().enumerate() {
            places
                .entry(*hash)
                .and_modify(|place| *place = None)
                .or_insert(Some(y));
        }
        let mut votes: HashMap<isize, usize> = HashMap::new();
        for (y, hash) in changed() {
            if let Some(Some(was)) = places.get(&hash) {
                let vote = votes.entry(distance(*was, y)?).or_default();
                *vote = vote.saturating_add(1);
            }
        }
        let (by, count) = votes.into_iter().max_by_key(|(by, count)| (*count, *by))?;
        if by == 0 || count < MIN_VOTES {
            return None;
        }
        let (begin, length) = self.longest_run(old, by);
        if length < MIN_ROWS {
            return None;
        }
        let row = |y: usize| u16::try_from(y).ok();
        let to = Rect::new(0, row(begin)?, self.size.width(), row(length)?);
        let from = (0, row(begin.checked_add_signed(by)?)?);
        // Only tiles that have moved as a whole are done with.
        let top = to.y.checked_next_multiple_of(TILE)?;
        let bottom = u16::try_from(to.bottom()).ok()? & !TILE.wrapping_sub(1);
        let mut rest = damage.clone();
        rest.remove(Rect::new(0, top, to.width, bottom.saturating_sub(top)));
        Some((Move { to, from }, rest))
    }

    /// Returns the longest run of rows whose content was `by` rows further down: its first row and
    /// its length.
    fn longest_run(&self, old: &[u64], by: isize) -> (usize, usize) {
        let (mut best, mut run) = ((0, 0), (0, 0));
        for (y, new) in self.hashes.iter().enumerate() {
            let was = y.checked_add_signed(by).and_then(|was| old.get(was));
            run = match run {
                _ if was != Some(new) => (y.saturating_add(1), 0),
                (begin, length) => (begin, usize::saturating_add(length, 1)),
            };
            if run.1 > best.1 {
                best = run;
            }
        }
        best
    }
}

fn distance(was: usize, is: usize) -> Option<isize> {
    isize::try_from(was).ok()?.checked_sub(isize::try_from(is).ok()?)
}

fn hash(row: &[u32]) -> u64 {
    /// An odd constant without a pattern: the golden ratio's fraction.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let (pairs, last) = row.as_chunks();
    let pairs = pairs
        .iter()
        .map(|[first, second]| u64::from(*first) << 32 | u64::from(*second));
    pairs
        .chain(last.iter().copied().map(u64::from))
        .fold(FACTOR, |hash, pixels| {
            let mixed = (hash ^ pixels).wrapping_mul(FACTOR);
            mixed ^ mixed >> 32
        })
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::display::Framebuffer;

    const WIDTH: u16 = 40;
    const HEIGHT: u16 = 200;

    /// A text console: rows of the numbers' pixels, or black.
    fn show(framebuffer: &Framebuffer, rows: &[u32]) {
        framebuffer.write(Rect::new(0, 0, WIDTH, HEIGHT), |y, row| {
            row.fill(rows.get(usize::from(y)).copied().unwrap_or(0));
        });
    }

    /// Pixels of a client after a move.
    fn after(old: &Frame, moved: Move) -> Vec<u32> {
        let mut pixels = old.pixels().to_vec();
        for y in 0..usize::from(moved.to.height) {
            let to = (usize::from(moved.to.y) + y) * usize::from(WIDTH);
            let from = (usize::from(moved.from.1) + y) * usize::from(WIDTH);
            let row = old.pixels()[from..from + usize::from(WIDTH)].to_vec();
            pixels[to..to + usize::from(WIDTH)].copy_from_slice(&row);
        }
        pixels
    }

    proptest! {
        #[test]
        fn a_move_and_the_rest_of_the_damage_give_the_new_picture(
            old in prop::collection::vec(0..150_u32, usize::from(HEIGHT)),
            by in -150..150_isize,
            other in prop::collection::vec((0..usize::from(HEIGHT), any::<u32>()), 0..6),
        ) {
            let framebuffer = Arc::new(Framebuffer::new(Size::new(WIDTH.into(), HEIGHT.into()).unwrap()));
            let mut reader = framebuffer.reader(Arc::new(EventFd::new(0).unwrap())).unwrap();
            let mut frame = Frame::black(framebuffer.size());
            show(&framebuffer, &old);
            reader.read(&mut frame);
            let before = frame.clone();
            let mut rows = Rows::of(&frame);
            let mut new: Vec<u32> = (0..old.len())
                .map(|y| y.checked_add_signed(by).and_then(|was| old.get(was)).copied().unwrap_or(7))
                .collect();
            for (y, value) in other {
                new[y] = value & 0xff_ffff;
            }
            show(&framebuffer, &new);
            let damage = reader.read(&mut frame).damage;
            let found = rows.update(&frame, &damage);
            if by.abs() < 100 && by != 0 && new.iter().zip(&old).filter(|(a, b)| a != b).count() > 150 {
                prop_assert!(found.is_some() || new.len() < 200 || by.abs() > 20, "no move by {by} was found");
            }
            if let Some((moved, rest)) = found {
                let pixels = after(&before, moved);
                for (at, (client, server)) in pixels.iter().zip(frame.pixels()).enumerate() {
                    let (x, y) = (at % usize::from(WIDTH), at / usize::from(WIDTH));
                    let place = Rect::new(u16::try_from(x).unwrap(), u16::try_from(y).unwrap(), 1, 1);
                    prop_assert!(client == server || rest.touches(place), "{x}, {y}");
                }
            }
            prop_assert_eq!(&rows.hashes, &Rows::of(&frame).hashes);
        }
    }

    #[test]
    fn a_console_that_scrolls_by_a_line_is_a_move_and_one_line() {
        let framebuffer = Arc::new(Framebuffer::new(Size::new(WIDTH.into(), HEIGHT.into()).unwrap()));
        let mut reader = framebuffer.reader(Arc::new(EventFd::new(0).unwrap())).unwrap();
        let mut frame = Frame::black(framebuffer.size());
        let lines: Vec<u32> = (1..=u32::from(HEIGHT) + 16).collect();
        show(&framebuffer, &lines[..usize::from(HEIGHT)]);
        reader.read(&mut frame);
        let mut rows = Rows::of(&frame);
        show(&framebuffer, &lines[16..]);
        let damage = reader.read(&mut frame).damage;
        let (moved, rest) = rows.update(&frame, &damage).unwrap();
        assert_eq!(
            (moved.to, moved.from),
            (Rect::new(0, 0, WIDTH, HEIGHT - 16), (0, 16))
        );
        assert_eq!(rest.rects(), [Rect::new(0, 176, WIDTH, 24)]);
    }
}
