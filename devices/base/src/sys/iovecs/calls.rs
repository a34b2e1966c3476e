//! Calls of the kernel with a list.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use super::{EMPTY, Iovecs};

impl Iovecs {
    fn call_window(&self) -> (*const libc::iovec, libc::c_int) {
        let (entries, count) = self.window();
        (entries, libc::c_int::try_from(count).unwrap_or(0))
    }

    /// Fills the list from `file` at byte `offset`, wholly. Uses the list up.
    ///
    /// Ends with `UnexpectedEof` where the file does.
    pub fn read_exact_at(&mut self, file: impl AsFd, offset: u64) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        self.transfer(
            offset,
            io::ErrorKind::UnexpectedEof,
            |(entries, count), offset| {
                // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant);
                // nothing in Rust holds references into guest memory, so that the kernel may write to it.
                unsafe { libc::preadv(fd, entries, count, offset) }
            },
        )
    }

    /// Fills the front of the list from `file` at byte `offset`, as far as the page cache has it, and takes that off the
    /// list (RWF_NOWAIT). Returns how many bytes; fails with EAGAIN when there are none, and with EOPNOTSUPP where the file
    /// system does not know.
    pub fn read_cached_at(&mut self, file: impl AsFd, offset: u64) -> io::Result<usize> {
        let fd = file.as_fd().as_raw_fd();
        let offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (entries, count) = self.call_window();
        // SAFETY: as in `read_exact_at`.
        let done = checked(|| unsafe { libc::preadv2(fd, entries, count, offset, libc::RWF_NOWAIT) })?;
        self.skip(done);
        Ok(done)
    }

    /// Writes the list to `file` at byte `offset`, wholly; with `stable` it is on stable storage on return
    /// (RWF_DSYNC). Uses the list up.
    pub fn write_all_at(&mut self, file: impl AsFd, offset: u64, stable: bool) -> io::Result<()> {
        let fd = file.as_fd().as_raw_fd();
        let flags = if stable { libc::RWF_DSYNC } else { 0 };
        self.transfer(offset, io::ErrorKind::WriteZero, |(entries, count), offset| {
            // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant),
            // which the kernel only reads.
            unsafe { libc::pwritev2(fd, entries, count, offset, flags) }
        })
    }

    /// Calls until all is done; `call` is one preadv or pwritev.
    fn transfer(
        &mut self,
        offset: u64,
        at_end: io::ErrorKind,
        call: impl Fn((*const libc::iovec, libc::c_int), libc::off_t) -> libc::ssize_t,
    ) -> io::Result<()> {
        let mut offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        while !self.is_empty() {
            match checked(|| call(self.call_window(), offset))? {
                0 => return Err(at_end.into()),
                done => {
                    self.skip(done);
                    let done = libc::off_t::try_from(done)
                        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
                    offset = offset
                        .checked_add(done)
                        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
                }
            }
        }
        Ok(())
    }

    /// Receives one packet into the list (one readv); returns its length. A longer packet is
    /// truncated.
    pub fn receive(&self, socket: impl AsFd) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        let (entries, count) = self.call_window();
        // SAFETY: `entries` are `count` entries that point into mapped guest memory (see the type's invariant);
        // nothing in Rust holds references into guest memory, so that the kernel may write to it.
        checked(|| unsafe { libc::readv(fd, entries, count) })
    }

    /// Sends `header` and the list as one packet (one writev).
    pub fn send(&mut self, socket: impl AsFd, header: &[u8]) -> io::Result<usize> {
        let fd = socket.as_fd().as_raw_fd();
        if !self.fits_one_call() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if let Some(first) = self.entries.first_mut() {
            *first = libc::iovec {
                iov_base: header.as_ptr().cast_mut().cast(),
                iov_len: header.len(),
            };
        }
        let count = libc::c_int::try_from(self.entries.len()).unwrap_or(0);
        let entries = self.entries.as_ptr();
        // SAFETY: `entries` are `count` entries: the first is `header`, the others point into mapped guest memory
        // (see the type's invariant); the kernel only reads them.
        let sent = checked(|| unsafe { libc::writev(fd, entries, count) });
        if let Some(first) = self.entries.first_mut() {
            *first = EMPTY;
        }
        sent
    }
}

/// Result of a system call, which is repeated when a signal interrupted it.
fn checked(call: impl Fn() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
