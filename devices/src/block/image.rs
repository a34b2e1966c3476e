//! What a disk is made of.

use std::io;

use super::{SECTOR, engine::Engine};

/// An open disk image. It is locked against other users for as long as it or one of its engines lives.
pub trait Image: Send {
    /// Size in bytes, a multiple of [`SECTOR`].
    fn capacity(&self) -> u64;
    /// Whether it refuses writes.
    fn read_only(&self) -> bool;
    /// Something that carries out requests on it, for one thread. There may be several at once.
    fn engine(&self) -> io::Result<Box<dyn Engine>>;
}

/// Why a file can't be used as a disk. The caller names the disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is a directory, a socket or the like.
    #[error("not a regular file or block device but a {0}")]
    Kind(&'static str),
    /// The size is no multiple of a sector.
    #[error("size of {0} bytes is not a multiple of {SECTOR}")]
    Size(u64),
    /// There is nothing in it.
    #[error("the image is empty")]
    Empty,
    /// The descriptor does not allow what the disk is to be used for.
    #[error("not open for {0}")]
    Access(&'static str),
    /// Somebody else has locked it.
    #[error("in use by another VM or program")]
    InUse,
    /// The host refused something.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}
