//! KVM: the host's interface ([`Host`]), a virtual machine ([`Vm`]), its processors ([`Vcpu`]) and interrupts.
//!
//! Everything that is unsafe about ioctls, the shared `kvm_run` page and memory slots is in here. KVM's API is
//! described in the kernel's `Documentation/virt/kvm/api.rst`; names of ioctls and capabilities are as there.

#![allow(unsafe_code)]

mod clock;
mod crash;
mod host;
mod irqchip;
mod kick;
pub mod machine_check;
mod msi;
mod saved;
mod slots;
mod stats;
mod vcpu;
mod vcpu_state;
mod vm;

#[cfg(test)]
pub(crate) mod tests;

pub use clock::ThreadClock;
pub use crash::Crash;
pub(crate) use host::address_bits;
pub use host::{Host, KvmError};
pub use irqchip::IrqChipState;
pub use kick::Kicker;
pub(crate) use kick::{install_handler, interrupt};
pub use saved::{GuestTime, TscShift};
pub(crate) use slots::PAGE as SLOT_PAGE;
pub use slots::{DirtyPages, Region, SlotError, SlotId};
pub use stats::{Stat, StatsReader};
pub use vcpu::{AddressSpaces, CRASH_PARAMETERS, Exit, Vcpu};
pub use vcpu_state::{MACHINE_CHECK_BANKS, MsrNumbers, VcpuState};
pub use vm::{Clock, Vm};
