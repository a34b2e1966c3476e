//! What a network device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Since the device was made. Bytes are those of Ethernet frames.
#[derive(Debug, Default)]
pub struct NetStats {
    /// Given to the guest.
    pub received: AtomicU64,
    /// Given to the guest.
    pub received_bytes: AtomicU64,
    /// Lost because they did not fit into the guest's buffers, or the host failed to hand them over.
    pub receive_dropped: AtomicU64,
    /// Given to the host.
    pub sent: AtomicU64,
    /// Given to the host.
    pub sent_bytes: AtomicU64,
    /// Not given to the host: the guest's header made no sense, or the host refused.
    pub send_dropped: AtomicU64,
}

impl NetStats {
    pub(super) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }
}
