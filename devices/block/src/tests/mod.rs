//! All engines, put through the same.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

mod faults;
mod flush;
mod hosts;
pub(super) mod model;
mod sharing;
mod sleeping;

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use rstest::rstest;
use tempfile::NamedTempFile;
use vm_memory::GuestAddress;
use vmm_base::{GuestMemory, lacking, ram::Segment, sys::Iovecs};

use super::{
    Completion, Engine, Operation, Request, SECTOR,
    pool::{Pool, PoolEngine},
    target::{Alignment, Target},
    uring::UringEngine,
};

/// How long a test waits for an expected event before it fails.
const PATIENCE: Duration = Duration::from_secs(20);

fn late() -> Instant {
    Instant::now() + PATIENCE
}

fn read(offset: u64) -> Operation {
    Operation::Read { offset }
}

fn write(offset: u64) -> Operation {
    Operation::Write {
        offset,
        stable: false,
    }
}

/// Implementation of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Uring,
    /// The ring as kernels before 6.1 have it.
    OldUring,
    Threads,
}

/// How the image is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    /// Through the page cache.
    Buffered,
    /// With O_DIRECT, aligned as the host wants it.
    Direct,
    /// With O_DIRECT, as if the host had larger blocks than it has.
    Coarse,
}

/// An image and how it is used.
struct Setup {
    which: Which,
    path: PathBuf,
    target: Arc<Target>,
    _temporary: Option<NamedTempFile>,
}

impl Setup {
    /// A new image; `None` where the host can't do that, which fails the test in continuous integration.
    fn new(which: Which, cache: Cache, size: u64) -> Option<Self> {
        let temporary = NamedTempFile::new().unwrap();
        temporary.as_file().set_len(size).unwrap();
        let mut setup = Self::on(which, cache, temporary.path())?;
        setup._temporary = Some(temporary);
        Some(setup)
    }

    /// What is there.
    fn on(which: Which, cache: Cache, path: &Path) -> Option<Self> {
        let flags = if cache == Cache::Buffered {
            0
        } else {
            libc::O_DIRECT
        };
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path)
            .map_err(|error| lacking("O_DIRECT on the file system of temporary files", error))
            .ok()?;
        let target = match cache {
            Cache::Coarse => {
                let alignment = Alignment {
                    memory: 1024,
                    offset: 4096,
                };
                Target::aligned(file, alignment)
            }
            _ => Target::new(file),
        };
        let setup = Self {
            which,
            path: path.to_owned(),
            target: Arc::new(target.unwrap()),
            _temporary: None,
        };
        if which != Which::Threads
            && let Err(error) = UringEngine::new(Arc::clone(&setup.target), setup.pool())
        {
            lacking("io_uring", error);
            return None;
        }
        Some(setup)
    }

    fn pool(&self) -> Arc<Pool> {
        Arc::new(Pool::new(Arc::clone(&self.target)))
    }

    fn engine(&self) -> Box<dyn Engine> {
        match self.which {
            Which::Uring => Box::new(UringEngine::new(Arc::clone(&self.target), self.pool()).unwrap()),
            Which::OldUring => {
                Box::new(UringEngine::undeferred(Arc::clone(&self.target), self.pool()).unwrap())
            }
            Which::Threads => Box::new(PoolEngine::new(self.pool()).unwrap()),
        }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }
}

/// Guest memory of 1 MiB.
fn memory() -> Arc<GuestMemory> {
    Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap())
}

/// A request on that much of guest memory.
fn request(
    memory: &Arc<GuestMemory>,
    token: u32,
    operation: Operation,
    address: u64,
    length: u32,
) -> Request {
    let mut buffers = Iovecs::new(Arc::clone(memory));
    let segment = Segment {
        address: GuestAddress(address),
        length,
    };
    buffers.append(&[segment], 0, length).unwrap();
    Request {
        token,
        operation,
        buffers: Box::new(buffers),
    }
}

/// Has one request done.
fn carry_out(engine: &mut dyn Engine, request: Request) -> Completion {
    engine.submit(request);
    engine.commit().unwrap();
    engine.wait(late()).unwrap();
    engine.completed().expect("nothing completed")
}

/// Random requests, compared with a disk in memory.
#[rstest]
#[case::ring(Which::Uring, Cache::Buffered, false)]
#[case::ring_of_old_kernels(Which::OldUring, Cache::Direct, false)]
#[case::threads(Which::Threads, Cache::Buffered, false)]
#[case::ring_past_the_page_cache(Which::Uring, Cache::Direct, true)]
#[case::ring_with_buffers_that_are_not_aligned(Which::Uring, Cache::Direct, false)]
#[case::threads_past_the_page_cache(Which::Threads, Cache::Direct, false)]
#[case::ring_on_large_blocks(Which::Uring, Cache::Coarse, true)]
#[case::threads_on_large_blocks(Which::Threads, Cache::Coarse, false)]
fn an_engine_is_a_disk(#[case] which: Which, #[case] cache: Cache, #[case] aligned: bool) {
    proptest!(model::cases(), |(steps in model::steps(aligned))| {
        if let Some(setup) = Setup::new(which, cache, model::SECTORS * SECTOR) {
            model::run(&setup, steps);
        }
    });
}
