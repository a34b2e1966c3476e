//! CPUID of the guest.
//!
//! The base is the CPUID that KVM supports on this host. The platform replaces the topology, the
//! local APIC IDs and the brand string, which is the same everywhere. It removes all that depends
//! on the host's layout, clock rates or performance counters, and features whose state is not saved
//! (nested virtualization, AMX, SGX, processor trace). A [`model`] removes further features.
//!
//! A restored machine has the CPUID of the saved one, which does not change while the machine
//! exists. [`rules`] decides whether this host can have such a machine.
//!
//! A guest that expects Hyper-V has the leaves of [`hyperv`] before KVM's.
//!
//! A guest that runs on kvmclock and TSC deadlines needs neither a PIT nor a calibration, so the
//! frequency leaves (0x15, 0x16) are empty.

mod hyperv;
mod model;
mod rules;
#[cfg(test)]
mod tests;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use vmm_protocol::{
    machine::Processor,
    state::{CpuidEntry, MachineHeader, StateError},
    vmm::ErrorKind,
};
use vmmd_spec::{cpu::features::Register, topology::Topology};

use crate::{
    kvm::{Host, KvmError, address_bits},
    lifecycle::Failure,
    vcpu::Identity,
};

/// CPUID of a machine.
#[derive(Clone, Debug)]
pub struct Cpuid {
    topology: Topology,
    /// Of vCPU 0.
    entries: Vec<kvm_cpuid_entry2>,
    /// IA32_ARCH_CAPABILITIES of the vCPUs; 0 without that register.
    arch_capabilities: u64,
    /// The value is that of a saved machine, and has to be set.
    is_restored: bool,
}

impl Cpuid {
    /// CPUID of a new machine. Refused when the host lacks a feature of `processor`.
    pub fn new(host: &Host, topology: Topology, processor: &Processor) -> Result<Self, Failure> {
        let mut entries = offered(host, topology)?;
        model::apply(&mut entries, processor).map_err(|missing| {
            let message = format!(
                "this host's processors and KVM lack {}, which the processor model {} has: choose another model, or remove these features",
                list(&missing),
                processor.model
            );
            Failure::of(ErrorKind::Resources, message)
        })?;
        if processor.hyperv {
            hyperv::insert(&mut entries, hyperv_leaves(host, topology)?);
        }
        let has_register = has_arch_capabilities(&entries);
        Ok(Self {
            topology,
            entries,
            arch_capabilities: if has_register {
                host.arch_capabilities()?
            } else {
                0
            },
            is_restored: false,
        })
    }

    /// CPUID of a saved machine. Refused when this host cannot have such a machine.
    pub fn restored(host: &Host, topology: Topology, saved: &MachineHeader) -> Result<Self, StateError> {
        let own = offered(host, topology)?;
        let entries = decode(&saved.cpuid)?;
        let invalid = |why| StateError::invalid("cpuid", why);
        let mut of_kvm = entries.clone();
        let of_hyperv = hyperv::remove(&mut of_kvm);
        if !of_hyperv.is_empty() {
            let own = hyperv_leaves(host, topology).map_err(|failure| invalid(failure.message))?;
            hyperv::check(&own, &of_hyperv).map_err(invalid)?;
        }
        rules::check(&own, &of_kvm).map_err(invalid)?;
        if has_arch_capabilities(&entries) {
            let refused = rules::check_arch_capabilities(host.arch_capabilities()?, saved.arch_capabilities);
            refused.map_err(|why| StateError::invalid("arch_capabilities", why))?;
        }
        Ok(Self {
            topology,
            arch_capabilities: saved.arch_capabilities,
            is_restored: true,
            entries,
        })
    }

    /// Whether the guest expects Hyper-V.
    pub fn has_hyperv(&self) -> bool {
        hyperv::is_in(&self.entries)
    }

    /// Width of the guest-physical addresses that can be mapped, in bits.
    pub fn physical_address_bits(&self) -> u32 {
        mappable_bits(&self.entries)
    }

