//! The host's KVM: can it be used, and what does it offer?

use std::{
    fs::OpenOptions,
    io,
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    sync::OnceLock,
};

use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_CAP_IOEVENTFD_ANY_LENGTH, KVM_CAP_SYS_HYPERV_CPUID, KVM_MAX_CPUID_ENTRIES,
    KVMIO, Msrs, kvm_cpuid_entry2, kvm_cpuid2, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Kvm};
use vmm_sys_util::{ioctl::ioctl_with_mut_ptr, ioctl_iowr_nr};

ioctl_iowr_nr!(KVM_GET_SUPPORTED_HV_CPUID, KVMIO, 0xc1, kvm_cpuid2);

/// KVM is not available, or lacks a required feature. The messages name the problem and, where
/// possible, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no /dev/kvm.
    #[error(
        "this host has no /dev/kvm: enable virtualization (VT-x or SVM) in its firmware, or in the hypervisor it runs \
         on, and load the kernel module kvm_intel or kvm_amd"
    )]
    Missing,
    /// /dev/kvm may not be opened.
    #[error("no permission to open /dev/kvm: run as root or as a member of the group that owns it (kvm)")]
    Permission,
    /// Something else than KVM was given as /dev/kvm.
    #[error("the file given as /dev/kvm is not KVM")]
    NotKvm,
    /// Not the API that all kernels since 2.6.22 have.
    #[error("this host's KVM has API version {0} instead of {KVM_API_VERSION}: use a mainline kernel")]
    ApiVersion(i32),
    /// Something that every VM needs is not there.
    #[error("this host's KVM lacks {0}: use kernel 5.10 or later with KVM on VT-x or SVM")]
    Capability(&'static str),
    /// More vCPUs than KVM supports.
    #[error("this host's KVM takes at most {max} vCPUs for a VM, not {wanted}")]
    TooManyVcpus {
        /// As asked for.
        wanted: usize,
        /// As KVM says.
        max: usize,
    },
    /// An id that no vCPU of this host's KVM can have.
    #[error("this host's KVM has no vCPU {id}: ids are below {end}")]
    VcpuId {
        /// As asked for.
        id: u32,
        /// As KVM says.
        end: usize,
    },
    /// An ioctl failed.
    #[error("{operation} failed")]
    Ioctl {
        /// Which.
        operation: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl KvmError {
    /// For `map_err` behind an ioctl.
    pub(crate) fn ioctl(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |errno| Self::Ioctl {
            operation,
            source: errno.into(),
        }
    }
}

/// Width of a physical address according to CPUID (leaf 0x8000_0008, EAX, bits 7:0; 36 without it,
/// Intel SDM vol. 3, 4.1.4).
pub(crate) fn address_bits(cpuid: &[kvm_cpuid_entry2]) -> u32 {
    let leaf = cpuid.iter().find(|entry| entry.function == 0x8000_0008);
    leaf.map_or(36, |leaf| leaf.eax & 0xff)
}

/// `MSR_IA32_ARCH_CAPABILITIES`.
pub(crate) const ARCH_CAPABILITIES: u32 = 0x10a;

/// Capabilities that every VM needs.
const REQUIRED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// An open /dev/kvm that has all that is needed.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
    /// Asked for once: KVM executes CPUID some 60 times for it, each of which leaves a host that is a guest itself.
    supported: OnceLock<CpuId>,
}

impl Host {
    /// Opens `/dev/kvm`.
    pub fn open() -> Result<Self, KvmError> {
        Self::open_at("/dev/kvm")
    }

    pub(crate) fn open_at(path: &str) -> Result<Self, KvmError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|source| {
                match source.raw_os_error() {
                    // ENXIO, ENODEV: the node exists, but the module is not loaded.
                    Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => KvmError::Missing,
                    Some(libc::EACCES | libc::EPERM) => KvmError::Permission,
                    _ => KvmError::Ioctl {
                        operation: "open of /dev/kvm",
                        source,
                    },
                }
            })?;
        Self::from_fd(file.into())
    }

    /// Takes an open /dev/kvm.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, KvmError> {
        // SAFETY: the fd is open and has no other owner. If it is another kind of file, ioctls
        // fail, with no other effect.
        let kvm = unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) };
        match kvm.get_api_version() {
            -1 => return Err(KvmError::NotKvm),
            version if u32::try_from(version) != Ok(KVM_API_VERSION) => {
                return Err(KvmError::ApiVersion(version));
            }
            _ => {}
        }
        for (capability, name) in REQUIRED {
            if kvm.check_extension_raw(*capability as libc::c_ulong) <= 0 {
                return Err(KvmError::Capability(name));
            }
        }
        if kvm.check_extension_raw(KVM_CAP_IOEVENTFD_ANY_LENGTH.into()) <= 0 {
            return Err(KvmError::Capability("KVM_CAP_IOEVENTFD_ANY_LENGTH"));
        }
        Ok(Self {
            kvm,
            supported: OnceLock::new(),
        })
    }

    pub(crate) fn kvm(&self) -> &Kvm {
        &self.kvm
    }

    /// The CPUID that KVM supports on this host (`KVM_GET_SUPPORTED_CPUID`).
    pub fn supported_cpuid(&self) -> Result<CpuId, KvmError> {
        if let Some(supported) = self.supported.get() {
            return Ok(supported.clone());
        }
        let supported = self
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(KvmError::ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(self.supported.get_or_init(|| supported).clone())
    }

    /// The leaves of Hyper-V that KVM supports on this host (`KVM_GET_SUPPORTED_HV_CPUID`). `None` for a KVM without them, and
    /// before kernel 5.11, which reports them only for a vCPU.
    pub fn supported_hyperv_cpuid(&self) -> Result<Option<CpuId>, KvmError> {
        /// More than there are.
        const LEAVES: usize = 64;
        const OPERATION: &str = "KVM_GET_SUPPORTED_HV_CPUID";
        if self.kvm.check_extension_raw(KVM_CAP_SYS_HYPERV_CPUID.into()) <= 0 {
            return Ok(None);
        }
        let mut leaves = CpuId::new(LEAVES).map_err(|_| KvmError::Ioctl {
            operation: OPERATION,
            source: io::ErrorKind::OutOfMemory.into(),
        })?;
        // SAFETY: the structure has room for as many entries as its length says, and KVM writes no more than these.
        let result = unsafe {
            ioctl_with_mut_ptr(
                &self.kvm,
                KVM_GET_SUPPORTED_HV_CPUID(),
                leaves.as_mut_fam_struct_ptr(),
            )
        };
        if result < 0 {
            return Err(KvmError::ioctl(OPERATION)(kvm_ioctls::Error::last()));
        }
        Ok(Some(leaves))
    }

    /// IA32_ARCH_CAPABILITIES that KVM gives vCPUs on this host (Intel SDM vol. 4, table 2-2); 0 without that register.
    pub fn arch_capabilities(&self) -> Result<u64, KvmError> {
        let wanted = kvm_msr_entry {
            index: ARCH_CAPABILITIES,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[wanted]).map_err(|_| KvmError::Ioctl {
            operation: "building a list of MSRs",
            source: io::ErrorKind::OutOfMemory.into(),
        })?;
        // A KVM without feature MSRs refuses the call.
        let read = self.kvm.get_msrs(&mut msrs).unwrap_or(0);
        Ok(msrs.as_slice().iter().take(read).next().map_or(0, |msr| msr.data))
    }

    /// A host that supports other features, for tests of machines from other hosts.
    #[cfg(test)]
    pub fn supporting(self, supported: CpuId) -> Self {
        Self {
            supported: OnceLock::from(supported),
            ..self
        }
    }

    /// Whether local APIC timers can count to a TSC value (`KVM_CAP_TSC_DEADLINE_TIMER`).
    pub fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Whether a guest needs a PIT to calibrate its timers. It does not when it learns the TSC's frequency from
    /// kvmclock and its local APIC timers run on the TSC (Linux: `apic_needs_pit`).
    pub(crate) fn needs_pit(&self) -> bool {
        !(self.has_tsc_deadline() && self.kvm.check_extension(Cap::Clocksource))
    }

    /// Whether the processor reports VT-x or SVM. Without either, the host's KVM is a paravirtual
    /// backend. Guest kernels run on such a backend by emulation of single instructions, or not at
    /// all.
    pub fn has_hardware_virtualization() -> bool {
        use std::arch::x86_64::__cpuid;
        const VMX: u32 = 1 << 5;
        const SVM: u32 = 1 << 2;
        let extended = __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).ecx & SVM != 0;
        extended || __cpuid(1).ecx & VMX != 0
    }
}
