//! Platform v1: the hardware that the guest sees, and its assembly.
//!
//! [`assemble`] builds a [`machine::Machine`] from a spec and open descriptors. [`acpi`], [`cpuid`]
//! and [`smbios`] describe the machine to the guest. [`boot`] loads the guest's kernel, and
//! [`image`] repeats this at each reset; [`firmware`] is in flash memory instead. [`saved`] has the machine's state in its serialized form.

pub mod acpi;
pub mod assemble;
pub mod boot;
pub mod cpuid;
mod disks;
mod firmware;
pub mod image;
mod leaving;
pub mod machine;
mod nics;
mod output_lines;
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
use vmm_protocol::vmm::ErrorKind;

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
/// Interrupt of the generic event device for PCI slots: an input that no ISA device uses,
/// level-triggered.
pub const HOTPLUG_GSI: u32 = 16;
/// Interrupt of the generic event device for the power button: an input that no ISA device uses,
/// level-triggered.
pub const POWER_BUTTON_GSI: u32 = 17;
/// Interrupt of the generic event device for a changed generation ID: an input that no ISA device
/// uses, edge-triggered.
pub const GENERATION_GSI: u32 = 18;

/// Converts an error during assembly or operation of a machine to the driver's [`Failure`].
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