    /// CPUID of vCPU 0 in the form of a saved machine, in order.
    pub fn saved(&self) -> Vec<CpuidEntry> {
        let mut entries = self.entries.clone();
        personalise(&mut entries, self.topology, 0);
        let entries = entries.iter().map(|entry| CpuidEntry {
            function: entry.function,
            index: entry.index,
            eax: entry.eax,
            ebx: entry.ebx,
            ecx: entry.ecx,
            edx: entry.edx,
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by_key(|entry| (entry.function, entry.index));
        entries
    }

    /// IA32_ARCH_CAPABILITIES of the vCPUs; 0 without that register.
    pub fn arch_capabilities(&self) -> u64 {
        self.arch_capabilities
    }

    /// Identities of the vCPUs, in their order.
    pub fn vcpus(&self) -> Result<Vec<Identity>, KvmError> {
        (0..self.topology.cores())
            .map(|index| {
                let mut entries = self.entries.clone();
                personalise(&mut entries, self.topology, index);
                let cpuid = CpuId::from_entries(&entries).map_err(|_| KvmError::Ioctl {
                    operation: "building CPUID",
                    source: std::io::ErrorKind::OutOfMemory.into(),
                })?;
                Ok(Identity {
                    apic_id: apic_id(self.topology, index),
                    cpuid,
                    arch_capabilities: self.is_restored.then_some(self.arch_capabilities),
                    hyperv: self.has_hyperv(),
                })
            })
            .collect()
    }
}

/// Names for a message.
fn list(names: &[String]) -> String {
    /// Names in a message; the others are counted.
    const NAMED: usize = 20;
    let named = names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Everything that a machine of this topology can have on this host.
fn offered(host: &Host, topology: Topology) -> Result<Vec<kvm_cpuid_entry2>, KvmError> {
    let supported = host.supported_cpuid()?;
    let mut entries = common(supported.as_slice(), topology, host.has_tsc_deadline());
    personalise(&mut entries, topology, 0);
    Ok(entries)
}

/// Hyper-V's leaves of a machine of this topology on this host.
fn hyperv_leaves(host: &Host, topology: Topology) -> Result<Vec<kvm_cpuid_entry2>, Failure> {
    let refused = |lacks: &str| {
        let message = format!(
            "this host's KVM lacks {lacks}, which spec.cpu.hyperv needs: use kernel 5.11 or later with KVM on VT-x or SVM"
        );
        Failure::of(ErrorKind::Resources, message)
    };
    let supported = host.supported_hyperv_cpuid()?;
    let supported = supported.ok_or_else(|| refused("KVM_CAP_SYS_HYPERV_CPUID"))?;
    hyperv::leaves(supported.as_slice(), topology.cores()).map_err(|missing| refused(&list(&missing)))
}

/// Width of the guest-physical addresses that can be mapped: CPUID's width, or less if nested
/// paging has fewer levels (leaf 0x8000_0008, EAX, bits 23:16, which are zero if not given;
/// AMD64 APM vol. 3, E.4.7).
fn mappable_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    let bits = address_bits(entries);
    match find(entries, 0x8000_0008, 0).map_or(0, |leaf| leaf.eax >> 16 & 0xff) {
        0 => bits,
        mappable => bits.min(mappable),
    }
}

/// The answer of a leaf and a subleaf.
fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
    let mut there = entries.iter();
    there
        .find(|entry| (entry.function, entry.index) == (function, index))
        .copied()
}

fn value(entry: &kvm_cpuid_entry2, register: Register) -> u32 {
    match register {
        Register::Eax => entry.eax,
        Register::Ebx => entry.ebx,
        Register::Ecx => entry.ecx,
        Register::Edx => entry.edx,
    }
}

fn value_mut(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    }
}

/// Bit 29 of leaf 7, EDX.
fn has_arch_capabilities(entries: &[kvm_cpuid_entry2]) -> bool {
    find(entries, 7, 0).is_some_and(|entry| entry.edx & bit::ARCH_CAPABILITIES != 0)
}

/// CPUID of a saved machine, which is untrusted.
fn decode(saved: &[CpuidEntry]) -> Result<Vec<kvm_cpuid_entry2>, StateError> {
    if saved.len() > KVM_MAX_CPUID_ENTRIES {
        let why = format!("has {} leaves, more than KVM takes", saved.len());
        return Err(StateError::invalid("cpuid", why));
    }
    let place = |entry: &CpuidEntry| (entry.function, entry.index);
    if saved
        .windows(2)
        .any(|pair| matches!(pair, [one, next] if place(one) >= place(next)))
    {
        return Err(StateError::invalid("cpuid", "its leaves are not in order"));
    }
    let entry = |entry: &CpuidEntry| kvm_cpuid_entry2 {
        function: entry.function,
        index: entry.index,
        flags: if has_subleaves(entry.function) {
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX
        } else {
            0
        },
        eax: entry.eax,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx,
        ..Default::default()
    };
    Ok(saved.iter().map(entry).collect())
}

