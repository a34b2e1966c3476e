//! Wired interrupts, notifications, and the state of the in-kernel interrupt controllers.

use std::{io, sync::Arc};

use devices::interrupt::{IrqLine, LevelLine, NotifyAddress, NotifyRegistry};
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{host::KvmError, vm::Vm};

/// An input of the interrupt controllers behind an irqfd: a pulse is one write.
struct Line {
    event: EventFd,
}

impl IrqLine for Line {
    fn pulse(&self) {
        // Fails only when 2^64 - 1 pulses are pending, which an irqfd never leaves.
        let _ = self.event.write(1);
    }
}

pub(super) fn line(vm: &Vm, gsi: u32) -> Result<Arc<dyn IrqLine>, KvmError> {
    let event = EventFd::new(EFD_NONBLOCK).map_err(|source| KvmError::Ioctl {
        operation: "eventfd",
        source,
    })?;
    vm.fd()
        .register_irqfd(&event, gsi)
        .map_err(KvmError::ioctl("KVM_IRQFD"))?;
    Ok(Arc::new(Line { event }))
}

/// An input whose level this process sets. One that is masked, or not set up yet, keeps its level; the guest sees it when
/// it unmasks the input.
pub(super) struct Level {
    pub(super) vm: Arc<Vm>,
    pub(super) gsi: u32,
}

impl LevelLine for Level {
    fn set(&self, high: bool) {
        if let Err(error) = self.vm.fd().set_irq_line(self.gsi, high) {
            tracing::error!(gsi = self.gsi, %error, "KVM_IRQ_LINE");
        }
    }
}

/// Notifications by ioeventfd.
pub(super) struct IoEvents(pub(super) Arc<Vm>);

fn address(address: NotifyAddress) -> IoEventAddress {
    match address {
        NotifyAddress::Mmio(address) => IoEventAddress::Mmio(address),
        NotifyAddress::Pio(port) => IoEventAddress::Pio(port.into()),
    }
}

impl NotifyRegistry for IoEvents {
    fn register(&self, at: NotifyAddress, event: &EventFd) -> io::Result<()> {
        // Length 0: any width. For MMIO it is also the quickest: KVM does not decode the instruction (fast MMIO bus).
        Ok(self.0.fd().register_ioevent(event, &address(at), NoDatamatch)?)
    }

    fn unregister(&self, at: NotifyAddress, event: &EventFd) -> io::Result<()> {
        Ok(self.0.fd().unregister_ioevent(event, &address(at), NoDatamatch)?)
    }
}

/// Registers of the in-kernel PICs and the I/O APIC, and of the PIT, if the VM has one.
#[derive(Clone)]
pub struct IrqChipState {
    chips: [kvm_irqchip; 3],
    pit: Option<kvm_pit_state2>,
}

impl std::fmt::Debug for IrqChipState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IrqChipState")
    }
}

impl IrqChipState {
    /// Reads them; with all vCPUs stopped. Right after the VM's creation this is the power-on state.
    pub fn capture(vm: &Vm) -> Result<Self, KvmError> {
        let mut chips =
            [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC].map(|chip_id| kvm_irqchip {
                chip_id,
                ..Default::default()
            });
        for chip in &mut chips {
            vm.fd()
                .get_irqchip(chip)
                .map_err(KvmError::ioctl("KVM_GET_IRQCHIP"))?;
        }
        let pit = vm.has_pit().then(|| vm.fd().get_pit2());
        let pit = pit.transpose().map_err(KvmError::ioctl("KVM_GET_PIT2"))?;
        Ok(Self { chips, pit })
    }

    /// Sets them; with all vCPUs stopped. The PIT's channels restart their counts.
    pub fn restore(&self, vm: &Vm) -> Result<(), KvmError> {
        // The PIT first: what its timer raises until then is forgotten with the inputs of the other chips.
        if let Some(pit) = &self.pit {
            vm.fd().set_pit2(pit).map_err(KvmError::ioctl("KVM_SET_PIT2"))?;
        }
        for chip in &self.chips {
            vm.fd()
                .set_irqchip(chip)
                .map_err(KvmError::ioctl("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use devices::legacy::pm::PowerButton;

    use super::{super::Host, *};

    const BUTTON: u32 = 17;

    /// Whether the input of the power button is pending in the I/O APIC, where all inputs are masked after power-on.
    fn is_pending(vm: &Vm) -> bool {
        let [_, _, chip] = IrqChipState::capture(vm).unwrap().chips;
        // SAFETY: the chip was read as an I/O APIC.
        let ioapic = unsafe { chip.chip.ioapic };
        ioapic.irr & 1 << BUTTON != 0
    }

    #[test]
    fn pit_has_its_power_on_state_after_a_reset() {
        let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
        let vm = Vm::create_with(&host, true).unwrap();
        let channels = || vm.save_pit().unwrap().unwrap().channels;
        let (power_on, before) = (IrqChipState::capture(&vm).unwrap(), channels());
        // A periodic timer, as an operating system programs it.
        let mut programmed = vm.fd().get_pit2().unwrap();
        (programmed.channels[0].mode, programmed.channels[0].count) = (2, 1193);
        vm.fd().set_pit2(&programmed).unwrap();
        assert_ne!(channels(), before);
        power_on.restore(&vm).unwrap();
        assert_eq!(channels(), before);
    }

    #[test]
    fn masked_press_stays_pending_after_a_controller_reset() {
        let host = Host::open().unwrap_or_else(|error| panic!("these tests need KVM: {error}"));
        let vm = Vm::create(&host).unwrap();
        let power_on = IrqChipState::capture(&vm).unwrap();
        let button = PowerButton::new(vm.level_line(BUTTON));
        assert!(!is_pending(&vm));
        button.press();
        assert!(is_pending(&vm));
        power_on.restore(&vm).unwrap();
        assert!(!is_pending(&vm), "the controllers have forgotten it");
        button.refresh();
        assert!(is_pending(&vm));
        let register = button.register();
        let _none = register.lock().unwrap().write(0, &[1]);
        assert!(!is_pending(&vm));
    }
}
