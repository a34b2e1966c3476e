//! One reader of a port's output: a position in the history, and the descriptor that it is written to.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use super::history::{History, notice};

/// A non-blocking descriptor that follows the output.
#[derive(Debug)]
pub(super) struct Output {
    fd: Arc<OwnedFd>,
    position: u64,
    /// Taken out of the history and not yet written, from `written` on.
    pending: Vec<u8>,
    written: usize,
    /// The last write did not say that it would block.
    pub writable: bool,
}

impl Output {
    /// Writes `first`, then the output from `position` on.
    pub fn new(fd: Arc<OwnedFd>, first: Vec<u8>, position: u64) -> Self {
        Self {
            fd,
            position,
            pending: first,
            written: 0,
            writable: true,
        }
    }

    /// Descriptor that receives the output.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Bytes that were taken out of the history and that the descriptor has not taken yet.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Writes the output before `until`, as far as the descriptor takes it. Newer output waits for
    /// the next call: it would be written byte by byte. An error means that the reader is gone.
    pub fn pump(&mut self, history: &History, scratch: &mut [u8], until: u64) -> io::Result<()> {
        while self.writable {
            let pending = self.pending.get(self.written..).unwrap_or_default();
            if !pending.is_empty() {
                let count = write(&self.fd, pending)?;
                self.writable = count > 0;
                self.written = self.written.saturating_add(count);
                continue;
            }
            self.pending = Vec::new();
            self.written = 0;
            if self.position >= until {
                return Ok(());
            }
            let read = history.read(&mut self.position, scratch);
            let text = scratch.get(..read.bytes).unwrap_or_default();
            if read.lost > 0 {
                self.pending = notice(read.lost);
                self.pending.extend_from_slice(text);
            } else if text.is_empty() {
                return Ok(());
            } else {
                let count = write(&self.fd, text)?;
                self.writable = count > 0;
                self.pending = text.get(count..).unwrap_or_default().to_owned();
            }
        }
        Ok(())
    }
}

/// One write of something; 0 when it would block.
fn write(fd: impl AsFd, text: &[u8]) -> io::Result<usize> {
    match rustix::io::retry_on_intr(|| rustix::io::write(&fd, text)) {
        Ok(0) => Err(io::ErrorKind::WriteZero.into()),
        Ok(count) => Ok(count),
        Err(rustix::io::Errno::AGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
