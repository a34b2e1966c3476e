//! KVM_GET_SUPPORTED_CPUID (the kernel's Documentation/virt/kvm/api.rst, 4.46).

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// An answer of the CPUID instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidAnswer {
    /// EAX before the instruction.
    pub leaf: u32,
    /// ECX before the instruction.
    pub subleaf: u32,
    /// EAX, EBX, ECX, EDX.
    pub registers: [u32; 4],
}

/// `KVM_MAX_CPUID_ENTRIES`.
const MAX: usize = 256;
/// `_IOWR(KVMIO, 0x05, struct kvm_cpuid2)`: the structure has 8 bytes before its entries.
const KVM_GET_SUPPORTED_CPUID: libc::Ioctl = 0xc008_ae05;

/// `struct kvm_cpuid_entry2`: leaf, subleaf, flags, registers, padding.
type Entry = [u32; 10];

/// `struct kvm_cpuid2`.
#[repr(C)]
struct Table {
    count: u32,
    padding: u32,
    entries: [Entry; MAX],
}

/// CPUID that the KVM of the open `/dev/kvm` supports.
pub fn supported_cpuid(kvm: impl AsFd) -> io::Result<Vec<CpuidAnswer>> {
    let mut table = Box::new(Table {
        count: 256,
        padding: 0,
        entries: [[0; 10]; MAX],
    });
    let fd = kvm.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and the ioctl writes at most `count` entries to the table, which outlives the call.
    let result = unsafe { libc::ioctl(fd, KVM_GET_SUPPORTED_CPUID, &raw mut *table) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let count = usize::try_from(table.count).unwrap_or(MAX);
    let answers = table.entries.iter().take(count).map(|entry| {
        let [leaf, subleaf, _, eax, ebx, ecx, edx, ..] = *entry;
        CpuidAnswer {
            leaf,
            subleaf,
            registers: [eax, ebx, ecx, edx],
        }
    });
    Ok(answers.collect())
}
