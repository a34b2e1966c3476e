//! Carrying out a plan on a disk.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use crate::plan::{self, Kind, MOST_THREADS, Operation, SECTOR};

/// Memory alignment of direct requests.
const ALIGNMENT: usize = 4096;
/// Room for the longest operation.
const BUFFER: usize = 256 * SECTOR;

/// Memory for direct requests.
pub struct Aligned {
    bytes: Vec<u8>,
    offset: usize,
}

impl Aligned {
    /// Zeroed memory for `length` bytes.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0; length + ALIGNMENT];
        let offset = bytes.as_ptr().align_offset(ALIGNMENT);
        Aligned { bytes, offset }
    }

    /// Its first `length` bytes.
    pub fn part(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.offset..][..length]
    }
}

/// Opens a disk for direct requests; a file whose file system can't do them is opened without.
pub fn open(disk: &Path, write: bool) -> Result<(File, u64)> {
    let open = |flags: OFlags| {
        let flags = i32::try_from(flags.bits()).unwrap_or_default();
        OpenOptions::new()
            .read(true)
            .write(write)
            .custom_flags(flags)
            .open(disk)
    };
    let mut file = open(OFlags::DIRECT)
        .or_else(|_| open(OFlags::empty()))
        .with_context(|| format!("open {}", disk.display()))?;
    let bytes = file.seek(SeekFrom::End(0)).context("find the disk's size")?;
    Ok((file, bytes / SECTOR as u64))
}

/// Runs all threads until one fails, or each has done `limit` operations. Each has one request under way at a time: as many as there
/// are threads are the depth.
pub fn run(disk: &Path, round: u32, prefix: &str, threads: u64, limit: Option<u64>) -> Result<()> {
    ensure!(
        (1..=MOST_THREADS).contains(&threads),
        "1 to {MOST_THREADS} threads"
    );
    let (file, sectors) = open(disk, true)?;
    ensure!(sectors >= 1 << 13, "the disk is smaller than 4 MiB");
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (file, operations) = (&file, plan::operations(round, thread, threads, sectors));
                scope.spawn(move || carry_out(file, operations, limit, &format!("{prefix}-{thread}:")))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
}

fn carry_out(
    file: &File,
    operations: impl Iterator<Item = Operation>,
    limit: Option<u64>,
    prefix: &str,
) -> Result<()> {
    let mut buffer = Aligned::new(BUFFER);
    for (done, operation) in (1..).zip(operations) {
        execute(file, &operation, &mut buffer).with_context(|| format!("{operation:?}"))?;
        let last = limit.is_some_and(|limit| done >= limit);
        if operation.flush || last {
            file.sync_data().context("flush")?;
            let mut out = std::io::stdout().lock();
            writeln!(out, "{prefix}{done};")?;
            out.flush()?;
        }
        if last {
            break;
        }
    }
    Ok(())
}

fn execute(file: &File, operation: &Operation, buffer: &mut Aligned) -> Result<()> {
    let (start, length) = (operation.start * SECTOR as u64, operation.count * SECTOR as u64);
    let flags = match operation.kind {
        Kind::Write => {
            let bytes = buffer.part(usize::try_from(length)?);
            for (sector, bytes) in (operation.start..).zip(bytes.chunks_exact_mut(SECTOR)) {
                plan::fill(bytes, operation.id, sector);
            }
            return file.write_all_at(bytes, start).context("write");
        }
        Kind::Unmap => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        Kind::Zero => FallocateFlags::ZERO_RANGE,
    };
    fallocate(file, flags, start, length).context("zero")
}
