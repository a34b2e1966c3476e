//! The RFB protocol (VNC) for a machine's screen, without I/O: RFC 6143, and extensions of the community's RFB text.
//!
//! This crate owns one client's protocol as a state machine over bytes ([`session`]), client messages ([`message`]), pixel
//! formats ([`pixel`]), the encodings Raw, Hextile, ZRLE and Tight (without JPEG), and the parts of a picture: sizes and
//! rectangles, [`Frame`], [`Cursor`], and the parts that have changed ([`Damage`]).
//!
//! A client is untrusted: no input may cause a panic, memory without bound or output without end. The crate must never do
//! I/O, make a thread or read a clock: the owner of the socket does, and decides when a client gets an update.
//!
//! The security type is None: the owner of the socket controls access. Cut text (the clipboard) is discarded.
//!
//! A reader starts with [`session::Session`].

mod damage;
mod encode;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod geometry;
pub mod handshake;
pub mod message;
mod picture;
pub mod pixel;
pub mod session;
#[cfg(any(test, feature = "testing"))]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs
)]
pub mod testing;

pub use damage::{Damage, TILE};
pub use geometry::{MAX_PIXELS, MAX_SIDE, Rect, Size};
pub use picture::{Cursor, Frame};

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]
mod tests;
