//! Features, queues and the configuration space (virtio 1.3, 5.5.2 to 5.5.4).

use zerocopy::{Immutable, IntoBytes, little_endian::U32};

/// Bytes that a page number stands for, independent of the guest's page size (5.5.6).
pub const PAGE: u64 = 4096;
/// The same as an exponent of two.
pub(super) const PAGE_SHIFT: u32 = PAGE.trailing_zeros();

/// VIRTIO_BALLOON_F_STATS_VQ: the driver reports memory statistics on request.
pub(super) const F_STATS_VQ: u32 = 1;
/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM: the driver takes pages back before its guest runs out of memory.
pub(super) const F_DEFLATE_ON_OOM: u32 = 2;
/// VIRTIO_BALLOON_F_PAGE_POISON: the driver reports the value that it fills free pages with.
pub(super) const F_PAGE_POISON: u32 = 4;
/// VIRTIO_BALLOON_F_PAGE_REPORTING: the driver reports free pages.
pub(super) const F_PAGE_REPORTING: u32 = 5;

/// Sizes of the queues, as QEMU has them: Linux puts up to 32 buffers into one report.
pub(super) const QUEUE_SIZES: [u16; 5] = [128; 5];
/// How many there are when nothing is reported.
pub(super) const QUEUES_WITHOUT_REPORTING: usize = 3;

/// Offset of `actual`.
pub(super) const ACTUAL: usize = 4;
/// Offset of `poison_val`.
pub(super) const POISON: usize = 12;

/// `struct virtio_balloon_config`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Config {
    /// Target size of the balloon, in pages.
    pub num_pages: U32,
    /// Size of the balloon according to the driver, in pages.
    pub actual: U32,
    /// Command of free page hints, which the device does not offer.
    pub free_page_hint_cmd_id: U32,
    /// Value that the driver fills free pages with.
    pub poison_val: U32,
}

/// The feature bits on offer.
pub(super) fn features(free_page_reporting: bool) -> u64 {
    let features = 1 << F_STATS_VQ | 1 << F_DEFLATE_ON_OOM;
    if free_page_reporting {
        features | 1 << F_PAGE_POISON | 1 << F_PAGE_REPORTING
    } else {
        features
    }
}

/// Purpose of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Inflate,
    Deflate,
    Stats,
    Report,
}

impl Role {
    /// Returns the role of the queue with the number `queue` if the driver accepted `features`.
    ///
    /// The specification numbers the queues independently of the accepted features (5.5.2:
    /// statistics are 2, hints 3, reports 4). Linux' drivers and QEMU number the queues in use
    /// without gaps: reports are on 3, because hints are off, and on 2 without statistics. No queue
    /// has two meanings, so the device serves both numberings.
    pub(super) fn of(queue: u16, features: u64) -> Option<Self> {
        let has = |bit: u32| features >> bit & 1 == 1;
        match queue {
            0 => Some(Self::Inflate),
            1 => Some(Self::Deflate),
            2 if has(F_STATS_VQ) => Some(Self::Stats),
            2..=4 if has(F_PAGE_REPORTING) => Some(Self::Report),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_what_linux_and_the_specification_take_it_for() {
        let (stats, report) = (1 << F_STATS_VQ, 1 << F_PAGE_REPORTING);
        for (features, roles) in [
            (0, [None, None, None]),
            (stats, [Some(Role::Stats), None, None]),
            (report, [Some(Role::Report); 3]),
            (
                stats | report,
                [Some(Role::Stats), Some(Role::Report), Some(Role::Report)],
            ),
        ] {
            assert_eq!(Role::of(0, features), Some(Role::Inflate));
            assert_eq!(Role::of(1, features), Some(Role::Deflate));
            assert_eq!([2, 3, 4].map(|queue| Role::of(queue, features)), roles);
            assert_eq!(Role::of(5, features), None);
        }
    }
}
