//! The RFB protocol (VNC) for the machine's screen: RFC 6143, and extensions of the community's RFB
//! text.
//!
//! | file | content |
//! |---|---|
//! | [`session`] | one client's protocol as a state machine over bytes |
//! | [`message`] | client messages |
//! | [`pixel`] | pixel formats |
//! | `encode` | Raw, Hextile, ZRLE, Tight (without JPEG) |
//! | [`server`] | clients on UNIX sockets, their pacing and their rights |
//!
//! The server listens on a UNIX socket whose owner controls access, so the security type is None.
//! Cut text (the clipboard) is discarded.

mod encode;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
pub mod message;
pub mod pixel;
pub mod server;
pub mod session;

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
