//! All engines, put through the same.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod model;

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt as _,
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::{
    Engine, SECTOR,
    pool::{Pool, PoolEngine},
    target::Target,
    uring::UringEngine,
};

/// How long a test waits for what has to come, before it fails.
const PATIENCE: Duration = Duration::from_secs(20);

fn sleep_free_deadline() -> Instant {
    Instant::now() + PATIENCE
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Uring,
    Threads,
}

/// A new image and how it is used.
struct Setup {
    which: Which,
    path: NamedTempFile,
    target: Arc<Target>,
}

impl Setup {
    fn new(which: Which, size: u64) -> Self {
        let path = NamedTempFile::new().unwrap();
        path.as_file().set_len(size).unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(0)
            .open(path.path())
            .unwrap();
        let target = Arc::new(Target::new(file).unwrap());
        Self { which, path, target }
    }

    fn engine(&self) -> Box<dyn Engine> {
        let pool = Arc::new(Pool::new(Arc::clone(&self.target)));
        match self.which {
            Which::Uring => Box::new(UringEngine::new(Arc::clone(&self.target), pool).unwrap()),
            Which::Threads => Box::new(PoolEngine::new(pool).unwrap()),
        }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.path.path()).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_the_ring_does_is_what_a_disk_does(steps in model::steps(false)) {
        model::run(&Setup::new(Which::Uring, model::SECTORS * SECTOR), steps);
    }

    #[test]
    fn what_threads_do_is_what_a_disk_does(steps in model::steps(false)) {
        model::run(&Setup::new(Which::Threads, model::SECTORS * SECTOR), steps);
    }
}
