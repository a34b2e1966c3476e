//! Features and configuration space (virtio 1.3, 5.1.3 and 5.1.4).

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP,
};
use zerocopy::{Immutable, IntoBytes, little_endian::U16};

use crate::net::Offloads;

/// Size of a queue that carries packets.
pub(super) const QUEUE_SIZE: u16 = 256;
/// Size of the control queue.
pub(super) const CONTROL_SIZE: u16 = 64;

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
    pub(super) fn new(mac: [u8; 6], link_up: bool, announce: bool, pairs: u16, mtu: u16) -> Self {
        let bit = |set: bool, value: u32| if set { value } else { 0 };
        let status = bit(link_up, VIRTIO_NET_S_LINK_UP) | bit(announce, VIRTIO_NET_S_ANNOUNCE);
        Self {
            mac,
            status: u16::try_from(status).unwrap_or(0).into(),
            max_virtqueue_pairs: pairs.into(),
            mtu: mtu.into(),
        }
    }
}

/// Feature bits for each kind of offload: for packets that the driver sends, and for packets that
/// it receives.
const OFFLOADS: [(Offloads, u64, u64); 5] = [
    (
        Offloads::CHECKSUM,
        1 << VIRTIO_NET_F_CSUM,
        1 << VIRTIO_NET_F_GUEST_CSUM,
    ),
    (
        Offloads::TSO4,
        1 << VIRTIO_NET_F_HOST_TSO4,
        1 << VIRTIO_NET_F_GUEST_TSO4,
    ),
    (
        Offloads::TSO6,
        1 << VIRTIO_NET_F_HOST_TSO6,
        1 << VIRTIO_NET_F_GUEST_TSO6,
    ),
    (
        Offloads::TSO_ECN,
        1 << VIRTIO_NET_F_HOST_ECN,
        1 << VIRTIO_NET_F_GUEST_ECN,
    ),
    (
        Offloads::USO,
        1 << VIRTIO_NET_F_HOST_USO,
        1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6,
    ),
];

/// Features of the control queue.
const CONTROL: u64 = 1 << VIRTIO_NET_F_CTRL_VQ
    | 1 << VIRTIO_NET_F_CTRL_RX
    | 1 << VIRTIO_NET_F_CTRL_RX_EXTRA
    | 1 << VIRTIO_NET_F_CTRL_VLAN
    | 1 << VIRTIO_NET_F_CTRL_MAC_ADDR
    | 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;

/// Feature bits on offer of an interface with that many `pairs` of queues, whose packets may be `offloads`.
pub(super) fn features(offloads: Offloads, merge: bool, control: bool, pairs: u16) -> u64 {
    let mut features = 1 << VIRTIO_NET_F_MTU | 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_STATUS;
    for (kind, host, guest) in OFFLOADS {
        if offloads.contains(kind) {
            features |= host | guest;
        }
    }
    if merge {
        features |= 1 << VIRTIO_NET_F_MRG_RXBUF;
    }
    if control {
        features |= CONTROL;
        if offloads.contains(Offloads::CHECKSUM) {
            features |= 1 << VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
        }
        if pairs > 1 {
            features |= 1 << VIRTIO_NET_F_MQ;
        }
    }
    features
}

/// The kinds among `offloads` that can be offered together: segments need checksums, and ECN segments.
pub(super) fn consistent(mut offloads: Offloads) -> Offloads {
    if !offloads.contains(Offloads::CHECKSUM) {
        return Offloads::empty();
    }
    if !offloads.intersects(Offloads::TSO4 | Offloads::TSO6) {
        offloads.remove(Offloads::TSO_ECN);
    }
    offloads
}

/// Returns the offloads of packets that the driver accepts. `features` are the accepted features,
/// or the driver's later choice. Without checksums, no other offload is possible (5.1.3.1).
pub(super) fn offloads(features: u64) -> Offloads {
    let accepted = OFFLOADS
        .into_iter()
        .filter(|(_, _, guest)| features & guest == *guest);
    consistent(accepted.fold(Offloads::empty(), |all, (kind, ..)| all | kind))
}

/// Bits that a driver may choose with VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET (5.1.6.5.6).
pub(super) fn guest_offload_bits() -> u64 {
    OFFLOADS.into_iter().fold(0, |all, (_, _, guest)| all | guest)
}
