//! Reads of the disk in an image without writers.

use std::io;

use super::{Disk, advance, shared};

impl Disk {
    /// Fills `data` from `offset` on, all of which lies within the disk.
    pub(in crate::qcow2) fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let end = advance(offset, data.len() as u64)?;
        if end > self.capacity() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        shared(&self.access).read(data, offset)
    }
}
