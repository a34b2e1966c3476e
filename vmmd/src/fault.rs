//! Faults for tests: a part of the daemon panics, hangs, or forgets its duty. Release builds have none.

use std::{env, fs, path::Path, thread, time::Duration};

/// Panics once when a test has put a file of this name into the folder `fault` of `dir`.
pub fn point(dir: &Path, name: &str) {
    if cfg!(debug_assertions) && fs::remove_file(dir.join("fault").join(name)).is_ok() {
        panic!("the fault \"{name}\" of a test");
    }
}

/// Blocks as long as a test has a file of this name in the folder `fault` of `dir`.
pub fn stall(dir: &Path, name: &str) {
    while cfg!(debug_assertions) && dir.join("fault").join(name).exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

/// How long something is waited for: half a second when a test has put a file of this name into the folder `fault` of `dir`.
pub fn patience(dir: &Path, name: &str, usual: Duration) -> Duration {
    let hasty = cfg!(debug_assertions) && dir.join("fault").join(name).exists();
    if hasty { Duration::from_millis(500) } else { usual }
}

/// Whether the daemon is to have the deliberate fault `name`, by the variable `VMMD_FAULT` of its environment. The tests that have to
/// notice it are in `tests/daemon/deliberate.rs`.
pub fn deliberate(name: &str) -> bool {
    cfg!(debug_assertions) && env::var_os("VMMD_FAULT").is_some_and(|fault| fault == name)
}
