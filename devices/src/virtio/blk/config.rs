//! The configuration space and the features (virtio 1.3, 5.2.3 and 5.2.4).

use block::{Geometry, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use zerocopy::{
    Immutable, IntoBytes,
    little_endian::{U16, U32, U64},
};

use super::{
    plan::Limits,
    request::{MAX_DISCARD_SECTORS, MAX_RANGES, MAX_WRITE_ZEROES_SECTORS, SEG_MAX},
};

/// Size of each queue.
pub(super) const QUEUE_SIZE: u16 = 256;

/// Longest buffer in bytes. Drivers then make requests of up to [`SEG_MAX`] times that, which needs no more: a buffer is
/// contiguous guest memory.
const SIZE_MAX: u32 = 16 << 20;
/// The same for a machine with a BIOS. SeaBIOS (`src/hw/virtio-blk.c` of 1.16) keeps the number of blocks in the product in 16
/// bits, and would make requests without data if these bits were zero.
const BIOS_SIZE_MAX: u32 = SIZE_MAX - 512;
const _: () = assert!(BIOS_SIZE_MAX / 512 * SEG_MAX % (1 << 16) >= 64);

/// `struct virtio_blk_config` up to `unused1`.
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
    /// 1: writes may be cached until a flush. Not on offer for change (CONFIG_WCE).
    writeback: u8,
    unused0: u8,
    num_queues: U16,
    /// In sectors, like the others of these.
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

impl Config {
    /// Configuration of a disk with these limits, without the capacity.
    pub(super) fn new(limits: &Limits, geometry: &Geometry, queues: u16) -> Self {
        let block = limits.block;
        let blocks = |bytes: u32| bytes.checked_div(block).unwrap_or(0);
        let physical = blocks(geometry.physical_block).max(1);
        let (discard, zeroes) = (limits.discard, !limits.read_only);
        let granularity = geometry.discard_granularity.unwrap_or(0).max(block);
        let sectors = |bytes: u32| u32::try_from(u64::from(bytes).wrapping_div(SECTOR)).unwrap_or(0);
        let when = |offered: bool, value: u32| U32::new(if offered { value } else { 0 });
        let ranges = u32::try_from(MAX_RANGES).unwrap_or(1);
        Self {
            capacity: 0.into(),
            size_max: SIZE_MAX.into(),
            seg_max: SEG_MAX.into(),
            cylinders: 0.into(),
            heads: 0,
            sectors: 0,
            blk_size: block.into(),
            physical_block_exp: u8::try_from(physical.ilog2()).unwrap_or(0),
            alignment_offset: 0,
            min_io_size: u16::try_from(physical).unwrap_or(u16::MAX).into(),
            opt_io_size: blocks(geometry.optimal_io).into(),
            writeback: 1,
            unused0: 0,
            num_queues: queues.into(),
            max_discard_sectors: when(discard, MAX_DISCARD_SECTORS),
            max_discard_seg: when(discard, ranges),
            discard_sector_alignment: when(discard, sectors(granularity)),
            max_write_zeroes_sectors: when(zeroes, MAX_WRITE_ZEROES_SECTORS),
            max_write_zeroes_seg: when(zeroes, ranges),
            write_zeroes_may_unmap: u8::from(discard),
            unused1: [0; 3],
        }
    }

    /// The same for a machine with a BIOS.
    pub(super) fn with_bios(mut self) -> Self {
        self.size_max = BIOS_SIZE_MAX.into();
        self
    }

    /// The same with that capacity in bytes.
    pub(super) fn with_capacity(mut self, capacity: u64) -> Self {
        self.capacity = capacity.wrapping_div(SECTOR).into();
        self
    }
}

/// The feature bits on offer.
pub(super) fn features(limits: &Limits, queues: u16) -> u64 {
    let mut features = 1 << VIRTIO_BLK_F_SIZE_MAX
        | 1 << VIRTIO_BLK_F_SEG_MAX
        | 1 << VIRTIO_BLK_F_BLK_SIZE
        | 1 << VIRTIO_BLK_F_TOPOLOGY
        | 1 << VIRTIO_BLK_F_FLUSH;
    if queues > 1 {
        features |= 1 << VIRTIO_BLK_F_MQ;
    }
    if limits.read_only {
        features |= 1 << VIRTIO_BLK_F_RO;
    } else {
        features |= 1 << VIRTIO_BLK_F_WRITE_ZEROES;
    }
    if limits.discard {
        features |= 1 << VIRTIO_BLK_F_DISCARD;
    }
    features
}
