//! Type of the file that holds an image.

use std::{fs::File, io};

use rustix::fs::FileType;
use vmm_base::sys::{blockdev, file};

/// Type of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    BlockDevice {
        /// In bytes: what discards and zeroings have to be multiples of.
        logical_block: u32,
    },
}

/// Returns the kind of the file (or the name of its unsupported type) and its size in bytes.
pub(super) fn measure(file: &File) -> io::Result<(Result<Kind, &'static str>, u64)> {
    let status = file::status(file)?;
    match status.kind {
        FileType::RegularFile => Ok((Ok(Kind::File), status.length)),
        FileType::BlockDevice => {
            let logical_block = blockdev::logical_block(file)?;
            Ok((Ok(Kind::BlockDevice { logical_block }), blockdev::size(file)?))
        }
        other => Ok((Err(kind_name(other)), 0)),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        _ => "file of unknown kind",
    }
}
