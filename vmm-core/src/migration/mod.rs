//! Live migration, between two `vmm` processes: a whole machine over one stream, while its guest runs on.
//!
//! [`mod@format`] describes the stream. The source is a [`Sender`], which a [`Saving`](crate::snapshot::Saving) fills as it fills a
//! snapshot: all memory, then what the guest has changed meanwhile, round after round, and the rest while the machine is paused. The
//! target [receives](receive) memory into the RAM of a machine that is built then.
//!
//! The stream is untrusted. The target checks each frame, and refuses what was changed or cut off with the place where that is. The
//! stream is not encrypted here: whoever makes the sockets sees to that.
//!
//! Whether the machine goes on here or there is not decided here: the source's stays paused when all has been sent, the target's when
//! all has been received, until the daemons have agreed.

pub mod format;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod receiver;
mod sender;

pub use receiver::{Received, receive};
pub use sender::Sender;

#[cfg(test)]
mod tests;
