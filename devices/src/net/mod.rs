//! What network devices are attached to.

pub mod tap;

use std::{io, os::fd::AsFd};

use crate::sys::Iovecs;
pub use tap::{Tap, TapError};

bitflags::bitflags! {
    /// Packets that a receiver takes unfinished, so that they need not be finished if they never leave the host.
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
    }
}

/// Sends and receives Ethernet frames, each behind a `virtio_net_hdr` of 12 bytes (virtio 1.3, 5.1.6), without ever
/// waiting: what can't be done now fails with `WouldBlock`, and the descriptor is ready when it can.
pub trait NetBackend: Send + AsFd {
    /// Receives one packet into `buffers`; gives its length with the header.
    fn receive(&self, buffers: &Iovecs) -> io::Result<usize>;
    /// The same into memory of the caller's.
    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Sends `header` and `packet`.
    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()>;
    /// Says what may be received unfinished from now on.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
}
