//! Virtio over PCI, modern only (virtio 1.3, 4.1): how drivers reach the fronts of devices.
//!
//! [`core`] is the device's life as its driver drives it: status, features, queues, start and reset of the
//! workers. [`function`] is the PCI function around it: identity, capabilities, the BAR and
//! what lies in it. [`state`] is their saved state. [`VirtioPciDevice`] is what the machine holds.

pub(crate) mod core;
mod device;
mod function;
mod state;

pub use device::{Parts, VirtioPciDevice};
pub use function::memory_address;
