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
mod framebuffer;
pub mod server;

pub use boot::{BootScreen, PIXEL, VideoMemory};
pub(crate) use framebuffer::MAX_CURSOR;
pub use framebuffer::{Framebuffer, Reader, Update};
