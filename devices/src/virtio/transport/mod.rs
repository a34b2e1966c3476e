//! Virtio over PCI, modern only (virtio 1.3, 4.1): the drivers' access to the fronts of devices.
//!
//! [`core`] is the device's life cycle under control of its driver: status, features, queues, start
//! and reset of the workers. [`function`] is the PCI function around it: identity, capabilities,
//! the BAR and its areas. [`state`] is their saved state. [`VirtioPciDevice`] is the machine's
//! handle.

pub(crate) mod core;
mod device;
mod function;
mod state;

pub use device::{Parts, VirtioPciDevice};
pub use function::memory_address;
