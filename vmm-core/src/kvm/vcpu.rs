//! One vCPU: entering the guest, and carrying out what made it leave.

use std::{io, sync::Arc};

use devices::bus::{Bus, Effect};
use kvm_bindings::{
    CpuId, KVM_CAP_HYPERV_ENFORCE_CPUID, KVM_CAP_HYPERV_SYNIC2, KVM_EXIT_HYPERV_HCALL, KVM_EXIT_IO_OUT,
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, KVM_MP_STATE_HALTED,
    KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, KVMIO, Msrs, kvm_enable_cap,
    kvm_msr_entry, kvm_regs, kvm_run, kvm_sregs, kvm_x86_mce,
};
use kvm_ioctls::{Cap, VcpuExit, VcpuFd};
use vmm_sys_util::{ioctl::ioctl_with_ref, ioctl_iow_nr};

use super::{
    crash::Crash,
    host::{ARCH_CAPABILITIES, KvmError},
    kick::Kicker,
    machine_check,
    stats::StatsReader,
    vcpu_state::hyperv_msr,
    vm::Vm,
};

ioctl_iow_nr!(KVM_X86_SETUP_MCE, KVMIO, 0x9c, u64);
ioctl_iow_nr!(KVM_X86_SET_MCE, KVMIO, 0x9e, kvm_x86_mce);

/// Where a vCPU's port and memory accesses go.
#[derive(Clone)]
pub struct AddressSpaces {
    /// I/O ports.
    pub pio: Arc<Bus>,
    /// Memory that is not RAM.
    pub mmio: Arc<Bus>,
}

/// Why [`Vcpu::enter`] returned.
#[derive(Debug, PartialEq, Eq)]
pub enum Exit {
    /// An access was carried out; it asks this of the machine. The instruction is completed by the next entry.
    Access(Effect),
    /// The guest has reported the end of its system by Hyper-V's crash MSRs, with these parameters.
    Panicked([u64; CRASH_PARAMETERS]),
    /// By a signal, `immediate_exit`, or a vCPU that still waits to be started. No access is pending.
    Interrupted,
    /// The vCPU can't run any further.
    Crashed(Crash),
}

/// Parameters of a crash that a guest reports to Hyper-V. The first one of Windows is the code of its bug check.
pub const CRASH_PARAMETERS: usize = 5;

/// A vCPU. All its ioctls are best done by the thread that runs it.
#[derive(Debug)]
pub struct Vcpu {
    fd: VcpuFd,
    vm: Arc<Vm>,
    id: u32,
}

/// The kinds of exit that have data in `kvm_run`, told apart before it is looked at.
enum Kind {
    Io,
    Exit(Exit),
    Crash,
    Hyperv,
    InternalError,
    Other,
}

impl Vcpu {
    pub(super) fn new(vm: Arc<Vm>, fd: VcpuFd, id: u32) -> Self {
        Self { fd, vm, id }
    }

    pub(super) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// The VM that it belongs to.
    pub fn vm(&self) -> &Arc<Vm> {
        &self.vm
    }

    /// Its local APIC id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Sets what CPUID says; before MSRs are read or set, and before the first entry.
    pub fn set_cpuid(&self, cpuid: &CpuId) -> Result<(), KvmError> {
        self.fd
            .set_cpuid2(cpuid)
            .map_err(KvmError::ioctl("KVM_SET_CPUID2"))
    }

    /// Sets IA32_ARCH_CAPABILITIES to the value that the guest has; after CPUID, and before the first entry.
    pub fn set_arch_capabilities(&self, value: u64) -> Result<(), KvmError> {
        const SETTING: &str = "KVM_SET_MSRS of IA32_ARCH_CAPABILITIES";
        let entry = kvm_msr_entry {
            index: ARCH_CAPABILITIES,
            data: value,
            ..Default::default()
        };
        let refused = |kind: io::ErrorKind| KvmError::Ioctl {
            operation: SETTING,
            source: kind.into(),
        };
        let msrs = Msrs::from_entries(&[entry]).map_err(|_| refused(io::ErrorKind::OutOfMemory))?;
        match self.fd.set_msrs(&msrs).map_err(KvmError::ioctl(SETTING))? {
            0 => Err(refused(io::ErrorKind::InvalidInput)),
            _ => Ok(()),
        }
    }

