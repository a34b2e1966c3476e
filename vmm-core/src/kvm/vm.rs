//! A virtual machine in KVM: memory slots, clock, in-kernel interrupt controllers.

use std::{
    fmt,
    os::fd::AsRawFd,
    sync::{Arc, Mutex},
};

use devices::interrupt::{IrqLine, LevelLine, MsiController, NotifyRegistry};
use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, KVM_CLOCK_TSC_STABLE,
    KVM_PIT_SPEAKER_DUMMY, KVM_PMU_CAP_DISABLE, kvm_clock_data, kvm_enable_cap, kvm_pit_config,
};
use kvm_ioctls::{Cap, VmFd};

use super::{
    host::{Host, KvmError},
    irqchip,
    msi::{MsiRoutes, RoutedMsiController},
    saved,
    slots::{SlotError, Slots},
    stats::StatsReader,
    vcpu::Vcpu,
    vcpu_state::MsrNumbers,
};
use crate::memory::{GuestRam, layout};

/// A virtual machine. vCPUs, interrupts and notifications hold on to it.
pub struct Vm {
    /// Before `slots`: KVM lets go of the memory before it is unmapped.
    fd: VmFd,
    pub(super) slots: Slots,
    pub(super) routes: Mutex<MsiRoutes>,
    msr_numbers: MsrNumbers,
    max_vcpus: usize,
    has_pit: bool,
    /// Ids of vCPUs are below it.
    max_vcpu_id: usize,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("fd", &self.fd.as_raw_fd())
            .finish_non_exhaustive()
    }
}

/// kvmclock as the guest reads it, to carry the clock across a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Nanoseconds since the VM's creation, less its pauses.
    pub nanoseconds: u64,
    /// The host's real time at that moment, in nanoseconds since 1970, if the kernel reports it
    /// (5.16 and later).
    pub realtime_ns: Option<u64>,
    /// The host's time stamp counter at that moment, if the kernel reports it.
    pub host_tsc: Option<u64>,
}

/// Disables the performance counters, if the kernel can (5.18 and later), and returns whether it
/// did. CPUID reports no counters. AMD's oldest counters need no CPUID bit, so a guest finds them
/// by trial.
fn disable_counters(fd: &VmFd) -> Result<bool, KvmError> {
    let supported = fd.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if u32::try_from(supported).unwrap_or(0) & KVM_PMU_CAP_DISABLE == 0 {
        return Ok(false);
    }
    fd.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_PMU_CAPABILITY,
        args: [KVM_PMU_CAP_DISABLE.into(), 0, 0, 0],
        ..Default::default()
    })
    .map_err(KvmError::ioctl("KVM_ENABLE_CAP of KVM_PMU_CAP_DISABLE"))?;
    Ok(true)
}

impl Vm {
    /// Makes a VM with in-kernel interrupt controllers, and a PIT if guests can't do without one on this host.
    pub fn create(host: &Host) -> Result<Arc<Self>, KvmError> {
        Self::create_with(host, host.needs_pit())
    }

