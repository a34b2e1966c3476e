//! Reads the disk in an image that nobody writes to.

use std::{io, ops::Range};

use imago::Mapping;

use super::{Disk, advance, bytes, shared};

/// Data is handed on in pieces of at most this size in bytes.
const PIECE: u64 = 1 << 20;

impl Disk {
    /// Fills `data` from `offset` on, all of which lies within the disk.
    pub(in crate::block::qcow2) fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let end = advance(offset, data.len() as u64)?;
        if end > self.capacity() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        shared(&self.access).read(data, offset)
    }

    /// Calls `take` with each piece of data within `range` and its offset, in the order of the disk; what reads as zeroes because nothing
    /// was written to it is left out.
    pub(in crate::block::qcow2) fn each_data(
        &self,
        range: Range<u64>,
        take: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let access = shared(&self.access);
        let end = range.end.min(self.capacity());
        let mut buffer = Vec::new();
        let mut offset = range.start;
        while offset < end {
            let left = end.saturating_sub(offset);
            let (mapping, run) = access.get_mapping(offset, left)?;
            let length = match mapping {
                Mapping::Zero { .. } => run,
                Mapping::Raw { .. } | Mapping::Special { .. } => {
                    let length = run.min(PIECE);
                    if let Mapping::Raw {
                        storage, offset: at, ..
                    } = mapping
                    {
                        // The last cluster of a file may be written in part.
                        let most = storage.base().medium.size()?.saturating_add(self.cluster);
                        if at.saturating_add(length) >= most {
                            return Err(io::ErrorKind::UnexpectedEof.into());
                        }
                    }
                    buffer.resize(bytes(length), 0);
                    access.read(buffer.as_mut_slice(), offset)?;
                    take(offset, &buffer)?;
                    length
                }
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            };
            // A mapping of nothing would never end.
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            offset = advance(offset, length)?;
        }
        Ok(())
    }
}
