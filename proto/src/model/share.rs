//! Directories of the node that are shared with guests (virtio-fs).

/// Most shares of a VM.
pub const MAX_SHARES: usize = 16;
/// Longest tag in bytes (virtio 1.3, 5.11.4).
pub const MAX_TAG: usize = 36;