/// Whether KVM looks up a leaf by its subleaf, too (Linux: `cpuid_function_is_indexed`).
fn has_subleaves(leaf: u32) -> bool {
    matches!(
        leaf,
        0x4 | 0x7
            | 0xb
            | 0xd
            | 0xf
            | 0x10
            | 0x12
            | 0x14
            | 0x17
            | 0x18
            | 0x1d
            | 0x1e
            | 0x1f
            | 0x24
            | 0x8000_001d
            | 0x8000_0026
    )
}

/// Vendor of the processor; some leaves differ by vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vendor {
    Intel,
    /// AMD and Hygon.
    Amd,
}

/// The local APIC id of vCPU `index`: socket above core, as the topology leaves say (Intel SDM vol. 3, 9.9.1).
pub fn apic_id(topology: Topology, index: u32) -> u32 {
    let cores = topology.cores_per_socket.max(1);
    (index / cores) << core_bits(topology) | (index % cores)
}

/// Bits of an APIC id that count cores.
fn core_bits(topology: Topology) -> u32 {
    topology
        .cores_per_socket
        .max(1)
        .next_power_of_two()
        .trailing_zeros()
}

/// Feature bits that are changed, by leaf and register.
mod bit {
    /// Leaf 1, ECX.
    pub(super) const VMX: u32 = 1 << 5;
    pub(super) const X2APIC: u32 = 1 << 21;
    pub(super) const TSC_DEADLINE: u32 = 1 << 24;
    pub(super) const HYPERVISOR: u32 = 1 << 31;
    /// DTES64, MONITOR, DS-CPL, SMX, EIST, TM2, PDCM.
    pub(super) const HOST_ONLY_1C: u32 = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 15;
    /// Leaf 1, EDX.
    pub(super) const HTT: u32 = 1 << 28;
    /// DS, ACPI, TM, PBE.
    pub(super) const HOST_ONLY_1D: u32 = 1 << 21 | 1 << 22 | 1 << 29 | 1 << 31;
    /// Leaf 6, EAX: the APIC timer always runs. KVM's does.
    pub(super) const ARAT: u32 = 1 << 2;
    /// Leaf 7, EBX: SGX, processor trace.
    pub(super) const HOST_ONLY_7B: u32 = 1 << 2 | 1 << 25;
    /// Leaf 7, ECX: ENQCMD, SGX launch control.
    pub(super) const HOST_ONLY_7C: u32 = 1 << 29 | 1 << 30;
    /// Leaf 7, EDX: AMX-BF16, AMX-TILE, AMX-INT8.
    pub(super) const AMX_7D: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    pub(super) const ARCH_CAPABILITIES: u32 = 1 << 29;
    /// Leaf 7.1, EAX: AMX-FP16. EDX: AMX-COMPLEX.
    pub(super) const AMX_71A: u32 = 1 << 21;
    pub(super) const AMX_71D: u32 = 1 << 8;
    /// XCR0: AMX's tile configuration and data.
    pub(super) const XCR0_AMX: u32 = 1 << 17 | 1 << 18;
    /// Leaf 0x4000_0001, EAX: MSI_EXT_DEST_ID, which is a promise of the VMM's interrupt remapping.
    pub(super) const KVM_MSI_EXT_DEST_ID: u32 = 1 << 15;
    /// Leaf 0x8000_0001, ECX.
    pub(super) const CMP_LEGACY: u32 = 1 << 1;
    /// SVM, IBS, SKINIT, WDT, LWP, NodeId, and the extended performance counters.
    pub(super) const HOST_ONLY_81C: u32 =
        1 << 2 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 19 | 1 << 23 | 1 << 24 | 1 << 27 | 1 << 28;
}

