//! System calls that no crate wraps safely. All `unsafe` of the daemon is in here.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{FromRawFd as _, OwnedFd, RawFd},
};

pub mod clone;
mod group;
mod kvm;
mod lease;
mod lock;
mod packet;
mod readiness;
mod tun;

pub use group::{group_id, peer_groups};
pub use kvm::{CpuidAnswer, supported_cpuid};
pub use lease::has_writer;
pub use lock::{LockKind, could_lock, is_locked_here, lock_file, lock_file_within, lock_holder};
pub use packet::bind_packet;
pub use readiness::{watch, watch_changes};
pub use tun::attach_tap;

/// Takes a descriptor that the daemon has passed to this process ([`clone::Program::fds`]). To be called once for each number.
pub fn inherited(number: usize) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(number).map_err(io::Error::other)?;
    // SAFETY: F_SETFD takes an int and touches no memory; a descriptor that is not open gives an error.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, and the caller takes each number once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
