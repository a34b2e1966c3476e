//! Live migration, between two `vmm` processes: a whole machine over one stream, while its guest runs on.
//!
//! [`mod@format`] describes the stream. The source is a [`Sender`], which a [`Saving`](crate::snapshot::Saving) fills as it fills a
//! snapshot: all memory, then what the guest has changed meanwhile, round after round, and the rest while the machine is paused. The
//! target [receives](receive) memory into the RAM of a machine that is built then.
//!
//! Disks that are the source's alone go along ([`Mirrored`]): all of a disk first, before memory, and what the guest changes meanwhile in each
//! round, as with memory. What is sent is the content of the disk, whatever its format is; the target writes it into an image of its own
//! ([`ReceivedDisk`]), and has it on stable storage when everything has come.
//!
//! The stream is untrusted. The target checks each frame, and refuses what was changed or cut off with the place where that is. The
//! stream is not encrypted here: whoever makes the sockets sees to that.
//!
//! Whether the machine goes on here or there is not decided here: the source's stays paused when all has been sent, the target's when
//! all has been received, until the daemons have agreed.

pub mod format;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod mirrors;
mod receiver;
mod sender;

pub use receiver::{Received, ReceivedDisk, receive};
pub use sender::{Mirrored, Sender};

#[cfg(test)]
mod tests;
