//! A FLUSH reaches the storage of the image. The page cache shows this: written pages are dirty
//! before a FLUSH, and none is dirty after it.

use rustix::fs::fstatfs;
use vmm_base::sys::cachestat::not_written_back;

use super::{hosts::Loop, *};

const SIZE: u64 = 1 << 20;
/// `statfs` type of a file system without a disk below it (`linux/magic.h`).
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// The kernel may write dirty pages back on its own, but not this often right after each write.
const TRIES: u32 = 20;

/// Opens the file, if this host reports its dirty pages.
fn watched(path: &Path) -> Option<File> {
    let file = File::open(path).unwrap();
    if fstatfs(&file).unwrap().f_type == TMPFS_MAGIC {
        lacking("disk below its temporary files", "they are on a tmpfs");
        return None;
    }
    not_written_back(&file)
        .map_err(|error| lacking("cachestat(2)", error))
        .ok()?;
    Some(file)
}

/// Writes until `below` has something dirty, then has it flushed.
fn written_and_flushed(setup: &Setup, below: &File) {
    let (mut engine, memory) = (setup.engine(), memory());
    let written = (0..TRIES).any(|_| {
        for block in [0, 7, 100] {
            let written = carry_out(&mut *engine, request(&memory, 1, write(block * 4096), 0, 4096));
            written.result.unwrap();
        }
        not_written_back(below).unwrap() > 0
    });
    assert!(
        written,
        "what is written is on the disk at once: nothing is shown here"
    );
    let flushed = carry_out(&mut *engine, request(&memory, 2, Operation::Flush, 0, 0));
    flushed.result.unwrap();
    assert_eq!(
        not_written_back(below).unwrap(),
        0,
        "pages that are not on the disk"
    );
}

#[rstest]
fn a_flush_leaves_nothing_of_a_file_in_the_page_cache_alone(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
) {
    let Some(setup) = Setup::new(which, Cache::Buffered, SIZE) else {
        return;
    };
    if let Some(file) = watched(&setup.path) {
        written_and_flushed(&setup, &file);
    }
}

/// The block device is one with a volatile cache: that of the file below it.
#[rstest]
fn a_flush_empties_the_cache_of_a_block_device(
    #[values(Which::Uring, Which::OldUring, Which::Threads)] which: Which,
) {
    let Some(device) = Loop::new(SIZE) else {
        return;
    };
    let setup = Setup::on(which, Cache::Direct, Path::new(&device.device));
    if let Some((setup, file)) = setup.zip(watched(device.file.path())) {
        written_and_flushed(&setup, &file);
    }
}
