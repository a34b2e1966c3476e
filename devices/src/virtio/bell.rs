//! Event that notifies a worker of a new command.

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

    /// Notifies the worker of a command. The caller sends the command first.
    pub(super) fn ring(&self) -> io::Result<()> {
        self.rung.store(true, Ordering::SeqCst);
        self.event.write(1)
    }

    /// Event that becomes readable when the bell rings. No one reads its counter, so it must be
    /// watched edge-triggered.
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
