//! The configuration space (virtio 1.3, 5.2.4).

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
};
use zerocopy::{
    Immutable, IntoBytes,
    little_endian::{U16, U32, U64},
};

use crate::block::SECTOR;

/// Sizes of the queues.
pub(super) const QUEUE_SIZES: [u16; 1] = [256];

/// Data buffers in one request: a whole queue's, less header and status (5.2.5).
const SEG_MAX: u32 = 254;

/// Physical blocks of 2³ logical ones, 4 KiB: what host file systems and page caches work with.
const PHYSICAL_BLOCK_EXP: u8 = 3;

/// `struct virtio_blk_config` up to `num_queues`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Config {
    /// In sectors.
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    cylinders: U16,
    heads: u8,
    sectors: u8,
    /// Logical block in bytes.
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    /// In logical blocks.
    min_io_size: U16,
    /// In logical blocks; 0 says nothing.
    opt_io_size: U32,
    writeback: u8,
    unused: u8,
    num_queues: U16,
}

impl Config {
    /// Of a disk with `capacity` bytes.
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity: capacity.wrapping_div(SECTOR).into(),
            size_max: 0.into(),
            seg_max: SEG_MAX.into(),
            cylinders: 0.into(),
            heads: 0,
            sectors: 0,
            blk_size: 512.into(),
            physical_block_exp: PHYSICAL_BLOCK_EXP,
            alignment_offset: 0,
            min_io_size: (1_u16 << PHYSICAL_BLOCK_EXP).into(),
            opt_io_size: 0.into(),
            writeback: 0,
            unused: 0,
            num_queues: 1.into(),
        }
    }
}

/// The feature bits on offer (5.2.3).
pub(super) fn features(read_only: bool) -> u64 {
    let mut features = 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_FLUSH;
    if read_only {
        features |= 1 << VIRTIO_BLK_F_RO;
    }
    features
}
