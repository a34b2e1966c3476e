//! The header before each packet (virtio 1.3, 5.1.6), and which ones are let through in either direction.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_USO, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, little_endian::U16};

use crate::{net::Offloads, virtio::rate::Cost};

/// Length of [`Header`] in bytes.
pub(super) const HEADER: u32 = 12;

/// Where [`Header::num_buffers`] is.
pub(super) const NUM_BUFFERS: u32 = 10;

/// Shortest frame: an Ethernet header.
const MIN_FRAME: u32 = 14;

/// Longest frame: 64 KiB of IP behind an Ethernet header with a VLAN tag.
pub(super) const MAX_FRAME: u32 = 65_536 + 18;

/// `struct virtio_net_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Header {
    pub flags: u8,
    pub gso_type: u8,
    /// Length of all protocol headers, a hint.
    pub hdr_len: U16,
    pub gso_size: U16,
    /// From the frame's beginning.
    pub csum_start: U16,
    /// From `csum_start`.
    pub csum_offset: U16,
    pub num_buffers: U16,
}

impl Header {
    /// Returns the cost of a frame of `length` bytes for a rate limiter: each segment counts as a
    /// packet.
    pub(super) fn cost(&self, length: u32) -> Cost {
        let size = u32::from(self.gso_size.get());
        let segments = match self.gso_type {
            0 => 1,
            _ => length.checked_div(size).unwrap_or(1).max(1),
        };
        Cost {
            bytes: length.into(),
            operations: segments.into(),
        }
    }
}

/// Reason why a packet is not sent.
pub(super) type Refusal = &'static str;

/// Checks a driver's header of a frame of `length` bytes against the accepted features. Returns the
/// header for the host, which contains only checked fields.
pub(super) fn check(header: &Header, length: u32, features: u64) -> Result<Header, Refusal> {
    let has = |bit: u32| features & 1 << bit != 0;
    if !(MIN_FRAME..=MAX_FRAME).contains(&length) {
        return Err("a frame's length is out of range");
    }
    let mut checked = Header::default();
    if header.flags & flag(VIRTIO_NET_HDR_F_NEEDS_CSUM) != 0 {
        let (start, offset) = (
            u32::from(header.csum_start.get()),
            u32::from(header.csum_offset.get()),
        );
        // Both are 16 bits wide. The checksum has two bytes.
        if !has(VIRTIO_NET_F_CSUM) || start.saturating_add(offset).saturating_add(2) > length {
            return Err("the offset of the checksum is outside the packet");
        }
        checked.flags = flag(VIRTIO_NET_HDR_F_NEEDS_CSUM);
        checked.csum_start = header.csum_start;
        checked.csum_offset = header.csum_offset;
    }
    let ecn = header.gso_type & flag(VIRTIO_NET_HDR_GSO_ECN) != 0;
    let feature = match u32::from(header.gso_type & !flag(VIRTIO_NET_HDR_GSO_ECN)) {
        VIRTIO_NET_HDR_GSO_NONE if !ecn => return Ok(checked),
        VIRTIO_NET_HDR_GSO_TCPV4 => VIRTIO_NET_F_HOST_TSO4,
        VIRTIO_NET_HDR_GSO_TCPV6 => VIRTIO_NET_F_HOST_TSO6,
        VIRTIO_NET_HDR_GSO_UDP_L4 if !ecn => VIRTIO_NET_F_HOST_USO,
        _ => return Err("segmentation of a kind that is not on offer"),
    };
    if !has(feature) || ecn && !has(VIRTIO_NET_F_HOST_ECN) {
        return Err("segmentation of a kind that was not negotiated");
    }
    // 5.1.6.2.1: a driver asks for the checksum too.
    if checked.flags == 0 || header.gso_size.get() == 0 {
        return Err("segmentation without a checksum or size");
    }
    checked.gso_type = header.gso_type;
    checked.gso_size = header.gso_size;
    if u32::from(header.hdr_len.get()) <= length {
        checked.hdr_len = header.hdr_len;
    }
    Ok(checked)
}

/// The host's `header` as a driver gets it that takes `offloads` unfinished (5.1.6.4.1); `None` when the packet is not for it:
/// one that waited in the host since another driver was there, which took more.
pub(super) fn for_driver(header: &Header, offloads: Offloads) -> Option<Header> {
    let ecn = header.gso_type & flag(VIRTIO_NET_HDR_GSO_ECN) != 0;
    let kind = match u32::from(header.gso_type & !flag(VIRTIO_NET_HDR_GSO_ECN)) {
        VIRTIO_NET_HDR_GSO_NONE => Offloads::empty(),
        VIRTIO_NET_HDR_GSO_TCPV4 => Offloads::TSO4,
        VIRTIO_NET_HDR_GSO_TCPV6 => Offloads::TSO6,
        VIRTIO_NET_HDR_GSO_UDP_L4 => Offloads::USO,
        _ => return None,
    };
    if !offloads.contains(kind) || ecn && !offloads.contains(Offloads::TSO_ECN) {
        return None;
    }
    if offloads.contains(Offloads::CHECKSUM) {
        return Some(*header);
    }
    if header.flags & flag(VIRTIO_NET_HDR_F_NEEDS_CSUM) != 0 {
        return None;
    }
    // A driver that requires checksums gets no information about them.
    Some(Header {
        flags: 0,
        csum_start: 0.into(),
        csum_offset: 0.into(),
        ..*header
    })
}

/// Converts a constant from 32 bits in the bindings to the header's byte.
fn flag(value: u32) -> u8 {
    u8::try_from(value).unwrap_or(0)
}
