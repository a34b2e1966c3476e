//! Faults for tests of what happens when a part of the daemon panics. Release builds have none.

use std::{fs, path::Path};

/// Panics once when a test has put a file of this name into the folder `fault` of `dir`.
pub fn point(dir: &Path, name: &str) {
    if cfg!(debug_assertions) && fs::remove_file(dir.join("fault").join(name)).is_ok() {
        panic!("the fault \"{name}\" of a test");
    }
}
