//! What it is that an image is in.

use std::{fs::File, io, os::unix::fs::FileTypeExt as _};

use crate::sys::blockdev;

/// What it is that holds the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::block) enum Kind {
    File,
    BlockDevice {
        /// In bytes: what discards and zeroings have to be multiples of.
        logical_block: u32,
    },
}

/// What the file is (or is, as no disk can be), and its size in bytes.
pub(super) fn measure(file: &File) -> io::Result<(Result<Kind, &'static str>, u64)> {
    let metadata = file.metadata()?;
    let file_type = metadata.file_type();
    if file_type.is_file() {
        return Ok((Ok(Kind::File), metadata.len()));
    }
    if file_type.is_block_device() {
        let logical_block = blockdev::logical_block(file)?;
        return Ok((Ok(Kind::BlockDevice { logical_block }), blockdev::size(file)?));
    }
    Ok((Err(kind_name(file_type)), 0))
}

fn kind_name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "directory"
    } else if kind.is_char_device() {
        "character device"
    } else if kind.is_fifo() {
        "pipe"
    } else if kind.is_socket() {
        "socket"
    } else {
        "file of unknown kind"
    }
}
