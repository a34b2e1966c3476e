//! Device models: buses, PCI, the virtio framework and its devices, serial port and legacy devices.
//!
//! The guest is hostile: no guest write to a register, a descriptor or a shared page may cause a
//! panic, a hang or a corruption outside the guest. Devices use the hypervisor (interrupts,
//! notifications) only through the traits in [`interrupt`]; this crate does not depend on KVM.

pub mod block;
pub mod bus;
pub mod component;
pub mod dirty;
pub mod display;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod geometry;
pub mod input;
pub mod interrupt;
pub mod legacy;
pub mod log_limit;
pub mod net;
pub mod pci;
pub mod queue_state;
pub mod ram;
pub mod rate;
pub mod serial;
pub mod state;
pub mod sys;
pub mod thread;
pub mod vhost_user;
pub mod virtio;

/// Guest memory type of the whole project. Writes through it are marked in the bitmap that live
/// migration reads (KVM's dirty log does not see the VMM's own writes); the marking costs nothing
/// without a migration.
pub type GuestMemory = vm_memory::GuestMemoryMmap<dirty::DirtyBitmap>;

/// A test needs `what`, which this host does not have. Where continuous integration runs (`CI` is set) that fails the test; a
/// developer's machine may lack it, and the test says so and returns.
#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "given to map_err")]
pub(crate) fn lacking(what: &str, error: impl std::fmt::Display) {
    assert!(
        std::env::var_os("CI").is_none(),
        "this host has no {what}: {error}"
    );
    eprintln!("not tested, this host has no {what}: {error}");
}
