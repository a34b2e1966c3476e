//! Reasons for the crash of a vCPU.

use std::fmt;

use kvm_bindings::{KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION};

use super::host::Host;

/// A state in which a vCPU can't run any further. The guest's or the host's doing, never the VMM's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Crash {
    /// `KVM_EXIT_SHUTDOWN`: a fault while a double fault was delivered.
    TripleFault,
    /// `KVM_EXIT_FAIL_ENTRY`: the processor refused the guest's state.
    FailEntry {
        /// The hardware's reason.
        reason: u64,
        /// The host processor.
        cpu: u32,
    },
    /// `KVM_EXIT_INTERNAL_ERROR`, suberror 1: KVM met an instruction that it can't emulate.
    Emulation {
        /// Instruction pointer.
        rip: u64,
        /// The instruction's bytes, if KVM reports them.
        bytes: Vec<u8>,
        /// Whether the host has VT-x or SVM; without, no ordinary guest runs on it.
        hardware: bool,
    },
    /// `KVM_EXIT_INTERNAL_ERROR` with any other suberror.
    Internal {
        /// `KVM_INTERNAL_ERROR_*`.
        suberror: u32,
        /// KVM's data about the error.
        data: Vec<u64>,
    },
    /// `KVM_EXIT_MEMORY_FAULT`: the host could not provide a page.
    MemoryFault {
        /// Guest-physical address.
        address: u64,
    },
    /// An exit that was never asked for.
    Unexpected {
        /// `KVM_EXIT_*`.
        reason: u32,
    },
}

impl Crash {
    pub(super) fn emulation(rip: u64, bytes: Vec<u8>) -> Self {
        Self::Emulation {
            rip,
            bytes,
            hardware: Host::has_hardware_virtualization(),
        }
    }

    /// Whether it is the host's KVM that can't run ordinary guests, rather than a guest that went astray.
    pub fn is_host_unusable(&self) -> bool {
        matches!(self, Self::Emulation { hardware: false, .. })
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TripleFault => write!(f, "triple fault"),
            Self::FailEntry { reason, cpu } => {
                write!(
                    f,
                    "the processor refused the guest's state (reason {reason:#x}, host CPU {cpu})"
                )
            }
            Self::Emulation { rip, bytes, hardware } => {
                if !hardware {
                    write!(
                        f,
                        "this host's KVM can't run ordinary guests, because its processor offers neither VT-x nor SVM \
                         (a paravirtual or restricted nested backend): use a host with hardware virtualization, or \
                         enable nested virtualization for this one; "
                    )?;
                }
                write!(f, "KVM can't emulate the instruction at {rip:#x}")?;
                match bytes.as_slice() {
                    [] => Ok(()),
                    bytes => write!(f, " ({})", Hex(bytes)),
                }
            }
            Self::Internal { suberror, data } => {
                let name = match *suberror {
                    KVM_INTERNAL_ERROR_EMULATION => "emulation",
                    kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "simultaneous exceptions",
                    KVM_INTERNAL_ERROR_DELIVERY_EV => "event delivery",
                    kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "unexpected exit reason",
                    _ => "unknown",
                };
                write!(
                    f,
                    "internal error of KVM: {name} (suberror {suberror}, data {data:x?})"
                )
            }
            Self::MemoryFault { address } => {
                write!(f, "the host has no memory for guest address {address:#x}")
            }
            Self::Unexpected { reason } => write!(f, "unexpected exit of KVM, reason {reason}"),
        }
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(" ")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}
