//! Turns that nobody disturbs.
//!
//! The host of a machine that is itself a guest takes processors away now and then. A loop loses that time; a driver and a
//! device lose it twice, as each waits for the other one's processor too. A turn in which that happened says something
//! of the host, and is not counted.

use std::fs;

/// Of all processors together, in hundredths of a second; 0 where the kernel does not tell (proc_stat(5), `steal`).
fn stolen() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let all = text.lines().find_map(|line| line.strip_prefix("cpu "));
    let steal = all.and_then(|line| line.split_whitespace().nth(7));
    steal.and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Turns that were taken.
pub(super) struct Turns<T> {
    pub(super) counted: Vec<T>,
    /// How many were not counted.
    pub(super) disturbed: usize,
}

/// Takes `count` turns that nobody disturbs, and three times as many at most; `turn` is told the number of each.
///
/// Panics when there are too few then for a median: a quarter of `count`.
pub(super) fn take<T>(count: usize, mut turn: impl FnMut(usize) -> T) -> Turns<T> {
    let (mut counted, mut disturbed) = (Vec::new(), 0);
    for number in 0..count * 3 {
        let before = stolen();
        let result = turn(number);
        // A tick may have begun long before.
        if stolen() - before > 1 {
            disturbed += 1;
        } else {
            counted.push(result);
        }
        if counted.len() == count {
            break;
        }
    }
    assert!(
        counted.len() >= count.div_ceil(4),
        "the host took processors away in {disturbed} turns, only {} are left: try again when it is less busy",
        counted.len()
    );
    Turns { counted, disturbed }
}
