//! Undisturbed turns.
//!
//! If the machine is a guest, its host takes processors away occasionally. A loop loses this time
//! once. A driver and a device lose the time twice, because each also waits for the other's
//! processor. Such a turn measures the host and is not counted.

use std::fs;

/// Steal time of all processors together, in hundredths of a second. Returns 0 if the kernel does
/// not report it (proc_stat(5), `steal`).
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

/// Takes turns until `count` turns were undisturbed, at most `3 * count` turns in total. `turn`
/// receives the number of each turn.
///
/// Panics if fewer than a quarter of `count` turns were undisturbed, because a median needs more.
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
