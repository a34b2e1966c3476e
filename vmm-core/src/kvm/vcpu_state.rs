//! The whole state of a vCPU, which is read after its creation and restored by a machine reset.
//! `saved` has the serialized form.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};

use super::{host::KvmError, vcpu::Vcpu};

/// The MSRs that KVM counts as state, except MSRs that this VMM's guests do not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrNumbers(Vec<u32>);

/// `MSR_IA32_TSC`. Written 0 at a reset, which KVM takes as "in step with the other vCPUs".
const TSC: u32 = 0x10;

/// The memory type range registers (Intel SDM vol. 3, 12.11.2) as firmware leaves them, SeaBIOS on QEMU's q35 for one: RAM is cached,
/// the hole that video memory has below 1 MiB and the one below 4 GiB are not. KVM itself does not look at them, but kernels before
/// 6.2 leave the page attribute table alone where they are off, and then have no write-combining.
mod mtrr {
    use crate::memory::layout::{GIB, HIGH_RAM_START, HOLE_START};

    /// `IA32_MTRR_PHYSBASE0` and `IA32_MTRR_PHYSMASK0`.
    const BASE_0: u32 = 0x200;
    const MASK_0: u32 = 0x201;
    /// `IA32_MTRR_FIX16K_A0000`.
    const FIXED_VIDEO: u32 = 0x259;
    /// `IA32_MTRR_DEF_TYPE`, and its bits for the fixed ranges and for all of the registers.
    pub(super) const DEFAULT_TYPE: u32 = 0x2ff;
    const ENABLED: u64 = 1 << 11;
    const FIXED_ENABLED: u64 = 1 << 10;
    /// A mask's bit for its range to be in use.
    const VALID: u64 = 1 << 11;
    const UNCACHEABLE: u64 = 0;
    const WRITE_BACK: u64 = 6;
    /// Eight fixed ranges.
    const ALL_WRITE_BACK: u64 = WRITE_BACK * 0x0101_0101_0101_0101;

    /// One range, as its length is a power of two and its start a multiple of that.
    const _: () = assert!(HIGH_RAM_START - HOLE_START == GIB && HOLE_START.is_multiple_of(GIB));

    /// Value that firmware sets in an MTRR; `None` for all other MSRs, and for unused ranges.
    /// Physical addresses have `bits` bits.
    pub(super) fn value(msr: u32, bits: u32) -> Option<u64> {
        let end = 1_u64.checked_shl(bits).unwrap_or(0);
        match msr {
            BASE_0 => Some(HOLE_START | UNCACHEABLE),
            MASK_0 => Some(end.wrapping_sub(GIB) | VALID),
            FIXED_VIDEO => Some(UNCACHEABLE),
            0x250 | 0x258 | 0x268..=0x26f => Some(ALL_WRITE_BACK),
            DEFAULT_TYPE => Some(ENABLED | FIXED_ENABLED | WRITE_BACK),
            _ => None,
        }
    }
}
/// `IA32_MISC_ENABLE`, and its bit for fast string operations; Linux does without them when it is clear.
const MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;

/// Hyper-V's registers (TLFS, appendix F). KVM's list has only a part of the registers with state.
pub(super) mod hyperv_msr {
    /// `HV_X64_MSR_CRASH_P0` to `HV_X64_MSR_CRASH_P4`.
    pub const CRASH_PARAMETERS: [u32; 5] = [0x4000_0100, 0x4000_0101, 0x4000_0102, 0x4000_0103, 0x4000_0104];
    /// `HV_X64_MSR_CRASH_CTL`, and its bit for the crash to be reported, which also shows that this is possible.
    pub(super) const CRASH_CONTROL: u32 = 0x4000_0105;
    pub(super) const CRASH_NOTIFY: u64 = 1 << 63;

