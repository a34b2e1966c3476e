//! The machine's screen: one framebuffer, and the RFB server that shows it.
//!
//! ```text
//!  worker "gpu" ── pixels, damage, cursor ──▶ Framebuffer ──▶ Reader (RFB server, thread "screen")
//!  BootScreen, polled by the server ────────▶
//! ```
//!
//! A device writes pixels and says which part of the picture it changed (*damage*). Each reader has a record of its own of
//! the damage that it has not read yet, in tiles, so a reader that is slow or absent costs a few kilobytes and makes nobody
//! wait.

pub(crate) mod boot;
mod damage;
mod framebuffer;
mod geometry;
pub mod rfb;

pub use boot::{BootScreen, PIXEL, VideoMemory};
pub use damage::Damage;
pub(crate) use framebuffer::MAX_CURSOR;
pub use framebuffer::{Cursor, Frame, Framebuffer, Reader, Update};
pub use geometry::{MAX_PIXELS, MAX_SIDE, Rect, Size};
