//! Device models: buses, PCI, the virtio framework and its devices, serial port and legacy devices.
//!
//! The guest is hostile: no guest write to a register, a descriptor or a shared page may cause a
//! panic, a hang or a corruption outside the guest. Devices use the hypervisor (interrupts,
//! notifications) only through the traits in [`interrupt`]; this crate does not depend on KVM.

pub mod ahci;
pub mod bus;
pub mod component;
pub mod display;
pub mod firmware;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod input;
pub mod interrupt;
pub mod legacy;
pub mod log_limit;
pub mod net;
pub mod pci;
pub mod queue_state;
pub mod serial;
pub mod state;
pub mod sys;
pub mod tpm;
pub mod vhost_user;
pub mod virtio;
pub mod watchdog;