    /// The registers that are state, in the order in which they are written: identity of the guest before the page of its
    /// hypercalls, configuration of a timer before its count. The reference counter follows kvmclock, and the index of the
    /// vCPU never changes.
    pub(super) fn state() -> impl Iterator<Item = u32> {
        // Identity, hypercalls; the time of the vCPU; the page of the reference counter; the page for the local APIC.
        let general = [0x4000_0000, 0x4000_0001, 0x4000_0010, 0x4000_0021, 0x4000_0073];
        // Control of the interrupt controller and its pages of events and messages.
        let controller = [0x4000_0080, 0x4000_0082, 0x4000_0083];
        general
            .into_iter()
            .chain(controller)
            .chain(0x4000_0090..=0x4000_009f)
            .chain(0x4000_00b0..=0x4000_00b7)
            .chain(CRASH_PARAMETERS)
            .chain([CRASH_CONTROL])
    }
}

/// Hyper-V's interfaces and performance counters: not in the CPUID of most guests, and each costs an ioctl to find that out.
fn is_never_offered(msr: u32) -> bool {
    matches!(
        msr,
        0x4000_0000..=0x4000_0fff
            | 0xc1..=0xc8
            | 0x186..=0x18d
            | 0x309..=0x30c
            | 0x38d..=0x390
            | 0x3f1
            | 0x4c1..=0x4c8
            | 0xc001_0200..=0xc001_020b
            | 0xc000_0300..=0xc000_0303
    )
}

/// The memory type range registers (variable, fixed, default type): state that KVM's list leaves out.
fn mtrrs() -> impl Iterator<Item = u32> {
    (0x200..=0x20f)
        .chain([0x250, 0x258, 0x259])
        .chain(0x268..=0x26f)
        .chain([mtrr::DEFAULT_TYPE])
}

/// How many machine-check banks a vCPU has: as many as QEMU's (`MCE_BANKS_DEF` of its `target/i386/cpu.h`).
pub const MACHINE_CHECK_BANKS: u8 = 10;

/// `IA32_MC0_CTL` and what follows: control, status, address and miscellaneous of each bank. State that KVM's list leaves out.
fn machine_check_banks() -> impl Iterator<Item = u32> {
    0x400..0x400 + 4 * u32::from(MACHINE_CHECK_BANKS)
}

/// AMD's oldest performance counters and their selectors (AMD64 APM vol. 2, 13.2.1): a guest has them unless the VM was made without
/// any counters.
fn is_legacy_counter(msr: u32) -> bool {
    matches!(msr, 0xc001_0000..=0xc001_0007)
}

impl MsrNumbers {
    pub(super) fn new(indices: &[u32], has_counters: bool) -> Self {
        let is_state = |msr: &u32| !is_never_offered(*msr) && (has_counters || !is_legacy_counter(*msr));
        let indices = indices.iter().copied().filter(is_state);
        let mut numbers: Vec<_> = indices.chain(mtrrs()).chain(machine_check_banks()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        Self(numbers)
    }
}

/// Everything that a guest can change of its vCPU.
pub struct VcpuState {
    special: kvm_sregs,
    general: kvm_regs,
    xcrs: kvm_xcrs,
    xsave: Box<kvm_xsave>,
    debug: kvm_debugregs,
    events: kvm_vcpu_events,
    lapic: kvm_lapic_state,
    mp_state: kvm_mp_state,
    msrs: Vec<kvm_msr_entry>,
}

impl std::fmt::Debug for VcpuState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VcpuState")
            .field("rip", &self.general.rip)
            .finish_non_exhaustive()
    }
}