    /// Turns on Hyper-V's interrupt controller of a vCPU whose CPUID has it, and limits the guest to the features in its CPUID
    /// where KVM can (5.14 and later); before the first entry.
    pub fn enable_hyperv(&self) -> Result<(), KvmError> {
        let enable = |cap: u32, args: [u64; 4]| {
            let cap = kvm_enable_cap {
                cap,
                args,
                ..Default::default()
            };
            self.fd.enable_cap(&cap)
        };
        let has = |cap: u32| self.vm.fd().check_extension_raw(cap.into()) > 0;
        if has(KVM_CAP_HYPERV_SYNIC2) {
            enable(KVM_CAP_HYPERV_SYNIC2, [0; 4])
                .map_err(KvmError::ioctl("KVM_ENABLE_CAP of KVM_CAP_HYPERV_SYNIC2"))?;
        }
        if has(KVM_CAP_HYPERV_ENFORCE_CPUID) {
            enable(KVM_CAP_HYPERV_ENFORCE_CPUID, [1, 0, 0, 0])
                .map_err(KvmError::ioctl("KVM_ENABLE_CAP of KVM_CAP_HYPERV_ENFORCE_CPUID"))?;
        }
        Ok(())
    }

    /// Sets how many machine-check banks it has, or the most that KVM has; before the first entry. KVM's default of 32 costs a
    /// kernel some 200 exits to boot.
    pub fn set_machine_check_banks(&self, banks: u8) -> Result<(), KvmError> {
        // How many there can be; 0 on a KVM without machine checks.
        let most = self.vm.fd().check_extension_int(Cap::Mce);
        let banks = banks.min(u8::try_from(most).unwrap_or(0));
        if banks == 0 {
            return Ok(());
        }
        // `MCG_CAP` (Intel SDM vol. 3, 16.3.1.1): the count, and recovery where KVM has it.
        let count = u64::from(banks);
        let set_up = |capabilities: u64| {
            // SAFETY: the ioctl reads one u64, which lives across the call.
            unsafe { ioctl_with_ref(&self.fd, KVM_X86_SETUP_MCE(), &capabilities) }
        };
        if set_up(count | machine_check::RECOVERY) < 0 && set_up(count) < 0 {
            return Err(KvmError::ioctl("KVM_X86_SETUP_MCE")(kvm_ioctls::Error::last()));
        }
        Ok(())
    }

    /// Has the guest take a machine check, if memory of the host has failed that it used since the last call. Returns the memory's
    /// guest address. A guest that has not enabled machine checks, or is dealing with one, crashes by it.
    pub fn raise_machine_check(&self) -> Result<Option<u64>, KvmError> {
        let Some(address) = machine_check::take() else {
            return Ok(None);
        };
        let record = machine_check::record(address);
        // SAFETY: the ioctl reads one record, which lives across the call.
        let result = unsafe { ioctl_with_ref(&self.fd, KVM_X86_SET_MCE(), &record) };
        if result < 0 {
            return Err(KvmError::ioctl("KVM_X86_SET_MCE")(kvm_ioctls::Error::last()));
        }
        Ok(Some(address))
    }

    /// For other threads to stop it.
    pub fn kicker(&self) -> Result<Kicker, KvmError> {
        Kicker::new(&self.fd)
    }

    /// KVM's statistics of the vCPU (exits by kind), where the kernel has them (5.14 and later).
    pub fn stats(&self) -> Option<StatsReader> {
        StatsReader::open(&self.fd)
    }

