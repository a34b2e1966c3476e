//! The I/O APIC and the PICs.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_ioapic_state,
    kvm_ioapic_state__bindgen_ty_1, kvm_irqchip, kvm_irqchip__bindgen_ty_1, kvm_pic_state,
};
use vmm_protocol::state::{InterruptControllers, IoApic, Pic, StateError};

use super::{
    super::{host::KvmError, vm::Vm},
    exactly, narrow, present,
};

/// Inputs of the I/O APIC.
const PINS: usize = 24;

macro_rules! pic {
    ($($register:ident),*) => {
        fn save_pic(pic: &kvm_pic_state) -> Pic {
            Pic { $($register: pic.$register.into()),* }
        }

        fn pic(saved: &Pic) -> Result<kvm_pic_state, StateError> {
            Ok(kvm_pic_state { $($register: narrow(concat!("pic.", stringify!($register)), saved.$register)?),* })
        }
    };
}

pic!(
    last_irr,
    irr,
    imr,
    isr,
    priority_add,
    irq_base,
    read_reg_select,
    poll,
    special_mask,
    init_state,
    auto_eoi,
    rotate_on_auto_eoi,
    special_fully_nested_mode,
    init4,
    elcr,
    elcr_mask
);

fn save_io_apic(chip: &kvm_ioapic_state) -> IoApic {
    IoApic {
        base_address: chip.base_address,
        select: chip.ioregsel,
        id: chip.id,
        irr: chip.irr,
        redirections: chip
            .redirtbl
            .iter()
            // SAFETY: all 64 bits of an entry are in `bits`.
            .map(|entry| unsafe { entry.bits })
            .collect(),
    }
}

fn io_apic(saved: &IoApic) -> Result<kvm_ioapic_state, StateError> {
    let entries: [u64; PINS] = exactly("io_apic.redirections", &saved.redirections)?;
    if saved.irr >> PINS != 0 {
        let why = format!("{:#x} names inputs that are not there", saved.irr);
        return Err(StateError::invalid("io_apic.irr", why));
    }
    Ok(kvm_ioapic_state {
        base_address: saved.base_address,
        ioregsel: saved.select,
        id: saved.id,
        irr: saved.irr,
        pad: 0,
        redirtbl: entries.map(|bits| kvm_ioapic_state__bindgen_ty_1 { bits }),
    })
}

impl Vm {
    /// The I/O APIC and the PICs; with all vCPUs stopped.
    pub fn save_interrupt_controllers(&self) -> Result<InterruptControllers, KvmError> {
        let read = |chip_id| {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            let read = self.fd().get_irqchip(&mut chip);
            read.map_err(KvmError::ioctl("KVM_GET_IRQCHIP"))
                .map(|()| chip.chip)
        };
        let pic = |chip: kvm_irqchip__bindgen_ty_1| {
            // SAFETY: KVM filled the union with a PIC.
            save_pic(unsafe { &chip.pic })
        };
        let chip = read(KVM_IRQCHIP_IOAPIC)?;
        Ok(InterruptControllers {
            master: Some(pic(read(KVM_IRQCHIP_PIC_MASTER)?)),
            slave: Some(pic(read(KVM_IRQCHIP_PIC_SLAVE)?)),
            // SAFETY: KVM filled the union with an I/O APIC.
            io_apic: Some(save_io_apic(unsafe { &chip.ioapic })),
        })
    }

    /// Restores the controllers. Called after the restore of the vCPUs, whose local APICs receive
    /// the I/O APIC's pending interrupts.
    pub fn restore_interrupt_controllers(&self, saved: &InterruptControllers) -> Result<(), StateError> {
        let set = |chip_id, chip| {
            let chip = kvm_irqchip {
                chip_id,
                pad: 0,
                chip,
            };
            let set = self.fd().set_irqchip(&chip);
            set.map_err(KvmError::ioctl("KVM_SET_IRQCHIP"))
        };
        let master = pic(&present("master", saved.master)?)?;
        let slave = pic(&present("slave", saved.slave)?)?;
        let ioapic = io_apic(present("io_apic", saved.io_apic.as_ref())?)?;
        set(KVM_IRQCHIP_PIC_MASTER, kvm_irqchip__bindgen_ty_1 { pic: master })?;
        set(KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip__bindgen_ty_1 { pic: slave })?;
        set(KVM_IRQCHIP_IOAPIC, kvm_irqchip__bindgen_ty_1 { ioapic })?;
        Ok(())
    }
}
