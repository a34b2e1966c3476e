//! Virtio 1.3: the common parts of all devices.
//!
//! A device has two halves. Its *front* ([`device::VirtioDevice`]) sits behind the transport and
//! runs on vCPU threads: identity, features, configuration space. Its *back*
//! ([`device::QueueHandler`]) takes requests from queues. A worker thread owns the back
//! exclusively. The [`worker`] framework runs the backs under control of the transport: DRIVER_OK
//! starts them, a reset or a pause stops them.

mod ahead;
pub mod balloon;
mod bell;
pub mod blk;
pub mod chain;
pub mod console;
mod descriptor;
pub mod device;
pub mod fault;
pub mod fs;
mod gauge;
pub mod gpu;
pub mod input;
pub mod net;
pub mod queue;
pub mod rng;
pub mod session;
mod shared;
pub mod signals;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod throttle;
pub mod transport;
mod window;
mod worker;

#[cfg(test)]
mod tests;
