//! Output of `blkcheck write` in a guest: the operations of its threads that are on stable storage.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::vm::Console;

/// For so long something has to be confirmed on each disk.
const PATIENCE: Duration = Duration::from_secs(180);

/// Each of the `threads` threads' last confirmation in a console's text: the number of its operations that are on stable storage; 0 for a
/// thread without one. `name` is the prefix of the disk's lines.
pub fn last(text: &str, name: &str, threads: usize) -> Vec<u64> {
    let last = |thread: usize| {
        let prefix = format!("{name}-{thread}:");
        text.rmatch_indices(&prefix)
            .find_map(|(at, _)| text.get(at + prefix.len()..)?.split_once(';')?.0.parse().ok())
            .unwrap_or(0)
    };
    (0..threads).map(last).collect()
}

/// Waits until each of the disks `names` has a new confirmation from any thread.
///
/// # Errors
///
/// Fails with the last confirmation of each thread if a disk has no new confirmation within three
/// minutes.
pub fn wait(console: &mut Console, names: &[&str], threads: usize) -> Result<()> {
    let sums = |text: &str| -> Vec<u64> {
        names
            .iter()
            .map(|name| last(text, name, threads).iter().sum())
            .collect()
    };
    let (before, begin) = (sums(&console.text()), Instant::now());
    loop {
        let came = console.try_until(";", PATIENCE.as_secs());
        let text = console.text();
        let more = sums(&text);
        if more.iter().zip(&before).all(|(more, before)| more > before) {
            return Ok(());
        }
        if came.is_ok() && begin.elapsed() < PATIENCE {
            continue;
        }
        let all: Vec<String> = names
            .iter()
            .map(|name| format!("{name}: {:?}", last(&text, name, threads)))
            .collect();
        bail!(
            "not every disk had something confirmed within {PATIENCE:?}. Each thread's last confirmation:\n{}",
            all.join("\n")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_whole_confirmation_of_each_thread_counts() {
        let text = "raw-0:3;\nraw-1:5;\nqcow2-0:9;\nraw-0:12;\nraw-1:7";
        assert_eq!(last(text, "raw", 3), [12, 5, 0]);
        assert_eq!(last(text, "qcow2", 1), [9]);
    }
}
