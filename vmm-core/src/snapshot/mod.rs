//! Snapshots: a whole machine in one file, from which the machine can continue once or many times.
//!
//! [`mod@format`] describes the file. A [`Writer`] fills the file, also while the guest runs, and
//! writes changed pages again. A [`Snapshot`] is a file that was read back and checked. [`saving`]
//! takes the snapshot of a machine: it copies memory on a thread of its own, and pauses the machine
//! only to take its state and the last changed pages.
//!
//! A file is untrusted. Changed, truncated or added data is refused with its position, before the
//! machine runs: the header, the sections and the table of checksums when the file is opened,
//! memory when it is loaded.

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
