//! System calls that no library in the tree wraps safely.
#![allow(unsafe_code)]

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{FromRawFd, OwnedFd},
    ptr,
};

/// Blocks the signals that ask the process to end. They can be read from the descriptor instead, as `signalfd_siginfo` each.
/// The first process of a container gets no signal that it neither handles nor reads.
pub fn termination_signals() -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is room for a set, which is initialised here.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the set was initialised above, the number is a signal's.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: the set is initialised; the previous one is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the set is initialised; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
