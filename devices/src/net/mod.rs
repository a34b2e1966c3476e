//! Backends of network devices.

pub mod tap;
pub mod vhost;

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use vmm_base::{GuestMemory, sys::Iovecs};
use vmm_sys_util::eventfd::EventFd;

use crate::queue_state::QueueState;
pub use tap::{Tap, TapError};
pub use vhost::VhostNet;

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

/// One queue of a network interface's host side. It sends and receives Ethernet frames, each behind
/// a `virtio_net_hdr` of 12 bytes (virtio 1.3, 5.1.6), and never waits: an operation that would
/// wait fails with `WouldBlock`, and the descriptor becomes ready when the operation is possible.
pub trait NetBackend: Send + Sync + AsFd {
    /// Supported offloads, in both directions.
    fn capabilities(&self) -> Offloads;
    /// Receives one packet into `buffers`; gives its length with the header.
    fn receive(&self, buffers: &Iovecs) -> io::Result<usize>;
    /// Receives one packet into memory of the caller's.
    fn receive_into(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Sends `header`, which the beginning of the frame may follow, and `packet`.
    fn send(&self, header: &[u8], packet: &mut Iovecs) -> io::Result<()>;
    /// Sets what may be received unfinished from now on, for all queues of the interface: a part of
    /// [`capabilities`](Self::capabilities).
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
    /// Sets whether the host hands packets to this queue. Each queue is attached initially. After a
    /// queue was attached again, its descriptor must be watched again. Only for an interface with
    /// several queues.
    fn set_attached(&self, attached: bool) -> io::Result<()>;
}

/// Serves a pair of queues instead of the device's worker: the kernel.
pub trait PairServer: Send {
    /// Starts serving the receive and the transmit queue (in this order) with packets of `tap`;
    /// `features` are the features accepted by the driver. After an error no queue is served.
    fn start(
        &mut self,
        memory: &GuestMemory,
        features: u64,
        rings: [ServedRing<'_>; 2],
        tap: BorrowedFd<'_>,
    ) -> io::Result<()>;
    /// Interrupts for one of the rings go there from now on.
    fn set_call(&mut self, ring: u32, call: &EventFd) -> io::Result<()>;
    /// Finishes the work under way and stops serving. Returns the index of the next available entry
    /// of each ring.
    fn stop(&mut self) -> io::Result<[u16; 2]>;
}

/// A ring as [`PairServer`] gets it.
#[derive(Clone, Copy)]
pub struct ServedRing<'a> {
    /// Where it is, and from where on it is to be served.
    pub state: &'a QueueState,
    /// Signalled by the driver's notifications.
    pub kick: &'a EventFd,
    /// To be signalled for an interrupt.
    pub call: &'a EventFd,
    /// To be signalled when the ring makes no sense.
    pub error: &'a EventFd,
}
