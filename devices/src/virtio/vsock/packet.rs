//! Packets between the driver and the device (virtio 1.3, 5.10.6).

use zerocopy::{
    FromBytes, Immutable, IntoBytes,
    little_endian::{U16, U32, U64},
};

/// Length of a [`Header`] in bytes.
pub(super) const HEADER: u32 = 44;

/// CID of the host (5.10.4.1).
pub(super) const HOST_CID: u64 = 2;

/// VIRTIO_VSOCK_TYPE_STREAM (5.10.6).
pub(super) const STREAM: u16 = 1;

/// Operations (5.10.6).
pub(super) mod op {
    pub(in super::super) const REQUEST: u16 = 1;
    pub(in super::super) const RESPONSE: u16 = 2;
    pub(in super::super) const RST: u16 = 3;
    pub(in super::super) const SHUTDOWN: u16 = 4;
    pub(in super::super) const RW: u16 = 5;
    pub(in super::super) const CREDIT_UPDATE: u16 = 6;
    pub(in super::super) const CREDIT_REQUEST: u16 = 7;
}

/// Flags of SHUTDOWN (5.10.6.6): the sender will receive no more data.
pub(super) const NO_RECEIVE: u32 = 1;
/// The sender will send no more data.
pub(super) const NO_SEND: u32 = 2;
/// Both.
pub(super) const NO_MORE: u32 = NO_RECEIVE | NO_SEND;

/// VIRTIO_VSOCK_EVENT_TRANSPORT_RESET (5.10.6.7): `struct virtio_vsock_event`.
pub(super) const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// `struct virtio_vsock_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Header {
    pub src_cid: U64,
    pub dst_cid: U64,
    pub src_port: U32,
    pub dst_port: U32,
    /// Bytes of data that follow.
    pub len: U32,
    /// Type of the socket.
    pub kind: U16,
    pub op: U16,
    pub flags: U32,
    /// Size of the sender's buffer for the connection.
    pub buf_alloc: U32,
    /// Bytes that the sender's buffer has passed on since the connection began; wraps.
    pub fwd_cnt: U32,
}

/// Ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub host: u32,
    pub guest: u32,
}

impl Header {
    /// A packet to the guest without data, of a connection that does not exist.
    pub(super) fn reset(guest_cid: u64, ports: Ports) -> Self {
        Self {
            src_cid: HOST_CID.into(),
            dst_cid: guest_cid.into(),
            src_port: ports.host.into(),
            dst_port: ports.guest.into(),
            kind: STREAM.into(),
            op: op::RST.into(),
            ..Self::default()
        }
    }

    /// The answer to a packet of the guest that is refused.
    pub(super) fn refusal(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            kind: self.kind,
            ..Self::reset(self.src_cid.get(), self.ports())
        }
    }

    /// Ports of a packet from the guest.
    pub(super) fn ports(&self) -> Ports {
        Ports {
            host: self.dst_port.get(),
            guest: self.src_port.get(),
        }
    }
}
