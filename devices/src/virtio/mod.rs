//! Virtio 1.3: the common parts of all devices.
//!
//! A device has two halves. Its *front* ([`device::VirtioDevice`]) sits behind the transport and
//! runs on vCPU threads: identity, features, configuration space. Its *back*
//! ([`device::QueueHandler`]) takes requests from queues. A worker thread owns the back
//! exclusively. The [`worker`] framework runs the backs under control of the transport: DRIVER_OK
//! starts them, a reset or a pause stops them.

pub mod balloon;
pub mod blk;
pub mod chain;
pub mod channels;
pub mod console;
pub mod device;
pub mod fault;
pub mod fs;
pub mod gpu;
pub mod input;
pub mod net;
pub mod queue;
pub mod rate;
pub mod rng;
pub mod session;
pub mod signals;
mod stream;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod transport;
pub mod vsock;
pub(crate) mod worker;

#[cfg(test)]
mod tests;
