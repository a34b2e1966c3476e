//! Serves a framebuffer to RFB clients on UNIX sockets, on one thread.
//!
//! # Pacing
//!
//! A client gets an update when it has asked for one, has taken all of the update before, and there is something new. So a client
//! that is slow, or on a slow line, gets fewer updates, each with the picture of that moment, and nobody waits for it. The
//! framebuffer is read at most once in [`FRAME`], for all clients together.
//!
//! # Cost
//!
//! The thread sleeps while nothing changes, and while no client waits for an update. Without clients it does not follow the
//! framebuffer and keeps no copy of it. One source of pixels, the [`BootScreen`], can't say that they have changed: while it is
//! shown and a client waits, the thread asks it, less and less often while nothing happens ([`POLLS`]).

mod client;
mod poll;
mod scroll;
mod worker;

use std::{io, os::fd::OwnedFd, sync::Arc, thread::JoinHandle, time::Duration};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::worker::Worker;
use crate::{
    display::{BootScreen, Framebuffer, Size},
    input::Hub,
    thread::{self, ThreadKind},
};

/// Most clients at once.
pub const MAX_CLIENTS: usize = 32;

/// Least time from one reading of the framebuffer to the next.
pub const FRAME: Duration = Duration::from_millis(16);

/// Least and most time from one look at the boot screen to the next. It doubles with each look that finds nothing; what a client
/// types or points at makes it short again.
pub const POLLS: (Duration, Duration) = (Duration::from_millis(32), Duration::from_millis(512));

/// Least and most time from asking whether the guest has taken all keys to asking again, while a client waits for that. It doubles each time.
pub const KEY_POLLS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// What clients of a socket may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// See the screen, type, point, ask for another size.
    Full,
    /// See the screen.
    ViewOnly,
}

/// Whoever can give the screen another size: the guest, which is asked.
pub trait Resizer: Send + Sync {
    /// Asks for that size; false when nobody is there who could.
    fn request_size(&self, size: Size) -> bool;
}

/// What is to be served.
pub struct Setup {
    /// Listening UNIX stream sockets; they are made non-blocking.
    pub listeners: Vec<(OwnedFd, Access)>,
    /// What clients call the screen: the VM's name.
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

/// A running server. It ends with [`stop`](Self::stop), or when dropped.
#[derive(Debug)]
pub struct Server {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the thread.
    pub fn start(setup: Setup) -> io::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let mut worker = Worker::new(setup, stop.try_clone()?)?;
        let thread = thread::spawn(ThreadKind::Screen, "screen", move || worker.run())?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Closes all connections and ends the thread; says whether it had been alive.
    pub fn stop(&mut self) -> bool {
        let Some(thread) = self.thread.take() else {
            return true;
        };
        // It can only fail when the counter is full, and then it is readable.
        let _full = self.stop.write(1);
        thread.join().is_ok()
    }

    /// Whether the thread is gone without having been told to.
    pub fn failed(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