    /// Sets general and special registers, each derived from the current values.
    pub fn set_registers(&self, change: impl FnOnce(&mut kvm_sregs) -> kvm_regs) -> Result<(), KvmError> {
        let mut special = self.fd.get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))?;
        let general = change(&mut special);
        self.fd
            .set_sregs(&special)
            .map_err(KvmError::ioctl("KVM_SET_SREGS"))?;
        self.fd
            .set_regs(&general)
            .map_err(KvmError::ioctl("KVM_SET_REGS"))
    }

    /// General registers.
    pub fn registers(&self) -> Result<kvm_regs, KvmError> {
        self.fd.get_regs().map_err(KvmError::ioctl("KVM_GET_REGS"))
    }

    /// Whether it waits for an interrupt, as an idle one does, or runs a program: what no processor does after a panic of Linux, where
    /// one loops in the kernel and the others wait with interrupts off.
    pub fn lives(&self) -> Result<bool, KvmError> {
        const INTERRUPTS: u64 = 1 << 9;
        let state = self
            .fd
            .get_mp_state()
            .map_err(KvmError::ioctl("KVM_GET_MP_STATE"))?;
        if state.mp_state == KVM_MP_STATE_HALTED {
            return Ok(self.registers()?.rflags & INTERRUPTS != 0);
        }
        let special = self.fd.get_sregs().map_err(KvmError::ioctl("KVM_GET_SREGS"))?;
        // One that was never started has its state after power-on, without a stack of a program.
        Ok(special.ss.dpl == 3)
    }

    /// Sends a non-maskable interrupt, if the local APIC takes one at LINT1: the input that the ACPI tables name for it, and that a
    /// system leaves open for the vCPUs that are to react.
    pub fn inject_nmi(&self) -> Result<(), KvmError> {
        /// Register of LINT1; its delivery mode NMI, and its mask (Intel SDM vol. 3, 12.5.1).
        const LINT1: usize = 0x360;
        const MODE: u32 = 0x700;
        const MODE_NMI: u32 = 0x400;
        const MASKED: u32 = 1 << 16;
        let apic = self.fd.get_lapic().map_err(KvmError::ioctl("KVM_GET_LAPIC"))?;
        let bytes = apic.regs.get(LINT1..).and_then(|rest| rest.first_chunk());
        let entry = bytes.map_or(MASKED, |bytes| {
            u32::from_le_bytes(bytes.map(std::ffi::c_char::cast_unsigned))
        });
        if entry & (MODE | MASKED) != MODE_NMI {
            return Ok(());
        }
        self.fd.nmi().map_err(KvmError::ioctl("KVM_NMI"))
    }

    /// Reports the stop to the guest, so that the guest's watchdogs do not trigger
    /// (`KVM_KVMCLOCK_CTRL`).
    pub fn note_pause(&self) {
        // KVM refuses this if the guest does not use kvmclock, and then no report is needed.
        let _ = self.fd.kvmclock_ctrl();
    }

    /// Runs the guest until an exit that KVM cannot handle alone.
    ///
    /// This function performs accesses on `spaces`, and accesses to several elements (`rep outs`)
    /// one by one. To stop without a partial access, set the [`Kicker`] and call this function
    /// until it returns `Interrupted`: KVM completes pending accesses first.
    pub fn enter(&mut self, spaces: &AddressSpaces) -> Result<Exit, KvmError> {
        machine_check::set_in_guest(true);
        let exit = self.fd.run();
        machine_check::set_in_guest(false);
        let kind = match exit {
            Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => Kind::Io,
            Ok(VcpuExit::MmioRead(address, data)) => {
                spaces.mmio.read(address, data);
                Kind::Exit(Exit::Access(Effect::None))
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                Kind::Exit(Exit::Access(spaces.mmio.write(address, data)))
            }
            Ok(VcpuExit::Intr) => Kind::Exit(Exit::Interrupted),
            Ok(VcpuExit::Shutdown) => Kind::Exit(Exit::Crashed(Crash::TripleFault)),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                Kind::Exit(Exit::Crashed(Crash::FailEntry { reason, cpu }))
            }
            Ok(VcpuExit::MemoryFault { gpa, .. }) => {
                Kind::Exit(Exit::Crashed(Crash::MemoryFault { address: gpa }))
            }
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _)) => Kind::Crash,
            Ok(VcpuExit::Hyperv) => Kind::Hyperv,
            Ok(VcpuExit::SystemEvent(event, _)) => Kind::Exit(system_event(event)),
            Ok(VcpuExit::InternalError) => Kind::InternalError,
            Ok(_) => Kind::Other,
            Err(errno) if matches!(errno.errno(), libc::EINTR | libc::EAGAIN) => {
                Kind::Exit(Exit::Interrupted)
            }
            Err(errno) => return Err(KvmError::ioctl("KVM_RUN")(errno)),
        };
        Ok(match kind {
            Kind::Exit(exit) => exit,
            Kind::Io => Exit::Access(self.port_access(&spaces.pio)),
            Kind::Crash => Exit::Panicked(self.crash_parameters()?),
            Kind::Hyperv => {
                self.refuse_hypercall();
                Exit::Access(Effect::None)
            }
            Kind::InternalError => Exit::Crashed(self.internal_error()),
            Kind::Other => Exit::Crashed(Crash::Unexpected {
                reason: self.fd.get_kvm_run().exit_reason,
            }),
        })
    }

    /// Carries out a port access: `count` elements of `size` bytes, which lie in the pages behind `kvm_run`.
    fn port_access(&mut self, bus: &Bus) -> Effect {
        let pages = self.vm.fd().run_size();
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // SAFETY: `run` is the mapped page of this vCPU, which is not in the guest.
        let shared = unsafe { &(*run).__bindgen_anon_1 };
        // SAFETY: the exit reason says that this field is set.
        let io = unsafe { shared.io };
        let size = usize::from(io.size);
        let Some((offset, length)) = usize::try_from(io.data_offset)
            .ok()
            .zip(
                usize::try_from(io.count)
                    .ok()
                    .and_then(|count| count.checked_mul(size)),
            )
            .filter(|(offset, length)| offset.checked_add(*length).is_some_and(|end| end <= pages))
        else {
            return Effect::None;
        };
        // SAFETY: within the pages that are mapped behind `run`, as was just checked.
        let data = unsafe { run.cast::<u8>().add(offset) };
        // SAFETY: as above; no other code accesses the pages while the vCPU is not in the guest.
        let data = unsafe { std::slice::from_raw_parts_mut(data, length) };

        let mut effect = Effect::None;
        for element in data.chunks_mut(size.max(1)) {
            if u32::from(io.direction) != KVM_EXIT_IO_OUT {
                bus.read(io.port.into(), element);
                continue;
            }
            match bus.write(io.port.into(), element) {
                Effect::None => {}
                ends @ (Effect::Reset | Effect::PowerOff) => return ends,
                other => effect = other,
            }
        }
        effect
    }

    /// The parameters of the crash that the guest has reported (TLFS 2.5, `HV_X64_MSR_CRASH_P0` to `P4`).
    fn crash_parameters(&self) -> Result<[u64; CRASH_PARAMETERS], KvmError> {
        const OPERATION: &str = "KVM_GET_MSRS of Hyper-V's crash parameters";
        let wanted = hyperv_msr::CRASH_PARAMETERS.map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        });
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| KvmError::Ioctl {
            operation: OPERATION,
            source: io::ErrorKind::OutOfMemory.into(),
        })?;
        let read = self.fd.get_msrs(&mut msrs).map_err(KvmError::ioctl(OPERATION))?;
        let mut parameters = [0; CRASH_PARAMETERS];
        for (to, msr) in parameters.iter_mut().zip(msrs.as_slice().iter().take(read)) {
            *to = msr.data;
        }
        Ok(parameters)
    }

    /// Answers an exit for Hyper-V's interface. A changed register of the interrupt controller needs no action. A hypercall that
    /// KVM leaves to this process is for devices that the machine does not have.
    fn refuse_hypercall(&mut self) {
        /// `HV_STATUS_INVALID_HYPERCALL_CODE` (TLFS, appendix B).
        const INVALID_CODE: u64 = 2;
        let shared = &mut self.fd.get_kvm_run().__bindgen_anon_1;
        // SAFETY: the exit reason says that this field is set.
        let hyperv = unsafe { &mut shared.hyperv };
        if hyperv.type_ == KVM_EXIT_HYPERV_HCALL {
            hyperv.u.hcall.result = INVALID_CODE;
        }
    }

    fn internal_error(&mut self) -> Crash {
        let rip = self.fd.get_regs().map_or(0, |regs| regs.rip);
        let shared = &self.fd.get_kvm_run().__bindgen_anon_1;
        // SAFETY: the exit reason says that this field is set.
        let internal = unsafe { shared.internal };
        if internal.suberror != KVM_INTERNAL_ERROR_EMULATION {
            let count = usize::try_from(internal.ndata)
                .unwrap_or(0)
                .min(internal.data.len());
            return Crash::Internal {
                suberror: internal.suberror,
                data: internal.data.iter().take(count).copied().collect(),
            };
        }
        // SAFETY: the suberror says that this field is set; `ndata` and `flags` say how much of it.
        let failure = unsafe { shared.emulation_failure };
        let told = failure.ndata >= 3
            && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
        if !told {
            return Crash::emulation(rip, Vec::new());
        }
        // SAFETY: plain bytes in each variant.
        let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        let count = usize::from(instruction.insn_size).min(instruction.insn_bytes.len());
        Crash::emulation(rip, instruction.insn_bytes.iter().take(count).copied().collect())
    }
}

fn system_event(event: u32) -> Exit {
    match event {
        KVM_SYSTEM_EVENT_SHUTDOWN => Exit::Access(Effect::PowerOff),
        KVM_SYSTEM_EVENT_RESET => Exit::Access(Effect::Reset),
        _ => Exit::Crashed(Crash::Unexpected {
            reason: kvm_bindings::KVM_EXIT_SYSTEM_EVENT,
        }),
    }
}