impl VcpuState {
    /// Reads it from a vCPU that is stopped and whose CPUID is set. `hyperv`: with Hyper-V's registers.
    fn capture(vcpu: &Vcpu, hyperv: bool) -> Result<Self, KvmError> {
        let fd = vcpu.fd();
        Ok(Self {
            // First: reading it lets KVM act on pending INIT and SIPI, which changes what follows.
            mp_state: fd.get_mp_state().map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?,
            special: fd.get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))?,
            general: fd.get_regs().map_err(KvmError::ioctl("KVM_GET_REGS"))?,
            xcrs: fd.get_xcrs().map_err(KvmError::ioctl("KVM_GET_XCRS"))?,
            xsave: Box::new(fd.get_xsave().map_err(KvmError::ioctl("KVM_GET_XSAVE"))?),
            debug: fd
                .get_debug_regs()
                .map_err(KvmError::ioctl("KVM_GET_DEBUGREGS"))?,
            events: fd
                .get_vcpu_events()
                .map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?,
            lapic: fd.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?,
            msrs: read_msrs(vcpu, hyperv)?,
        })
    }

    /// The MSRs that are state of this vCPU: those of the host's state MSRs that the vCPU can read.
    pub(super) fn msr_indices(&self) -> impl Iterator<Item = u32> {
        self.msrs.iter().map(|msr| msr.index)
    }

    /// Brings a new vCPU, whose CPUID is set and says that physical addresses have `bits` bits, to the state after power-on, and
    /// reads it: as KVM makes it, with what firmware would have set up before a kernel sees it. `hyperv`: its CPUID has
    /// Hyper-V's leaves.
    pub fn power_on(vcpu: &Vcpu, bits: u32, hyperv: bool) -> Result<Self, KvmError> {
        let mut state = Self::capture(vcpu, hyperv)?;
        let firmware = |msr: &kvm_msr_entry| match msr.index {
            MISC_ENABLE => Some(msr.data | FAST_STRINGS),
            hyperv_msr::CRASH_CONTROL => Some(hyperv_msr::CRASH_NOTIFY),
            index => mtrr::value(index, bits),
        };
        let mut changed = Vec::new();
        for msr in &mut state.msrs {
            if let Some(data) = firmware(msr) {
                msr.data = data;
                changed.push(*msr);
            }
        }
        write_msrs(vcpu, &changed)?;
        // Writes the unchanged state: only this call adds the vCPU to KVM's map of APIC IDs, in
        // which KVM looks up the target of an INIT.
        vcpu.fd()
            .set_lapic(&state.lapic)
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        Ok(state)
    }

    /// Puts the vCPU, which is stopped, into this state; its time stamp counter goes in step with the other vCPUs'.
    pub fn restore(&self, vcpu: &Vcpu) -> Result<(), KvmError> {
        let fd = vcpu.fd();
        // The APIC base in the special registers comes before the APIC, the APIC before its timer's MSR.
        fd.set_sregs(&self.special)
            .map_err(KvmError::ioctl("KVM_SET_SREGS"))?;
        fd.set_regs(&self.general)
            .map_err(KvmError::ioctl("KVM_SET_REGS"))?;
        fd.set_xcrs(&self.xcrs).map_err(KvmError::ioctl("KVM_SET_XCRS"))?;
        // SAFETY: the guest has no features enabled (AMX) with which its state is larger than `kvm_xsave`.
        unsafe { fd.set_xsave(&self.xsave) }.map_err(KvmError::ioctl("KVM_SET_XSAVE"))?;
        fd.set_debug_regs(&self.debug)
            .map_err(KvmError::ioctl("KVM_SET_DEBUGREGS"))?;
        fd.set_lapic(&self.lapic)
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;
        write_msrs(vcpu, &self.msrs)?;
        fd.set_vcpu_events(&self.events)
            .map_err(KvmError::ioctl("KVM_SET_VCPU_EVENTS"))?;
        fd.set_mp_state(self.mp_state)
            .map_err(KvmError::ioctl("KVM_SET_MP_STATE"))
    }
}

