//! Durations in end-to-end tests. With `VMMD_STEPS` set to a file, each command in the node and
//! each wait at a console adds a line to the file: the test, the seconds and the step.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::thread;
use std::time::Instant;

/// Characters of a step's words that are written.
const WIDTH: usize = 150;

/// Does `work`, and writes down how long it took.
pub fn step<T>(what: impl FnOnce() -> String, work: impl FnOnce() -> T) -> T {
    let Some(file) = env::var_os("VMMD_STEPS") else {
        return work();
    };
    let begun = Instant::now();
    let done = work();
    let seconds = begun.elapsed().as_secs_f64();
    let words: String = what().replace(['\n', '\t'], " ").chars().take(WIDTH).collect();
    let test = thread::current().name().unwrap_or_default().to_owned();
    let line = format!("{test}\t{seconds:.2}\t{words}\n");
    // An error of the report must not fail the test.
    let _ = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    done
}
