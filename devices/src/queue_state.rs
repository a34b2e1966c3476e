//! Where a virtqueue is. The transport, the workers and the backends in the kernel exchange it.

/// Where a queue is and how far it has been worked off: all there is to know about it while no worker runs. Plain data;
/// untrusted until a queue has checked it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// The queue's number in its device.
    pub index: u16,
    /// Number of descriptors.
    pub size: u16,
    /// Guest-physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest-physical address of the available ring ("driver area").
    pub avail_ring: u64,
    /// Guest-physical address of the used ring ("device area").
    pub used_ring: u64,
    /// Free-running index of the next available entry to take.
    pub next_avail: u16,
    /// Free-running index of the next used entry to fill.
    pub next_used: u16,
}
