//! Platform v1: what the guest sees, and how it is put together.
//!
//! [`assemble`] builds a [`machine::Machine`] from a spec and open descriptors. What the guest is told of it is in
//! [`acpi`], [`cpuid`] and [`smbios`]; [`boot`] loads what it runs, and [`image`] does all that anew at each reset.
//! [`saved`] has its state in the form in which it moves.

pub mod acpi;
pub mod assemble;
pub mod boot;
pub mod cpuid;
mod disks;
pub mod image;
mod leaving;
pub mod machine;
mod nics;
mod panic_line;
mod plugs;
#[cfg(any(test, debug_assertions))]
pub mod rebuilt;
mod saved;
mod shares;
#[cfg(test)]
mod silent;
pub mod smbios;
mod stats;
mod throttle;
mod video;

use devices::bus::BusError;
use proto::vmm::ErrorKind;

use crate::{
    board::boot::BootError, kvm::KvmError, kvm::SlotError, lifecycle::Failure, memory::RamError,
    vcpu::VcpuError,
};

/// First I/O port of COM1.
pub const COM1_PORT: u16 = 0x3f8;
/// Interrupt of COM1, an input of the I/O APIC.
pub const COM1_GSI: u32 = 4;
/// Interrupt of the keyboard, where there is one: that of a PC.
pub const KEYBOARD_GSI: u32 = 1;
/// Interrupt of the generic event device that tells of PCI slots: an input that no ISA device ever had, level-triggered.
pub const HOTPLUG_GSI: u32 = 16;
/// Interrupt of the generic event device that tells of the power button: such an input too, level-triggered.
pub const POWER_BUTTON_GSI: u32 = 17;
/// Interrupt of the generic event device that tells of another generation id: such an input too, edge-triggered.
pub const GENERATION_GSI: u32 = 18;

/// What goes wrong while a machine is built or driven is told as the driver tells it.
macro_rules! failure_from {
    ($error:ty, $kind:expr) => {
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let kind: fn(&$error) -> ErrorKind = $kind;
                Failure::new(kind(&error), &error)
            }
        }
    };
}

failure_from!(KvmError, |_| ErrorKind::Kvm);
failure_from!(SlotError, |_| ErrorKind::Kvm);
failure_from!(RamError, |_| ErrorKind::Resources);
failure_from!(BusError, |_| ErrorKind::Internal);
failure_from!(BootError, |error| match error {
    BootError::Memory(_) => ErrorKind::Internal,
    _ => ErrorKind::Image,
});
failure_from!(VcpuError, |error| match error {
    VcpuError::Kvm { .. } => ErrorKind::Kvm,
    VcpuError::Thread { .. } => ErrorKind::Resources,
    VcpuError::Gone(_) | VcpuError::Running | VcpuError::State { .. } => ErrorKind::Internal,
});
