//! One vCPU.

use std::collections::BTreeSet;

use kvm_bindings::{
    KVM_STATE_NESTED_FORMAT_VMX, KVM_STATE_NESTED_GUEST_MODE, KVM_STATE_NESTED_RUN_PENDING, kvm_lapic_state,
    kvm_mp_state, nested::KvmNestedStateBuffer,
};
use kvm_ioctls::Cap;
use vmm_protocol::state::{self, StateError};

use super::{
    super::{host::KvmError, vcpu::Vcpu, vcpu_state::VcpuState},
    TscShift, events, exactly, msrs, present, registers, tsc, xsave,
};

impl Vcpu {
    /// The state in the form in which it moves. The vCPU is stopped with no access half done; `power_on` is its state after
    /// power-on.
    pub fn save(&self, power_on: &VcpuState) -> Result<state::Vcpu, StateError> {
        let fd = self.fd();
        self.check_nested()?;
        // First: reading it lets KVM act on pending INIT and SIPI, which changes what follows.
        let mp_state = fd.get_mp_state().map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?;
        let mut indices: Vec<u32> = power_on.msr_indices().collect();
        let has_deadline = power_on.has_deadline();
        indices.retain(|index| !is_of_the_clock(*index));
        let general = fd.get_regs().map_err(KvmError::ioctl("KVM_GET_REGS"))?;
        let xcrs = fd.get_xcrs().map_err(KvmError::ioctl("KVM_GET_XCRS"))?;
        let debug = fd
            .get_debug_regs()
            .map_err(KvmError::ioctl("KVM_GET_DEBUGREGS"))?;
        let events = fd
            .get_vcpu_events()
            .map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?;
        let local_apic = fd.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?;
        Ok(state::Vcpu {
            mp_state: mp_state.mp_state,
            general: Some(registers::save_general(&general)),
            special: Some(registers::save_special(self)?),
            xcrs: registers::save_xcrs(&xcrs),
            xsave: xsave::save(self)?,
            debug: Some(registers::save_debug(&debug)),
            events: Some(events::save(&events)),
            local_apic: local_apic
                .regs
                .iter()
                .flat_map(|byte| byte.to_ne_bytes())
                .collect(),
            msrs: msrs::read(self, &indices)?,
            tsc: Some(tsc::save(self, has_deadline)?),
        })
    }

    /// Restores a saved state to a vCPU that has never run and whose CPUID is set. The first vCPU
    /// of a machine is restored first, without a shift; its result is the shift for all others.
    pub fn restore(
        &self,
        power_on: &VcpuState,
        saved: state::Vcpu,
        shift: Option<TscShift>,
    ) -> Result<TscShift, StateError> {
        let fd = self.fd();
        // The APIC base in the special registers comes before the APIC, the APIC and the counter before the deadline, MSRs
        // before events, whose delivery some of them change.
        registers::restore_special(self, &present("special", saved.special)?)?;
        let general = registers::general(&present("general", saved.general)?);
        fd.set_regs(&general).map_err(KvmError::ioctl("KVM_SET_REGS"))?;
        fd.set_xcrs(&registers::xcrs(&saved.xcrs)?)
            .map_err(KvmError::ioctl("KVM_SET_XCRS"))?;
        xsave::restore(self, &saved.xsave)?;
        let debug = registers::debug(&present("debug", saved.debug)?)?;
        fd.set_debug_regs(&debug)
            .map_err(KvmError::ioctl("KVM_SET_DEBUGREGS"))?;
        let bytes: [u8; 1024] = exactly("local_apic", &saved.local_apic)?;
        let regs = bytes.map(|byte| std::ffi::c_char::from_ne_bytes([byte]));
        fd.set_lapic(&kvm_lapic_state { regs })
            .map_err(KvmError::ioctl("KVM_SET_LAPIC"))?;

        let clock = present("tsc", saved.tsc)?;
        let shift = tsc::restore(self, &clock, shift)?;
        let known: BTreeSet<u32> = power_on
            .msr_indices()
            .filter(|index| !is_of_the_clock(*index))
            .collect();
        msrs::write(self, &saved.msrs, &known)?;
        if clock.deadline != 0 {
            msrs::write_one(self, tsc::TSC_DEADLINE, clock.deadline)?;
        }
        let here = fd
            .get_vcpu_events()
            .map_err(KvmError::ioctl("KVM_GET_VCPU_EVENTS"))?;
        let events = events::events(&present("events", saved.events)?, &here)?;
        fd.set_vcpu_events(&events)
            .map_err(KvmError::ioctl("KVM_SET_VCPU_EVENTS"))?;
        let mp_state = saved.mp_state;
        fd.set_mp_state(kvm_mp_state { mp_state })
            .map_err(KvmError::ioctl("KVM_SET_MP_STATE"))?;
        Ok(shift)
    }

    /// CPUID offers no nested virtualization to guests, so the saved state excludes it. A guest
    /// that uses it regardless is not migrated.
    fn check_nested(&self) -> Result<(), StateError> {
        /// `hdr.vmx.vmxon_pa` outside VMX operation.
        const NO_VMXON: u64 = u64::MAX;
        let size = self.vm().fd().check_extension_int(Cap::NestedState);
        if size <= 0 {
            return Ok(());
        }
        let mut buffer = KvmNestedStateBuffer::empty();
        self.fd()
            .nested_state(&mut buffer)
            .map_err(KvmError::ioctl("KVM_GET_NESTED_STATE"))?;
        let busy =
            u32::from(buffer.flags) & (KVM_STATE_NESTED_GUEST_MODE | KVM_STATE_NESTED_RUN_PENDING) != 0;
        let in_vmx = u32::from(buffer.format) == KVM_STATE_NESTED_FORMAT_VMX && {
            // SAFETY: the format says which header is set.
            let vmx = unsafe { buffer.hdr.vmx };
            vmx.vmxon_pa != NO_VMXON
        };
        if busy || in_vmx {
            let reason = "the guest runs guests of its own";
            return Err(StateError::not_migratable(&format!("vCPU {}", self.id()), reason));
        }
        Ok(())
    }
}

impl VcpuState {
    /// Whether IA32_TSC_DEADLINE is state of the vCPU.
    pub fn has_deadline(&self) -> bool {
        self.msr_indices().any(|index| index == tsc::TSC_DEADLINE)
    }
}

/// Saved with the clock, not with the other MSRs.
fn is_of_the_clock(msr: u32) -> bool {
    matches!(msr, tsc::TSC | tsc::TSC_DEADLINE)
}