/// Leaves that are left out: they read as zeroes.
fn is_dropped(leaf: u32) -> bool {
    matches!(
        leaf,
        // MWAIT, direct cache access, performance counters (0xa), resource control, SGX, processor trace, frequencies,
        // vendor brand, hybrid parts, PCONFIG, AMX, other topology leaves than 0xb.
        0x5 | 0x9 | 0xa | 0xf | 0x10 | 0x12 | 0x14..=0x17 | 0x1a..=0x20
        // Invariant TSC (a guest moves between hosts), SVM, IBS, LWP, memory encryption, resource control,
        // performance counters, other topology.
        | 0x8000_0007 | 0x8000_000a | 0x8000_001b | 0x8000_001c | 0x8000_001f | 0x8000_0020 | 0x8000_0022..=0x8000_0026
        // Other vendors'.
        | 0xc000_0000..
    )
}

/// Leaves that are the same for all vCPUs.
fn common(supported: &[kvm_cpuid_entry2], topology: Topology, tsc_deadline: bool) -> Vec<kvm_cpuid_entry2> {
    let vendor = vendor(supported);
    let mut entries: Vec<_> = supported
        .iter()
        .filter(|entry| !is_dropped(entry.function) && !matches!(entry.function, 0xb | 0x4000_0000))
        .copied()
        .collect();
    for entry in &mut entries {
        adjust(entry, vendor, topology, tsc_deadline);
    }
    set_xsave_size(&mut entries);
    entries.push(hypervisor_leaf());
    entries.extend(topology_leaves(topology));
    entries
}

fn vendor(entries: &[kvm_cpuid_entry2]) -> Vendor {
    let ebx = entries
        .iter()
        .find(|entry| entry.function == 0)
        .map_or(0, |entry| entry.ebx);
    match &ebx.to_le_bytes() {
        b"Auth" | b"Hygo" => Vendor::Amd,
        _ => Vendor::Intel,
    }
}

fn adjust(entry: &mut kvm_cpuid_entry2, vendor: Vendor, topology: Topology, tsc_deadline: bool) {
    let cores = topology.cores_per_socket;
    let slots = 1_u32 << core_bits(topology);
    match (entry.function, entry.index) {
        (0, _) => entry.eax = entry.eax.max(0xd),
        (1, _) => {
            entry.ecx &= !(bit::HOST_ONLY_1C | bit::VMX | bit::TSC_DEADLINE);
            entry.ecx |= bit::HYPERVISOR | bit::X2APIC;
            if tsc_deadline {
                entry.ecx |= bit::TSC_DEADLINE;
            }
            entry.edx &= !(bit::HOST_ONLY_1D | bit::HTT);
            if cores > 1 {
                entry.edx |= bit::HTT;
            }
            // Line size of CLFLUSH stays; APIC ids in the package, as many as eight bits hold; the id itself is the vCPU's own.
            entry.ebx = entry.ebx & 0xff00 | slots.min(0xff) << 16;
        }
        (4, _) => set_cache_sharing(entry, topology, true),
        (6, _) => {
            *entry = kvm_cpuid_entry2 {
                function: 6,
                eax: bit::ARAT,
                ..Default::default()
            };
        }
        (7, 0) => {
            entry.ebx &= !bit::HOST_ONLY_7B;
            entry.ecx &= !bit::HOST_ONLY_7C;
            entry.edx &= !bit::AMX_7D;
            if vendor == Vendor::Amd {
                // KVM emulates this MSR of Intel's anywhere; guests don't expect it on AMD.
                entry.edx &= !bit::ARCH_CAPABILITIES;
            }
        }
        (7, 1) => {
            entry.eax &= !bit::AMX_71A;
            entry.edx &= !bit::AMX_71D;
        }
        (0xd, 0) => entry.eax &= !bit::XCR0_AMX,
        (0x4000_0001, _) => entry.eax &= !bit::KVM_MSI_EXT_DEST_ID,
        (0x8000_0001, _) => {
            entry.ecx &= !(bit::HOST_ONLY_81C | bit::CMP_LEGACY);
            if vendor == Vendor::Amd && cores > 1 {
                entry.ecx |= bit::CMP_LEGACY;
            }
        }
        (0x8000_0002..=0x8000_0004, _) => set_brand(entry, vendor),
        (0x8000_0008, _) => {
            entry.ecx = match vendor {
                Vendor::Amd => cores.saturating_sub(1) | core_bits(topology) << 12,
                Vendor::Intel => 0,
            };
        }
        (0x8000_001d, _) => set_cache_sharing(entry, topology, false),
        _ => {}
    }
}

