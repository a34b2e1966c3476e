//! Live migration between two `vmm` processes: a whole machine over one stream, while its guest
//! runs.
//!
//! [`mod@format`] describes the stream. The source is a [`Sender`], which a
//! [`Saving`](crate::snapshot::Saving) fills like a snapshot: all memory, then the guest's changes,
//! round after round, and the rest while the machine is paused. The target [receives](receive)
//! memory into the RAM of a machine that is built afterwards.
//!
//! The stream includes disks that only the source can access ([`Mirrored`]): the whole disk first,
//! before memory, and the guest's changes in each round, as with memory. The stream has the content
//! of the disk, independent of the image's format. The target writes the content into an image of
//! its own ([`ReceivedDisk`]), and flushes it to stable storage after the end of the stream.
//!
//! The stream includes the boot files of the machine, if the target has none ([`ReceivedBoot`]).
//!
//! The stream is untrusted. The target checks each frame, and refuses a changed or truncated stream
//! with the position of the error. This module does not encrypt the stream: the creator of the
//! sockets is responsible for encryption.
//!
//! This module does not decide which side continues. The source's machine stays paused when all is
//! sent, and the target's when all is received, until the daemons have agreed.

mod boot;
pub mod format;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod mirrors;
mod receiver;
mod sender;

pub use boot::{BootFiles, ReceivedBoot};
pub use receiver::{Received, ReceivedDisk, receive};
pub use sender::{Mirrored, Sender};

#[cfg(test)]
mod tests;
