//! OFD locks (fcntl(2), "Open file description locks"): they belong to the open file, so that a lock which the
//! daemon takes stays with the `vmm` that the descriptor is passed to, for as long as that holds it.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Who may hold a lock beside us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Other readers.
    Shared,
    /// Nobody.
    Exclusive,
}

/// Locks the whole file without waiting; false when somebody else's lock is in the way. An exclusive lock needs a
/// descriptor that is open for writing.
pub fn lock_file(file: impl AsFd, kind: LockKind) -> io::Result<bool> {
    let lock_type = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    };
    // All of the file: start and length 0. `l_pid` must be 0 for OFD locks.
    let lock = libc::flock {
        l_type: i16::try_from(lock_type).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and F_OFD_SETLK reads one `flock`, which outlives the call.
    let result = unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_lock_stays_with_the_open_file_until_its_last_descriptor_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (first, second) = (open(), open());
        assert!(lock_file(&first, LockKind::Exclusive).unwrap());
        let passed_on = first.try_clone().unwrap();
        drop(first);
        assert!(!lock_file(&second, LockKind::Exclusive).unwrap());
        assert!(!lock_file(&second, LockKind::Shared).unwrap());
        drop(passed_on);
        assert!(lock_file(&second, LockKind::Exclusive).unwrap());
    }

    #[test]
    fn readers_share_and_keep_writers_out() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = || File::open(file.path()).unwrap();
        let (first, second) = (reader(), reader());
        assert!(lock_file(&first, LockKind::Shared).unwrap());
        assert!(lock_file(&second, LockKind::Shared).unwrap());
        let writer = File::options().write(true).open(file.path()).unwrap();
        assert!(!lock_file(&writer, LockKind::Exclusive).unwrap());
    }
}
