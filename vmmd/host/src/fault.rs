//! Faults for tests: a part of the daemon panics, hangs, or forgets its duty. Release builds have none.

use std::{
    env, fs,
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    process::{Signal, getpid, kill_process},
};

/// How long is waited where a test is in a hurry.
const HASTE: Duration = Duration::from_millis(500);

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

/// Waits as long as a test has a file of this name in the folder `fault` of `dir`; one with `.reached` behind its name says that it was come to.
pub async fn hold(dir: &Path, name: &str) {
    let held = dir.join("fault").join(name);
    if !cfg!(debug_assertions) || !held.exists() {
        return;
    }
    // A test that is not told fails.
    let _ = fs::write(held.with_extension("reached"), "");
    while held.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Takes as many milliseconds as a test has written into a file of this name in the folder `fault` of `dir`.
pub fn slow(dir: &Path, name: &str) {
    if cfg!(debug_assertions)
        && let Ok(milliseconds) = fs::read_to_string(dir.join("fault").join(name))
        && let Ok(milliseconds) = milliseconds.parse()
    {
        thread::sleep(Duration::from_millis(milliseconds));
    }
}

/// Whether a test has a file of this name in the folder `fault` of `dir`; one with `.reached` behind its name says that it was asked for.
pub fn is_set(dir: &Path, name: &str) -> bool {
    let set = dir.join("fault").join(name);
    let is_set = cfg!(debug_assertions) && set.exists();
    if is_set {
        // A test that is not told fails.
        let _ = fs::write(set.with_extension("reached"), "");
    }
    is_set
}

/// Waits as long as usual; only half a second more when a test puts a file of this name into the folder `fault` of `dir`.
pub async fn wait(dir: &Path, name: &str, usual: Duration) {
    let (hasty, end) = (dir.join("fault").join(name), Instant::now() + usual);
    while cfg!(debug_assertions) && !hasty.exists() && Instant::now() < end {
        tokio::time::sleep(HASTE / 10).await;
    }
    let left = end.saturating_duration_since(Instant::now());
    tokio::time::sleep(patience(dir, name, left)).await;
}

/// How long something is waited for: half a second when a test has put a file of this name into the folder `fault` of `dir`.
pub fn patience(dir: &Path, name: &str, usual: Duration) -> Duration {
    let hasty = cfg!(debug_assertions) && dir.join("fault").join(name).exists();
    if hasty { HASTE } else { usual }
}

/// Begins a step of a change to the store, the node's network or a `vmm`. When the variable `VMMD_STEPS` of the environment names a folder in which a
/// test has put a file `left` with a number, each step is a line of the file `walked` there, and with the one that has so many before it the daemon is
/// killed, before it does anything of it. Meanwhile it holds the lock of the file `turn` there, which the test takes before it looks.
pub fn step(what: &str) {
    static TURN: Mutex<()> = Mutex::new(());
    if !cfg!(debug_assertions) {
        return;
    }
    let Some(folder) = env::var_os("VMMD_STEPS") else {
        return;
    };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let path = |name: &str| Path::new(&folder).join(name);
    let (left, walked) = (path("left"), path("walked"));
    let Ok(turn) = fs::File::create(path("turn")) else {
        return;
    };
    let _ = flock(&turn, FlockOperation::LockExclusive);
    let Some(count) = fs::read_to_string(&left)
        .ok()
        .and_then(|count| count.parse::<u32>().ok())
    else {
        return;
    };
    // A test that is not told fails.
    let before = fs::read_to_string(&walked).unwrap_or_default();
    let _ = fs::write(&walked, format!("{before}{what}\n"));
    match count.checked_sub(1) {
        Some(count) => drop(fs::write(&left, count.to_string())),
        None => drop(kill_process(getpid(), Signal::KILL)),
    }
}

/// Whether the daemon is to have the deliberate fault `name`, by the variable `VMMD_FAULT` of its environment. The tests that have to
/// notice it are in `tests/daemon/deliberate.rs`.
pub fn deliberate(name: &str) -> bool {
    cfg!(debug_assertions) && env::var_os("VMMD_FAULT").is_some_and(|fault| fault == name)
}
