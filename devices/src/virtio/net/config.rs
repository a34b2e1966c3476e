//! Features and configuration space (virtio 1.3, 5.1.3 and 5.1.4).

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};
use zerocopy::{Immutable, IntoBytes, little_endian::U16};

use crate::net::Offloads;

/// The queue of buffers for what the guest receives.
pub(super) const RECEIVE: u16 = 0;
/// The queue of what the guest sends.
pub(super) const TRANSMIT: u16 = 1;

/// Sizes of the queues.
pub(super) const QUEUE_SIZES: [u16; 2] = [256, 256];

/// Feature bits on offer.
pub(super) const FEATURES: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_STATUS;

/// `struct virtio_net_config` up to `mtu`.
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Config {
    mac: [u8; 6],
    status: U16,
    max_virtqueue_pairs: U16,
    mtu: U16,
}

impl Config {
    /// With the link up.
    pub(super) fn new(mac: [u8; 6], mtu: u16) -> Self {
        let status = u16::try_from(VIRTIO_NET_S_LINK_UP).unwrap_or(1);
        Self {
            mac,
            status: status.into(),
            max_virtqueue_pairs: 1.into(),
            mtu: mtu.into(),
        }
    }
}

/// What the driver takes unfinished, of the features it accepted. Without checksums nothing (5.1.3.1).
pub(super) fn offloads(features: u64) -> Offloads {
    let has = |bit: u32| features & 1 << bit != 0;
    let mut offloads = Offloads::empty();
    if has(VIRTIO_NET_F_GUEST_CSUM) {
        offloads |= Offloads::CHECKSUM;
        offloads.set(Offloads::TSO4, has(VIRTIO_NET_F_GUEST_TSO4));
        offloads.set(Offloads::TSO6, has(VIRTIO_NET_F_GUEST_TSO6));
        let any = offloads.intersects(Offloads::TSO4 | Offloads::TSO6);
        offloads.set(Offloads::TSO_ECN, any && has(VIRTIO_NET_F_GUEST_ECN));
    }
    offloads
}
