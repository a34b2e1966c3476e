//! What a disk is made of.

use std::io;

use super::{SECTOR, content::Access, engine::Engine};

/// An open disk image. It is locked against other users for as long as it or one of its engines lives, but between [`unlock`](Image::unlock)
/// and [`lock`](Image::lock).
pub trait Image: Send {
    /// Size in bytes by now, a multiple of [`SECTOR`].
    fn capacity(&self) -> u64;
    /// Whether it refuses writes.
    fn read_only(&self) -> bool;
    /// How it likes to be used.
    fn geometry(&self) -> Geometry;
    /// Something that carries out requests on it, for one thread. There may be several at once.
    fn engine(&self) -> io::Result<Box<dyn Engine>>;
    /// Something that reads and writes it beside the engines, for who copies it as a whole. `Unsupported` where nobody does.
    fn access(&self) -> io::Result<Box<dyn Access>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Makes it larger, while engines of it are at work: afterwards [`capacity`](Self::capacity) is `capacity` bytes, a
    /// multiple of [`SECTOR`] and not less than before. `None` takes over what a block device has by now.
    fn grow(&self, capacity: Option<u64>) -> io::Result<()>;
    /// Writes what it holds back to its files: afterwards a copy of the files has all requests that have completed.
    fn commit(&self) -> io::Result<()>;
    /// Makes durable what was written, and gives up the lock: somebody else may use the image then, and no engine of this one does until it is
    /// locked again. `Unsupported` for an image that somebody else's writes would make useless here.
    fn unlock(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes the lock again; false when somebody else has it.
    fn lock(&self) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// How an image likes to be used. Sizes are in bytes and powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Smaller writes mean that the host reads and writes back: 512 or more.
    pub physical_block: u32,
    /// Requests of this size and its multiples are best; 0 says nothing.
    pub optimal_io: u32,
    /// What a discard gives back is in units of this size; `None` when it gives nothing back.
    pub discard_granularity: Option<u32>,
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
    /// The size is no multiple of the block that direct I/O works with here.
    #[error(
        "size of {size} bytes is not a multiple of {block}, as direct I/O needs it here: make it larger, or open it without"
    )]
    DirectSize {
        /// In bytes.
        size: u64,
        /// In bytes.
        block: u32,
    },
    /// It was to be an ISO image.
    #[error("not an ISO 9660 image: it has no volume descriptor in sector 16")]
    NotIso,
    /// There is nothing in it.
    #[error("the image is empty")]
    Empty,
    /// The descriptor does not allow what the disk is to be used for.
    #[error("not open for {0}")]
    Access(&'static str),
    /// Somebody else has locked it.
    #[error("in use by another VM or program")]
    InUse,
    /// It can't be used as a qcow2 image.
    #[error(transparent)]
    Qcow2(#[from] super::qcow2::Refusal),
    /// The host refused something.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}
