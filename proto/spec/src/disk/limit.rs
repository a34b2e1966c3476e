//! How much may flow.

use vmmd_api::v1;

use super::super::{Violations, name::Name, vm::name};

/// Least limit of bytes per second: below it one request of a page would wait for more than a second.
pub const MIN_BYTES_PER_SECOND: u64 = 4096;
/// Largest value in a limit: far above a disk's capability, far below an overflow of sums.
pub const MAX_RATE: u64 = 1 << 40;

/// How much may flow to and from a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// All that the node can do.
    #[default]
    None,
    /// A limit of its own.
    Own(RateLimit),
    /// That of a group of the VM.
    Group(Name),
}

/// Token buckets. 0 is no limit; a burst of 0 is what flows in 100 ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// 0 or [`MIN_BYTES_PER_SECOND`] to [`MAX_RATE`].
    pub bytes_per_second: u64,
    /// At most [`MAX_RATE`].
    pub operations_per_second: u64,
    /// Amount that may flow at once after a pause.
    pub burst_bytes: u64,
    /// See `burst_bytes`.
    pub burst_operations: u64,
}

/// A limit that several disks of a VM share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateGroup {
    /// Unique in the VM.
    pub name: Name,
    /// The limit.
    pub limit: RateLimit,
}

pub(super) fn of_disk(found: &mut Violations, field: &str, disk: &v1::DiskSpec) -> Limit {
    match (&disk.rate_limit, disk.rate_group.as_str()) {
        (None, "") => Limit::None,
        (Some(limit), "") => Limit::Own(RateLimit::new(found, &format!("{field}.rateLimit"), limit)),
        (None, group) => name(found, &format!("{field}.rateGroup"), group).map_or(Limit::None, Limit::Group),
        (Some(_), _) => {
            found.add(
                field,
                "give either `rateLimit` (of its own) or `rateGroup` (shared), not both",
            );
            Limit::None
        }
    }
}

impl RateLimit {
    /// Validates `limit`; `field` is its path.
    pub fn new(found: &mut Violations, field: &str, limit: &v1::RateLimit) -> Self {
        let bytes = limit.bytes_per_second;
        if bytes != 0 && !(MIN_BYTES_PER_SECOND..=MAX_RATE).contains(&bytes) {
            found.add(
                format_args!("{field}.bytesPerSecond"),
                format_args!("must be {MIN_BYTES_PER_SECOND} to {MAX_RATE}, or 0 for no limit, is {bytes}"),
            );
        }
        for (what, value) in [
            ("operationsPerSecond", limit.operations_per_second),
            ("burstBytes", limit.burst_bytes),
            ("burstOperations", limit.burst_operations),
        ] {
            if value > MAX_RATE {
                found.add(
                    format_args!("{field}.{what}"),
                    format_args!("must be at most {MAX_RATE}, is {value}"),
                );
            }
        }
        for (burst, value, rate, per_second) in [
            ("burstBytes", limit.burst_bytes, "bytesPerSecond", bytes),
            (
                "burstOperations",
                limit.burst_operations,
                "operationsPerSecond",
                limit.operations_per_second,
            ),
        ] {
            if value != 0 && per_second == 0 {
                found.add(
                    format_args!("{field}.{burst}"),
                    format_args!("needs `{rate}`: without that limit everything flows at once"),
                );
            }
        }
        Self {
            bytes_per_second: bytes,
            operations_per_second: limit.operations_per_second,
            burst_bytes: limit.burst_bytes,
            burst_operations: limit.burst_operations,
        }
    }
}

impl RateGroup {
    /// Validates `group`; `field` is its path.
    pub fn new(found: &mut Violations, field: &str, group: &v1::RateGroup) -> Option<Self> {
        let name = name(found, &format!("{field}.name"), &group.name);
        let limit = group.limit.unwrap_or_default();
        let limit = RateLimit::new(found, &format!("{field}.limit"), &limit);
        Some(Self { name: name?, limit })
    }
}
