//! The state of KVM's part of a machine in serialized form: for a file, another process, or another
//! host.
//!
//! (The other form, [`VcpuState`](super::VcpuState), is the state that a machine reset restores. It
//! never leaves the process.)
//!
//! A save changes nothing, except for KVM's treatment of pending INIT and SIPI when the state of a
//! vCPU is read. All vCPUs and devices are stopped. Interrupts flow from the devices and the PIT
//! through I/O APIC and PICs to the local APICs. The parts are saved in this order: an interrupt
//! that moves during the save is then in the part that is saved later, and is not lost. The parts
//! are restored in the reverse order, so that no part delivers an interrupt to a part whose state
//! is still to be overwritten.
//!
//! A state that is read back is untrusted. This module checks the length of each list, and the
//! range of each value that is narrower here than in the message. KVM checks the values that a
//! processor accepts.

mod clock;
mod events;
mod irqchip;
mod msrs;
mod pit;
mod registers;
#[cfg(test)]
mod tests;
mod time;
mod tsc;
mod vcpu;
mod xsave;

use std::io;

use vmm_protocol::state::StateError;

use super::host::KvmError;

pub(super) use events::enable as enable_events;
pub use time::GuestTime;
pub use tsc::TscShift;

impl From<KvmError> for StateError {
    fn from(error: KvmError) -> Self {
        match error {
            KvmError::Ioctl { operation, source } => Self::Host(operation, source),
            other => Self::Host("KVM", io::Error::other(other)),
        }
    }
}

/// A value that is wider in the message than in the machine.
fn narrow<T: TryFrom<u32>>(field: &'static str, value: u32) -> Result<T, StateError> {
    T::try_from(value).map_err(|_| StateError::invalid(field, format!("{value:#x} is out of range")))
}

/// A part that the message must have.
fn present<T>(field: &'static str, value: Option<T>) -> Result<T, StateError> {
    value.ok_or_else(|| StateError::invalid(field, "is missing"))
}

/// A list of a fixed length.
fn exactly<T: Clone, const N: usize>(field: &'static str, values: &[T]) -> Result<[T; N], StateError> {
    let found = values.len();
    <[T; N]>::try_from(values.to_vec())
        .map_err(|_| StateError::invalid(field, format!("has {found} values instead of {N}")))
}
