//! How the host likes an image to be used.

use rustix::fs::{FallocateFlags, fallocate};
use vmm_base::sys::{blockdev, file};

use super::{
    image::Geometry,
    target::{Kind, Target, unsupported},
};

/// Taken where the host says nothing, or nothing of use: the page size, and nearly every file system's block.
const USUAL_BLOCK: u32 = 4096;

/// Largest plausible block size: no disk or local file system has larger blocks. Network file
/// systems report their transfer sizes as blocks.
const MAX_BLOCK: u32 = 64 << 10;

/// Larger ones are of no use to a guest, which splits its requests below that.
const MAX_OPTIMAL_IO: u32 = 16 << 20;

/// Returns the geometry of `target`. A read-only image supports no discards. `discard` is the
/// discard granularity in bytes that the queue of a block device reports; 0 means that discards are
/// not supported.
pub(super) fn of(target: &Target, read_only: bool, discard: Option<u32>) -> Geometry {
    let (physical, optimal) = match target.kind {
        Kind::File => {
            let blocks = file::status(&target.file).ok().map(|status| status.block);
            match blocks.filter(|size| size.is_power_of_two()) {
                Some(size) if size <= MAX_BLOCK => (size, 0),
                Some(size) => (USUAL_BLOCK, size),
                None => (USUAL_BLOCK, 0),
            }
        }
        Kind::BlockDevice { .. } => (
            blockdev::physical_block(&target.file).unwrap_or(USUAL_BLOCK),
            blockdev::optimal_io(&target.file).unwrap_or(0),
        ),
    };
    let physical_block = block(physical).max(block(target.alignment().offset.max(512)));
    let optimal_io = if optimal.is_power_of_two() && (physical_block..=MAX_OPTIMAL_IO).contains(&optimal) {
        optimal
    } else {
        0
    };
    Geometry {
        physical_block,
        optimal_io,
        discard_granularity: discard_granularity(target, physical_block, discard).filter(|_| !read_only),
    }
}

/// A believable block size.
fn block(size: u32) -> u32 {
    if size.is_power_of_two() && (512..=MAX_BLOCK).contains(&size) {
        size
    } else {
        USUAL_BLOCK
    }
}

fn discard_granularity(target: &Target, physical_block: u32, queue: Option<u32>) -> Option<u32> {
    match target.kind {
        Kind::File => {
            // A hole beyond the end of the file changes nothing, but the result shows whether the
            // file system supports hole punching.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let behind = target.capacity().checked_next_multiple_of(MAX_BLOCK.into())?;
            match fallocate(&target.file, flags, behind, physical_block.into()).map_err(Into::into) {
                Err(error) if unsupported(&error) => None,
                _ => Some(physical_block),
            }
        }
        Kind::BlockDevice { .. } => match queue {
            Some(0) => None,
            Some(size) => Some(block(size).max(physical_block)),
            // Discards that the device has not are taken and do nothing.
            None => Some(physical_block),
        },
    }
}
