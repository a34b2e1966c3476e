//! Faults for tests of what happens when a part of the daemon panics or hangs. Release builds have none.

use std::{fs, path::Path, thread, time::Duration};

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
