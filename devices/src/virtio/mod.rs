//! Virtio 1.3: what all devices share.
//!
//! A device has two halves. Its *front* ([`device::VirtioDevice`]) sits behind the transport and is used on vCPU
//! threads: identity, features, configuration space. Its *back* ([`device::QueueHandler`]) is owned by a worker
//! thread and never seen by anybody else: it takes requests from queues. The [`worker`] framework runs the backs, the
//! transport tells it when: DRIVER_OK starts them, a reset or a pause stops them.

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
