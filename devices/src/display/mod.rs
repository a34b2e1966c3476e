//! The machine's screen: one framebuffer, and the RFB server that shows it.
//!
//! ```text
//!  worker "gpu" ── pixels, damage, cursor ──▶ Framebuffer ──▶ Reader (RFB server, thread "screen")
//!  BootScreen, polled by the server ────────▶
//! ```
//!
//! A device writes pixels and reports the changed part of the picture (*damage*). Each reader has
//! its own record of the unread damage, in tiles. A slow or absent reader therefore costs a few
//! kilobytes and does not delay other readers or the device.

pub(crate) mod boot;
mod damage;
mod framebuffer;
pub mod rfb;

pub use boot::{BootScreen, PIXEL, VideoMemory};
pub use damage::Damage;
pub(crate) use framebuffer::MAX_CURSOR;
pub use framebuffer::{Cursor, Frame, Framebuffer, Reader, Update};

pub use crate::geometry::{MAX_PIXELS, MAX_SIDE, Rect, Size};
