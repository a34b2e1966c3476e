//! Snapshots: a whole machine in one file, from which it goes on, once or many times.
//!
//! [`mod@format`] describes the file. A [`Writer`] fills it, also while the guest runs on and writes pages again; a [`Snapshot`] is a
//! file that was read back and checked. [`saving`] takes the snapshot of a machine: it copies memory on a thread of its own, and the
//! machine is paused only while its state and the last changed pages are taken.
//!
//! A file is untrusted. Whatever was changed, cut off or added in it is refused with the place where that is, before the machine
//! runs: the header, the sections and the table of checksums when the file is opened, memory when it is loaded.

mod converging;
pub mod error;
pub mod format;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub(crate) mod memory;
pub mod reader;
pub mod saving;
pub mod writer;

pub use error::SnapshotError;
pub use reader::Snapshot;
pub use saving::{Report, Saving};
pub use writer::Writer;

#[cfg(test)]
mod tests;