/// Leaves 4 (Intel) and 0x8000_001d (AMD): levels 1 and 2 are a core's own, others are a socket's.
fn set_cache_sharing(entry: &mut kvm_cpuid_entry2, topology: Topology, cores_field: bool) {
    if entry.eax & 0x1f == 0 {
        return;
    }
    let ids = (1_u32 << core_bits(topology)).saturating_sub(1);
    let level = entry.eax >> 5 & 0x7;
    let sharing = if level >= 3 { ids } else { 0 };
    entry.eax = entry.eax & 0x3fff | (sharing & 0xfff) << 14;
    if cores_field {
        entry.eax |= (ids & 0x3f) << 26;
    }
}

/// The same on all hosts of a vendor, 48 bytes over three leaves.
fn set_brand(entry: &mut kvm_cpuid_entry2, vendor: Vendor) {
    let text: &[u8] = match vendor {
        Vendor::Intel => b"Intel(R) virtual CPU (vmmd)",
        Vendor::Amd => b"AMD virtual CPU (vmmd)",
    };
    let mut brand = [0; 48];
    for (to, from) in brand.iter_mut().zip(text) {
        *to = *from;
    }
    let part = usize::try_from(entry.function.saturating_sub(0x8000_0002))
        .unwrap_or(0)
        .saturating_mul(16);
    let word = |at: usize| {
        let bytes = brand
            .get(part.saturating_add(at)..)
            .and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    };
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (word(0), word(4), word(8), word(12));
}

/// Leaf 0xd: sets the size of the extended state to the end of its last remaining component (Intel
/// SDM vol. 1, 13.2).
fn set_xsave_size(entries: &mut Vec<kvm_cpuid_entry2>) {
    /// Legacy area and XSAVE header.
    const BASE: u32 = 576;
    let Some(features) = entries
        .iter()
        .find(|entry| (entry.function, entry.index) == (0xd, 0))
        .map(|e| e.eax)
    else {
        return;
    };
    entries.retain(|entry| entry.function != 0xd || !matches!(entry.index, 17 | 18));
    let size = entries
        .iter()
        .filter(|entry| entry.function == 0xd && (2..32).contains(&entry.index))
        .filter(|entry| features & 1 << entry.index != 0)
        .map(|entry| entry.eax.saturating_add(entry.ebx))
        .fold(BASE, u32::max);
    for entry in entries
        .iter_mut()
        .filter(|entry| (entry.function, entry.index) == (0xd, 0))
    {
        // EBX follows XCR0; KVM keeps it up to date.
        entry.ecx = size;
        entry.ebx = entry.ebx.min(size);
    }
}

/// Leaf 0x4000_0000: "KVMKVMKVM" and the last leaf (the kernel's `Documentation/virt/kvm/x86/cpuid.rst`).
fn hypervisor_leaf() -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: 0x4000_0000,
        eax: 0x4000_0001,
        ebx: u32::from_le_bytes(*b"KVMK"),
        ecx: u32::from_le_bytes(*b"VMKV"),
        edx: u32::from_le_bytes(*b"M\0\0\0"),
        ..Default::default()
    }
}

/// Leaf 0xb (Intel SDM vol. 2, CPUID): threads in a core, logical processors in a package, end.
fn topology_leaves(topology: Topology) -> [kvm_cpuid_entry2; 3] {
    const THREAD: u32 = 1 << 8;
    const CORE: u32 = 2 << 8;
    let leaf = |index, shift, processors, kind| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: processors,
        ecx: index | kind,
        ..Default::default()
    };
    [
        leaf(0, 0, 1, THREAD),
        leaf(1, core_bits(topology), topology.cores_per_socket, CORE),
        leaf(2, 0, 0, 0),
    ]
}

/// Sets the IDs, in which the vCPUs differ.
fn personalise(entries: &mut [kvm_cpuid_entry2], topology: Topology, index: u32) {
    let id = apic_id(topology, index);
    let core = index % topology.cores_per_socket.max(1);
    let socket = index / topology.cores_per_socket.max(1);
    for entry in entries {
        match entry.function {
            1 => entry.ebx = entry.ebx & 0x00ff_ffff | id << 24,
            0xb => entry.edx = id,
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = core & 0xff;
                entry.ecx = socket & 0xff;
                entry.edx = 0;
            }
            _ => {}
        }
    }
}
