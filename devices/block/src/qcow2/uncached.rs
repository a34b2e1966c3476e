//! File of an image that bypasses the host's page cache (O_DIRECT), for tables and data alike.
//!
//! No access to the file uses the page cache: a block written both ways can lose one of the writes.
//! Therefore requests that are not whole blocks are bounced, as in a raw image. Changes of a part
//! of a block exclude each other, whether they come from this type or from a ring on the same
//! [`Target`].

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{FallocateFlags, fallocate};
use vmm_base::sys::{Iovecs, file};

use super::medium::Medium;
use crate::{direct::Bounce, engine::Operation, target::Target};

/// Number of buffers kept for later requests: one for each thread of the pool, and one for opening
/// or closing.
const KEPT: usize = 5;

/// See the module.
#[derive(Debug)]
pub(super) struct Uncached {
    target: Arc<Target>,
    /// Unused buffers.
    bounces: Mutex<Vec<Bounce>>,
}

impl Uncached {
    /// On a target that writes [extend](Target::extended_by_writes).
    pub(super) fn new(target: Arc<Target>) -> Self {
        Self {
            target,
            bounces: Mutex::default(),
        }
    }

    fn with_bounce<T>(&self, action: impl FnOnce(&mut Bounce) -> T) -> T {
        let mut bounce = self.bounces().pop().unwrap_or_default();
        let result = action(&mut bounce);
        let mut bounces = self.bounces();
        if bounces.len() < KEPT {
            bounces.push(bounce);
        }
        result
    }

    fn bounces(&self) -> MutexGuard<'_, Vec<Bounce>> {
        self.bounces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        self.with_bounce(|bounce| {
            let change = || self.target.write_zeroes(offset, length, unmap, bounce);
            self.target.alone(offset, length, change)
        })
    }

    fn request(&self, operation: Operation, buffers: &mut Iovecs) -> io::Result<()> {
        self.with_bounce(|bounce| self.target.execute(operation, buffers, bounce))
    }
}

impl Medium for Uncached {
    fn size(&self) -> io::Result<u64> {
        file::length(&self.target.file)
    }

    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let length = data.len() as u64;
        let mut rest = data;
        let to = |piece: &[u8]| {
            if let Some(now) = rest.split_off_mut(..piece.len()) {
                now.copy_from_slice(piece);
            }
        };
        self.with_bounce(|bounce| self.target.read(offset, length, bounce, to))
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let (length, mut rest) = (data.len() as u64, data);
        let from = |piece: &mut [u8]| {
            if let Some(now) = rest.split_off(..piece.len()) {
                piece.copy_from_slice(now);
            }
        };
        self.with_bounce(|bounce| {
            let change = || self.target.write(offset, length, false, bounce, from);
            self.target.alone(offset, length, change)
        })
    }

    fn read_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        match self.request(Operation::Read { offset }, buffers) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                buffers.zero();
                Ok(())
            }
            result => result,
        }
    }

    fn write_guest(&self, buffers: &mut Iovecs, offset: u64) -> io::Result<()> {
        let stable = false;
        self.request(Operation::Write { offset, stable }, buffers)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let length = self.size()?.saturating_sub(offset).min(length);
        self.zero(offset, length, true)
    }

    fn allocate_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero(offset, length, false)?;
        let end = offset.saturating_add(length);
        if self.size()? >= end {
            return Ok(());
        }
        // Extends to the end of a block, so that reads reach the bytes behind the range.
        let blocks = self.target.alignment().around(offset, length);
        let length = blocks.end.saturating_sub(offset);
        Ok(fallocate(
            &self.target.file,
            FallocateFlags::empty(),
            offset,
            length,
        )?)
    }

    fn sync(&self) -> io::Result<()> {
        self.target.file.sync_data()
    }
}