/// Reads what can be read: `KVM_GET_MSRS` ends at the first MSR that this vCPU does not have.
fn read_msrs(vcpu: &Vcpu, hyperv: bool) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let mut wanted: Vec<kvm_msr_entry> = vcpu
        .vm()
        .msr_numbers()
        .0
        .iter()
        .copied()
        .chain(hyperv_msr::state().filter(|_| hyperv))
        .map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut read: Vec<kvm_msr_entry> = Vec::with_capacity(wanted.len());
    while !wanted.is_empty() {
        let mut msrs = msrs(&wanted)?;
        let count = vcpu
            .fd()
            .get_msrs(&mut msrs)
            .map_err(KvmError::ioctl("KVM_GET_MSRS"))?;
        read.extend(msrs.as_slice().iter().take(count));
        wanted.drain(..count.saturating_add(1).min(wanted.len()));
    }
    for msr in &mut read {
        if msr.index == TSC {
            msr.data = 0;
        }
    }
    Ok(read)
}

/// Writes the writable MSRs. A read-only MSR cannot have changed.
fn write_msrs(vcpu: &Vcpu, mut entries: &[kvm_msr_entry]) -> Result<(), KvmError> {
    while !entries.is_empty() {
        let count = vcpu
            .fd()
            .set_msrs(&msrs(entries)?)
            .map_err(KvmError::ioctl("KVM_SET_MSRS"))?;
        entries = entries.get(count.saturating_add(1)..).unwrap_or_default();
    }
    Ok(())
}

fn msrs(entries: &[kvm_msr_entry]) -> Result<Msrs, KvmError> {
    Msrs::from_entries(entries).map_err(|_| KvmError::Ioctl {
        operation: "building a list of MSRs",
        source: std::io::ErrorKind::OutOfMemory.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory type that the registers give an address (Intel SDM vol. 3, 12.11.4.1).
    fn memory_type(address: u64, bits: u32) -> u64 {
        let value = |msr| mtrr::value(msr, bits).expect("a register that is set");
        assert_eq!(value(0x2ff) >> 10 & 3, 3, "fixed ranges and all are on");
        let fixed = match address {
            0..0x8_0000 => Some((0x250, address >> 16)),
            0x8_0000..0xc_0000 => Some((0x258, (address - 0x8_0000) >> 14)),
            0xc_0000..0x10_0000 => Some((0x268, (address - 0xc_0000) >> 12)),
            _ => None,
        };
        if let Some((first, range)) = fixed {
            let (msr, byte) = (first + u32::try_from(range / 8).unwrap(), range % 8);
            return value(msr) >> (8 * byte) & 0xff;
        }
        let (base, mask) = (value(0x200), value(0x201));
        assert_eq!(mask >> bits, 0, "reserved bits");
        assert_ne!(mask & 1 << 11, 0, "the range is in use");
        let mask = mask & !0xfff;
        if address & mask == base & mask {
            base & 0xff
        } else {
            value(0x2ff) & 0xff
        }
    }

    #[test]
    fn ram_is_cached_and_what_is_not_ram_below_4_gib_is_not() {
        const GIB: u64 = 1 << 30;
        for bits in [36, 39, 46, 52] {
            let last = (1 << bits) - 1;
            for (address, cached) in [
                (0, true),
                (0x9_ffff, true),
                (0xa_0000, false),
                (0xb_ffff, false),
                (0xc_0000, true),
                (0xf_ffff, true),
                (0x10_0000, true),
                (3 * GIB - 1, true),
                (3 * GIB, false),
                (4 * GIB - 1, false),
                (4 * GIB, true),
                (7 * GIB, true),
                (last, true),
            ] {
                let expected = if cached { 6 } else { 0 };
                assert_eq!(
                    memory_type(address, bits),
                    expected,
                    "{address:#x} of {bits} bits"
                );
            }
        }
    }

    #[test]
    fn the_counters_of_a_vm_that_has_any_are_state() {
        let list = [0x10, 0xc1, 0x186, 0xc001_0000, 0xc001_0004, 0xc001_0200];
        let has = |has_counters| MsrNumbers::new(&list, has_counters).0.contains(&0xc001_0004);
        assert!(has(true));
        assert!(!has(false));
    }
}
