//! Device models: buses, PCI, the virtio framework and everything on it, serial port and legacy devices.
//!
//! The guest is hostile: nothing that it writes to a register, a descriptor or a shared page may panic, hang or
//! corrupt anything but itself. What a device needs of the hypervisor (interrupts, notifications) it gets through
//! the traits in [`interrupt`]; this crate knows no KVM.

pub mod block;
pub mod bus;
pub mod component;
pub mod dirty;
pub mod display;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod input;
pub mod interrupt;
pub mod legacy;
pub mod log_limit;
pub mod net;
pub mod pci;
pub mod ram;
pub mod rate;
pub mod serial;
pub mod state;
pub mod sys;
pub mod thread;
pub mod vhost_user;
pub mod virtio;

/// Guest memory as every part of the project has it. Writes through it are marked in the bitmap that live
/// migration reads (KVM's dirty log does not see the VMM's own writes); it costs nothing while nobody migrates.
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
