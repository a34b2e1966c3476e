//! Leases (fcntl(2), "Leases"), for finding out whether somebody can write to a file.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Whether any process has the file open for writing, or has a writable mapping of it: the kernel
/// grants a read lease only without writers. `file` is open for reading only, and no process can
/// open the file for writing meanwhile. `None` on a file system without leases.
pub fn has_writer(file: impl AsFd) -> io::Result<Option<bool>> {
    match set_lease(&file, libc::F_RDLCK) {
        Ok(()) => {
            set_lease(&file, libc::F_UNLCK)?;
            Ok(Some(false))
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Some(true)),
            Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        },
    }
}

fn set_lease(file: impl AsFd, kind: libc::c_int) -> io::Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: takes numbers only; the descriptor is open for as long as `file` is borrowed.
    let result = unsafe { libc::fcntl(fd, libc::F_SETLEASE, kind) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_writer_is_seen_until_its_descriptor_is_closed_also_a_copy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let writer = File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        let copy = writer.try_clone().unwrap();
        for open in [writer, copy] {
            assert_eq!(has_writer(&reader).unwrap(), Some(true));
            drop(open);
        }
        assert_eq!(has_writer(&reader).unwrap(), Some(false));
        // The lease is gone.
        let _writer = File::options().write(true).open(&path).unwrap();
        assert_eq!(has_writer(&reader).unwrap(), Some(true));
    }
}
