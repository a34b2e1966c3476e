//! Attributes of an open file, by fstat(2) alone.
//!
//! std uses statx(2) with an empty path. That call accepts any path, and the limited threads that
//! carry out requests may not use it.

use std::{fs::File, io};

use rustix::fs::{FileType, fstat};

/// Attributes of an open file.
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// What it is.
    pub kind: FileType,
    /// In bytes; 0 of a device.
    pub length: u64,
    /// Bytes of the block that the file system likes best for I/O; 0 when it names none.
    pub block: u32,
}

/// Asks for it.
pub fn status(file: &File) -> io::Result<Status> {
    let stat = fstat(file)?;
    Ok(Status {
        kind: FileType::from_raw_mode(stat.st_mode),
        length: u64::try_from(stat.st_size).unwrap_or_default(),
        block: u32::try_from(stat.st_blksize).unwrap_or_default(),
    })
}

/// Length of a file in bytes.
pub fn length(file: &File) -> io::Result<u64> {
    Ok(status(file)?.length)
}
