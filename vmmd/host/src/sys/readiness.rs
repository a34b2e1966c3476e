//! Registration of a descriptor with the runtime.

use std::{io, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

/// Watches `fd` for becoming readable.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and stays the same open file until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// Watches `fd` for exceptional conditions (POLLPRI): changes of a file of cgroup v2.
pub fn watch_changes(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and stays the same open file until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::PRIORITY) }?)
}
