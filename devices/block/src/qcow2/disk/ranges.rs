//! Ranges of a disk that requests use, so that clusters are removed only from unused ranges.
//!
//! Any number of requests may use the same bytes; a clear holds its range exclusively. If a use and
//! a clear overlap, or two clears do, the later one waits until the earlier one has ended, whether
//! the earlier one has begun or waits itself. The holder of a range never requests another one, so
//! there is no deadlock.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// See the module. Ranges are in bytes of the disk.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By their turn.
    uses: BTreeMap<u64, Range<u64>>,
    /// Active and waiting clears, by their turn.
    clears: BTreeMap<u64, Range<u64>>,
    next: u64,
    failed: bool,
}

impl State {
    fn turn(&mut self) -> u64 {
        self.next = self.next.wrapping_add(1);
        self.next
    }
}

/// A range that a request uses, until it is [left](Ranges::leave).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Use(u64);

/// A range that is in use as long as this lives.
#[derive(Debug)]
pub(super) struct Held<'a> {
    ranges: &'a Ranges,
    turn: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = self.ranges.state();
        state.uses.remove(&self.turn);
        state.clears.remove(&self.turn);
        drop(state);
        self.ranges.changed.notify_all();
    }
}

impl Ranges {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses a range, unless somebody clears a part of it or waits to do so. Does not wait.
    pub(super) fn try_enter(&self, range: Range<u64>) -> Option<Use> {
        let mut state = self.state();
        if state.failed || overlaps(&state.clears, &range, u64::MAX) {
            return None;
        }
        let turn = state.turn();
        state.uses.insert(turn, range);
        Some(Use(turn))
    }

    /// Ends what [`try_enter`](Self::try_enter) began.
    pub(super) fn leave(&self, Use(turn): Use) {
        drop(Held { ranges: self, turn });
    }

    /// Uses a range, after all overlapping clears have ended. Fails if the image fails.
    pub(super) fn enter(&self, range: Range<u64>) -> io::Result<Held<'_>> {
        let mut state = self.state();
        let turn = state.turn();
        // Later clears of the range wait for this use.
        state.uses.insert(turn, range.clone());
        let held = Held { ranges: self, turn };
        while overlaps(&state.clears, &range, turn) {
            state = self.wait(state)?;
        }
        drop(state);
        Ok(held)
    }

    /// Holds a range exclusively, after all overlapping uses and clears have ended. Fails if the
    /// image fails.
    pub(super) fn clear(&self, range: Range<u64>) -> io::Result<Held<'_>> {
        let mut state = self.state();
        let turn = state.turn();
        state.clears.insert(turn, range.clone());
        let held = Held { ranges: self, turn };
        // Later uses and clears wait for this one.
        while overlaps(&state.uses, &range, turn) || overlaps(&state.clears, &range, turn) {
            state = self.wait(state)?;
        }
        drop(state);
        Ok(held)
    }

    /// The image failed: whoever waits fails.
    pub(super) fn fail(&self) {
        self.state().failed = true;
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> io::Result<MutexGuard<'a, State>> {
        if state.failed {
            return Err(io::Error::other("the qcow2 image failed before"));
        }
        Ok(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether one of `ranges` that came before `turn` has a byte in common with `range`.
fn overlaps(ranges: &BTreeMap<u64, Range<u64>>, range: &Range<u64>, turn: u64) -> bool {
    let mut before = ranges.range(..turn);
    before.any(|(_, other)| other.start < range.end && range.start < other.end)
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]
mod tests {
    use std::{sync::mpsc::channel, thread};

    use super::*;

    #[test]
    fn requests_share_bytes_and_a_clear_has_them_alone() {
        let ranges = Ranges::default();
        let first = ranges.try_enter(0..10).unwrap();
        let second = ranges.try_enter(5..15).unwrap();
        let elsewhere = ranges.clear(15..20).unwrap();
        assert_eq!(ranges.try_enter(14..16), None);
        assert_eq!(ranges.try_enter(19..30), None);
        assert!(ranges.try_enter(20..30).is_some());
        drop(elsewhere);
        assert!(ranges.try_enter(14..16).is_some());
        let (done, cleared) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let held = ranges.clear(0..12).unwrap();
                done.send(()).unwrap();
                drop(held);
            });
            // A use that arrives after the waiting clear has to wait too.
            while ranges.try_enter(0..1).map(|again| ranges.leave(again)).is_some() {
                thread::yield_now();
            }
            ranges.leave(first);
            assert!(cleared.try_recv().is_err());
            ranges.leave(second);
            cleared.recv().unwrap();
            drop(ranges.enter(0..12).unwrap());
        });
    }

    #[test]
    fn no_byte_is_used_and_cleared_at_once_whoever_comes_when() {
        use std::sync::atomic::{AtomicI64, Ordering};
        const CELLS: u64 = 6;
        let ranges = Ranges::default();
        // How many use it; -1 while it is cleared.
        let cells: [AtomicI64; CELLS as usize] = Default::default();
        thread::scope(|scope| {
            for lane in 1..=6_u64 {
                let (ranges, cells) = (&ranges, &cells);
                scope.spawn(move || {
                    let mut random = lane;
                    for _ in 0..3000 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let start = (random >> 33) % CELLS;
                        let end = (start + 1 + (random >> 40) % 3).min(CELLS);
                        let range = start..end;
                        let mine = &cells[start as usize..end as usize];
                        if (random >> 50).is_multiple_of(3) {
                            let _held = ranges.clear(range).unwrap();
                            assert!(mine.iter().all(|cell| cell.swap(-1, Ordering::SeqCst) == 0));
                            thread::yield_now();
                            assert!(mine.iter().all(|cell| cell.swap(0, Ordering::SeqCst) == -1));
                            continue;
                        }
                        let placed = (random >> 52)
                            .is_multiple_of(2)
                            .then(|| ranges.try_enter(range.clone()));
                        let held = match placed {
                            Some(None) => continue,
                            Some(Some(_)) => None,
                            None => Some(ranges.enter(range).unwrap()),
                        };
                        assert!(mine.iter().all(|cell| cell.fetch_add(1, Ordering::SeqCst) >= 0));
                        thread::yield_now();
                        assert!(mine.iter().all(|cell| cell.fetch_sub(1, Ordering::SeqCst) > 0));
                        drop(held);
                        if let Some(Some(placed)) = placed {
                            ranges.leave(placed);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn whoever_waits_fails_with_the_image() {
        let ranges = Ranges::default();
        let _used = ranges.try_enter(0..10).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ranges.clear(0..1).is_err());
            while ranges.try_enter(0..1).map(|again| ranges.leave(again)).is_some() {
                thread::yield_now();
            }
            ranges.fail();
            assert!(waiting.join().unwrap());
        });
        assert_eq!(ranges.try_enter(20..21), None);
    }
}
