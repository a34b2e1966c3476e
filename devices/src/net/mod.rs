//! What network devices are attached to.

pub mod tap;

use std::{io, os::fd::AsFd};

use crate::sys::Iovecs;
pub use tap::{Tap, TapError};

bitflags::bitflags! {
    /// Kinds of packets that are handed over unfinished, so that they need not be finished if they never leave the host.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Offloads: u32 {
        /// Without a checksum. The others need it too.
        const CHECKSUM = 1;
        /// Larger than the MTU: TCP over IPv4.
        const TSO4 = 1 << 1;
        /// Larger than the MTU: TCP over IPv6.
        const TSO6 = 1 << 2;
        /// Such TCP segments with ECN.
        const TSO_ECN = 1 << 3;
        /// Larger than the MTU: UDP over IPv4 and IPv6, to be cut into datagrams.
        const USO = 1 << 4;
    }
}

/// One queue of a network interface's host side. It sends and receives Ethernet frames, each behind a `virtio_net_hdr` of
/// 12 bytes (virtio 1.3, 5.1.6), without ever waiting: what can't be done now fails with `WouldBlock`, and the descriptor is
/// ready when it can.
pub trait NetBackend: Send + Sync + AsFd {
    /// What may be handed over unfinished, in both directions.
    fn capabilities(&self) -> Offloads;
    /// Receives one packet into `buffers`; gives its length with the header.
    fn receive(&self, buffers: &Iovecs) -> io::Result<usize>;
    /// Receives one packet into memory of the caller's.
    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Sends `header` and `packet`.
    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()>;
    /// Sets what may be received unfinished from now on, for all queues of the interface: a part of
    /// [`capabilities`](Self::capabilities).
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
    /// Whether the host hands packets to this queue. Each queue is attached at first. The descriptor of a queue that was
    /// attached again has to be watched anew. Only for an interface with several queues.
    fn set_attached(&self, attached: bool) -> io::Result<()>;
}
