//! Rights that a process drops before it restricts its system calls.

#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

use anyhow::{Context, Result};
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// Takes an inherited descriptor, and sees to it that no child of this process inherits it in turn.
///
/// # Errors
///
/// EBADF: no such descriptor is open, or the number is that of a standard stream.
pub fn inherited_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD takes an int and touches no memory; a descriptor that is not open gives an error.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, and its number was given to this process for this use alone; a caller that names one
    // twice gets EBADF from the second use at the latest when the first owner closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sees to it that the report of a panic opens no files: no backtrace. To be called before there is a second thread.
pub fn forbid_backtraces() {
    for name in ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"] {
        // SAFETY: there is no other thread that could read the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
}

/// No new rights through an exec, no core dumps with data of guests, no ptrace by other processes of the same user.
///
/// # Errors
///
/// The kernel refuses one of these.
pub fn lock_down() -> Result<()> {
    rustix::thread::set_no_new_privs(true).context("setting no_new_privs")?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("clearing the dumpable flag")?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).context("forbidding core dumps")
}