    pub(super) fn create_with(host: &Host, has_pit: bool) -> Result<Arc<Self>, KvmError> {
        let fd = loop {
            match host.kvm().create_vm() {
                // The kernel gives up for signals while it registers with its MMU notifiers.
                Err(errno) if errno.errno() == libc::EINTR => {}
                other => break other.map_err(KvmError::ioctl("KVM_CREATE_VM"))?,
            }
        };
        fd.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(KvmError::ioctl("KVM_SET_IDENTITY_MAP_ADDR"))?;
        let tss = usize::try_from(layout::KVM_TSS).map_err(|_| KvmError::Capability("a 64-bit host"))?;
        fd.set_tss_address(tss)
            .map_err(KvmError::ioctl("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip()
            .map_err(KvmError::ioctl("KVM_CREATE_IRQCHIP"))?;
        if has_pit {
            let config = kvm_pit_config {
                flags: KVM_PIT_SPEAKER_DUMMY,
                ..Default::default()
            };
            fd.create_pit2(config)
                .map_err(KvmError::ioctl("KVM_CREATE_PIT2"))?;
        }
        let has_counters = !disable_counters(&fd)?;
        let indices = host
            .kvm()
            .get_msr_index_list()
            .map_err(KvmError::ioctl("KVM_GET_MSR_INDEX_LIST"))?;
        let routes = fd.check_extension_int(Cap::IrqRouting);
        saved::enable_events(&fd)?;
        let slots = Slots::new(&fd)?;
        Ok(Arc::new(Self {
            fd,
            slots,
            routes: Mutex::new(MsiRoutes::new(u32::try_from(routes).unwrap_or(0))),
            msr_numbers: MsrNumbers::new(indices.as_slice(), has_counters),
            max_vcpus: host.kvm().get_max_vcpus(),
            has_pit,
            max_vcpu_id: host.kvm().get_max_vcpu_id(),
        }))
    }

    pub(super) fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Gives the guest its RAM: one memory slot per region.
    pub fn set_ram(&self, ram: &GuestRam) -> Result<(), SlotError> {
        for region in ram.regions() {
            self.add_slot(region)?;
        }
        Ok(())
    }

    /// Makes vCPU `id`, whose local APIC id it also is.
    pub fn create_vcpu(self: &Arc<Self>, id: u32) -> Result<Vcpu, KvmError> {
        if usize::try_from(id).is_ok_and(|id| id >= self.max_vcpu_id) {
            return Err(KvmError::VcpuId {
                id,
                end: self.max_vcpu_id,
            });
        }
        let fd = self
            .fd
            .create_vcpu(id.into())
            .map_err(KvmError::ioctl("KVM_CREATE_VCPU"))?;
        Ok(Vcpu::new(Arc::clone(self), fd, id))
    }

    /// Whether the guest has a PIT.
    pub fn has_pit(&self) -> bool {
        self.has_pit
    }

    /// How many vCPUs a VM can have on this host.
    pub fn max_vcpus(&self) -> usize {
        self.max_vcpus
    }

    /// The MSRs that make up a vCPU's state on this host.
    pub fn msr_numbers(&self) -> &MsrNumbers {
        &self.msr_numbers
    }

    /// The interrupt line `gsi` (input of the I/O APIC, 0 to 23, and of the PICs up to 15), edge-triggered.
    pub fn irq_line(&self, gsi: u32) -> Result<Arc<dyn IrqLine>, KvmError> {
        irqchip::line(self, gsi)
    }

    /// The interrupt line `gsi` (input of the I/O APIC, 0 to 23, and of the PICs up to 15), level-triggered.
    pub fn level_line(self: &Arc<Self>, gsi: u32) -> Arc<dyn LevelLine> {
        Arc::new(irqchip::Level {
            vm: Arc::clone(self),
            gsi,
        })
    }

    /// Gives out message-signalled interrupts.
    pub fn msi_controller(self: &Arc<Self>) -> Arc<dyn MsiController> {
        Arc::new(RoutedMsiController(Arc::clone(self)))
    }

    /// Takes notification addresses.
    pub fn notify_registry(self: &Arc<Self>) -> Arc<dyn NotifyRegistry> {
        Arc::new(irqchip::IoEvents(Arc::clone(self)))
    }

    /// Reads kvmclock; with all vCPUs stopped.
    pub fn clock(&self) -> Result<Clock, KvmError> {
        let data = self.fd.get_clock().map_err(KvmError::ioctl("KVM_GET_CLOCK"))?;
        Ok(Clock {
            nanoseconds: data.clock,
            realtime_ns: (data.flags & KVM_CLOCK_REALTIME != 0).then_some(data.realtime),
            host_tsc: (data.flags & KVM_CLOCK_HOST_TSC != 0).then_some(data.host_tsc),
        })
    }

    /// Sets kvmclock back to `clock`, however much time has passed; called before vCPUs run again.
    /// Each vCPU reports the stop to its guest separately (`KVM_KVMCLOCK_CTRL`).
    pub fn set_clock(&self, clock: Clock) -> Result<(), KvmError> {
        let data = kvm_clock_data {
            clock: clock.nanoseconds,
            ..Default::default()
        };
        self.fd.set_clock(&data).map_err(KvmError::ioctl("KVM_SET_CLOCK"))
    }

    /// Sets kvmclock to `clock` plus the host's real time since then; otherwise like
    /// [`Vm::set_clock`]. If the kernel did not report the real time at that moment, kvmclock
    /// continues from `clock`.
    pub fn set_clock_caught_up(&self, clock: Clock) -> Result<(), KvmError> {
        let Some(realtime) = clock.realtime_ns else {
            return self.set_clock(clock);
        };
        let data = kvm_clock_data {
            clock: clock.nanoseconds,
            flags: KVM_CLOCK_REALTIME,
            realtime,
            ..Default::default()
        };
        self.fd.set_clock(&data).map_err(KvmError::ioctl("KVM_SET_CLOCK"))
    }

    /// Whether the guest's clock is exact across vCPUs (`KVM_CLOCK_TSC_STABLE`).
    pub fn is_clock_stable(&self) -> bool {
        self.fd
            .get_clock()
            .is_ok_and(|clock| clock.flags & KVM_CLOCK_TSC_STABLE != 0)
    }

    /// KVM's statistics of the VM (page faults, MMU), where the kernel has them (5.14 and later).
    pub fn stats(&self) -> Option<StatsReader> {
        StatsReader::open(&self.fd)
    }
}
