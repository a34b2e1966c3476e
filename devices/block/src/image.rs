//! Interface of disk images.

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
    /// Returns an accessor that reads and writes the image beside the engines, for copies of the
    /// whole image. `Unsupported` if the image type has no accessor.
    fn access(&self) -> io::Result<Box<dyn Access>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Grows the image while its engines are at work. Afterwards [`capacity`](Self::capacity) is
    /// `capacity` bytes, a multiple of [`SECTOR`] and at least the old capacity. `None` takes over
    /// the current size of a block device.
    fn grow(&self, capacity: Option<u64>) -> io::Result<()>;
    /// Writes cached state back to the image's files. Afterwards a copy of the files contains all
    /// completed requests.
    fn commit(&self) -> io::Result<()>;
    /// Makes all writes durable and releases the lock. Another process may use the image then, and
    /// no engine of this image does until it is locked again. `Unsupported` for an image whose
    /// state here becomes invalid after foreign writes.
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
    /// Granularity in which a discard frees space; `None` if discards free none.
    pub discard_granularity: Option<u32>,
}

/// Reason why a file is not usable as a disk. The caller names the disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file is a directory, a socket or another unsupported type.
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
    /// The descriptor does not allow the intended access.
    #[error("not open for {0}")]
    Access(&'static str),
    /// Somebody else has locked it.
    #[error("in use by another VM or program")]
    InUse,
    /// The file is not usable as a qcow2 image.
    #[error(transparent)]
    Qcow2(#[from] super::qcow2::Refusal),
    /// The host refused something.
    #[error("{0}")]
    Host(&'static str, #[source] io::Error),
}
