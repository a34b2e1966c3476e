//! What tells a worker that there is a command for it.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd to sleep on, and a flag to look at without a system call.
#[derive(Debug)]
pub(super) struct Bell {
    event: EventFd,
    rung: AtomicBool,
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            event: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            rung: AtomicBool::new(false),
        })
    }

    /// Tells the worker of a command that was sent before.
    pub(super) fn ring(&self) -> io::Result<()> {
        self.rung.store(true, Ordering::SeqCst);
        self.event.write(1)
    }

    /// Readable once it has rung: to be watched edge-triggered, as nobody reads it.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Whether it has rung since it was last silenced.
    pub(super) fn has_rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }

    /// The worker is about to look at all commands.
    pub(super) fn silence(&self) {
        self.rung.store(false, Ordering::SeqCst);
    }
}
