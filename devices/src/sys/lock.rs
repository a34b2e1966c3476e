//! Locks that belong to an open file description (fcntl(2), "Open file description locks").

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// What others may still do with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Others may read it.
    Read,
    /// Nobody else may use it.
    Write,
}

/// Locks the whole file, without waiting; says whether that succeeded. The lock lasts until the last descriptor that
/// shares this open file description is closed, also in other processes.
pub fn try_lock(file: impl AsFd, kind: LockKind) -> io::Result<bool> {
    let kind = match kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
    };
    let lock = libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or_default(),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        // To the end of the file, however long it becomes.
        l_len: 0,
        // Has to be 0 for this kind of lock.
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads one `flock` through the pointer, which is valid for the duration of the call.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
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
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn one_writer_or_many_readers_by_open_file_not_by_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (a, b, c) = (open(), open(), open());
        assert!(try_lock(&a, LockKind::Read).unwrap());
        assert!(try_lock(&b, LockKind::Read).unwrap());
        assert!(!try_lock(&c, LockKind::Write).unwrap());
        drop((a, b));
        assert!(try_lock(&c, LockKind::Write).unwrap());
        let shared = c.try_clone().unwrap();
        drop(c);
        assert!(!try_lock(open(), LockKind::Read).unwrap());
        drop(shared);
        assert!(try_lock(open(), LockKind::Read).unwrap());
    }
}
