//! Serves a framebuffer to RFB clients on UNIX sockets, on one thread. The crate `rfb` has the protocol; the owner of a
//! socket controls access to it.
//!
//! # Pacing
//!
//! A client gets an update when it has requested one, has taken all of the previous update, and the
//! picture has changed. A slow client, or a client on a slow line, therefore gets fewer updates,
//! each with the current picture, and delays no other client. The framebuffer is read at most once
//! in [`FRAME`], for all clients together.
//!
//! # Cost
//!
//! The thread sleeps while the picture does not change, and while no client waits for an update.
//! Without clients it does not follow the framebuffer and keeps no copy. One source of pixels, the
//! [`BootScreen`], cannot report changes: while it is shown and a client waits, the thread polls
//! it, less and less often without changes ([`POLLS`]).

mod client;
mod poll;
mod scroll;
mod worker;

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use rfb::Size;
use vmm_base::thread::ThreadKind;

pub use vmm_base::thread::Server;

use self::worker::Worker;
use crate::{
    display::{BootScreen, Framebuffer},
    input::Hub,
};

/// Most clients at once.
pub const MAX_CLIENTS: usize = 32;

/// Least time from one reading of the framebuffer to the next.
pub const FRAME: Duration = Duration::from_millis(16);

/// Minimum and maximum interval of polling the boot screen. The interval doubles with each poll
/// without changes; keyboard or pointer input from a client resets it to the minimum.
pub const POLLS: (Duration, Duration) = (Duration::from_millis(32), Duration::from_millis(512));

/// Least and most time from asking whether the guest has taken all keys to asking again, while a client waits for that. It doubles each time.
pub const KEY_POLLS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Rights of a socket's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// See the screen, type, point, ask for another size.
    Full,
    /// See the screen.
    ViewOnly,
}

/// Requests another screen size from the guest.
pub trait Resizer: Send + Sync {
    /// Requests that size; false without a driver, or if the adapter cannot offer the size.
    fn request_size(&self, size: Size) -> bool;
}

/// Configuration of the server.
pub struct Setup {
    /// Listening UNIX stream sockets; they are made non-blocking.
    pub listeners: Vec<(OwnedFd, Access)>,
    /// Name of the screen for clients: the VM's name.
    pub name: String,
    /// The screen.
    pub framebuffer: Arc<Framebuffer>,
    /// A source of the framebuffer's pixels that has to be asked.
    pub boot: Option<Arc<BootScreen>>,
    /// Takes keys and the pointer.
    pub input: Arc<Hub>,
    /// Takes wishes for another size.
    pub resizer: Arc<dyn Resizer>,
}

/// Starts the server. At its end it closes all connections.
pub fn start(setup: Setup) -> io::Result<Server> {
    Server::start(ThreadKind::Screen, "screen", |stop| {
        let mut worker = Worker::new(setup, stop)?;
        Ok(move || worker.run())
    })
}

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
