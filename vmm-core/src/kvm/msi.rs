//! Message-signalled interrupts.
//!
//! A vector that only this process triggers needs nothing in the kernel: `trigger` is one `KVM_SIGNAL_MSI`, and
//! connecting it (a guest that programs 32 vectors does so 32 times) is a store. Only when somebody asks for the
//! vector's eventfd, to hand it to the kernel, does it get a GSI, a route and an irqfd. The route then stays when the
//! vector is masked, so that unmasking with the same message touches the irqfd alone.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use devices::interrupt::{MsiController, MsiMessage, MsiVector};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_msi,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::vm::Vm;

/// Inputs of the I/O APIC; their GSIs come first.
const IO_APIC_PINS: u32 = 24;
const PIC_PINS: u32 = 8;

/// The part of KVM's GSI routing table that is ours: which GSI sends which message.
pub(super) struct MsiRoutes {
    /// By GSI; `None` until the vector is first connected.
    used: BTreeMap<u32, Option<MsiMessage>>,
    limit: u32,
}

impl MsiRoutes {
    /// A table of which KVM takes `limit` GSIs.
    pub(super) fn new(limit: u32) -> Self {
        Self {
            used: BTreeMap::new(),
            limit,
        }
    }

    fn take(&mut self) -> Option<u32> {
        let gsi = (IO_APIC_PINS..self.limit).find(|gsi| !self.used.contains_key(gsi))?;
        self.used.insert(gsi, None);
        Some(gsi)
    }

    /// The whole table, as `KVM_SET_GSI_ROUTING` wants it: the wired interrupts as they are after
    /// `KVM_CREATE_IRQCHIP`, then ours.
    fn table(&self) -> Vec<kvm_irq_routing_entry> {
        let wired = |gsi, irqchip, pin| kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_IRQCHIP,
            u: kvm_irq_routing_entry__bindgen_ty_1 {
                irqchip: kvm_irq_routing_irqchip { irqchip, pin },
            },
            ..Default::default()
        };
        let io_apic = (0..IO_APIC_PINS).map(|pin| wired(pin, KVM_IRQCHIP_IOAPIC, pin));
        let master = (0..PIC_PINS).map(|pin| wired(pin, KVM_IRQCHIP_PIC_MASTER, pin));
        let slave = (0..PIC_PINS).map(|pin| wired(PIC_PINS | pin, KVM_IRQCHIP_PIC_SLAVE, pin));
        let messages = self
            .used
            .iter()
            .filter_map(|(gsi, message)| Some((*gsi, (*message)?)));
        let messages = messages.map(|(gsi, message)| kvm_irq_routing_entry {
            gsi,
            type_: KVM_IRQ_ROUTING_MSI,
            u: kvm_irq_routing_entry__bindgen_ty_1 {
                msi: kvm_irq_routing_msi {
                    address_lo: low(message.address),
                    address_hi: low(message.address >> 32),
                    data: message.data,
                    ..Default::default()
                },
            },
            ..Default::default()
        });
        io_apic.chain(master).chain(slave).chain(messages).collect()
    }
}

fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0)
}

/// Gives out vectors.
pub(super) struct RoutedMsiController(pub(super) Arc<Vm>);

impl MsiController for RoutedMsiController {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        Ok(Arc::new(Vector {
            vm: Arc::clone(&self.0),
            state: Mutex::default(),
            irqfd: OnceLock::new(),
        }))
    }
}

struct Vector {
    vm: Arc<Vm>,
    /// Held while a message is sent: once `connect(None)` has returned nothing more is sent (PCI 3.0, 6.8.3.3).
    state: Mutex<State>,
    irqfd: OnceLock<(EventFd, u32)>,
}

#[derive(Default)]
struct State {
    message: Option<MsiMessage>,
    /// Whether the irqfd is assigned.
    assigned: bool,
}

impl Vector {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes route and irqfd as `state.message` wants them.
    fn update_irqfd(&self, state: &mut State) -> io::Result<()> {
        let Some((event, gsi)) = self.irqfd.get() else {
            return Ok(());
        };
        match state.message {
            Some(message) => {
                self.route(*gsi, message)?;
                if !state.assigned {
                    self.vm.fd().register_irqfd(event, *gsi)?;
                    state.assigned = true;
                }
            }
            None if state.assigned => {
                self.vm.fd().unregister_irqfd(event, *gsi)?;
                state.assigned = false;
            }
            None => {}
        }
        Ok(())
    }

    fn route(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut routes = self.vm.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if routes.used.get(&gsi) == Some(&Some(message)) {
            return Ok(());
        }
        let before = routes.used.insert(gsi, Some(message)).flatten();
        let set = KvmIrqRouting::from_entries(&routes.table())
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
            .and_then(|table| Ok(self.vm.fd().set_gsi_routing(&table)?));
        if set.is_err() {
            routes.used.insert(gsi, before);
        }
        set
    }

    fn make_irqfd(&self) -> io::Result<(EventFd, u32)> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        let mut routes = self.vm.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let gsi = routes
            .take()
            .ok_or_else(|| io::Error::other("all of KVM's GSIs are in use"))?;
        Ok((event, gsi))
    }
}

impl MsiVector for Vector {
    fn connect(&self, message: Option<MsiMessage>) -> io::Result<()> {
        let mut state = self.state();
        state.message = message;
        self.update_irqfd(&mut state)
    }

    fn trigger(&self) {
        let state = self.state();
        if let Some(message) = state.message {
            let msi = kvm_msi {
                address_lo: low(message.address),
                address_hi: low(message.address >> 32),
                data: message.data,
                ..Default::default()
            };
            // Fails for a message that names no local APIC: the guest's doing, and on hardware lost as well.
            let _ = self.vm.fd().signal_msi(msi);
        }
    }

    fn event(&self) -> Option<&EventFd> {
        let mut state = self.state();
        if self.irqfd.get().is_none() {
            let made = self.make_irqfd();
            let made = made.map(|made| self.irqfd.get_or_init(|| made));
            if let Err(error) = made.map(|_| ()).and_then(|()| self.update_irqfd(&mut state)) {
                tracing::warn!(%error, "no irqfd for an interrupt vector");
                return None;
            }
        }
        self.irqfd.get().map(|(event, _)| event)
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        // Fails for a VM that is going away only.
        let _ = self.connect(None);
        if let Some((_, gsi)) = self.irqfd.get() {
            self.vm
                .routes
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .used
                .remove(gsi);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_keep_wired_interrupts_and_skip_empty_vectors() {
        let mut routes = MsiRoutes::new(27);
        assert_eq!(
            [routes.take(), routes.take(), routes.take(), routes.take()],
            [Some(24), Some(25), Some(26), None]
        );
        let message = MsiMessage {
            address: 0x1_fee0_1000,
            data: 0x41,
        };
        routes.used.insert(25, Some(message));
        let table = routes.table();
        assert_eq!(table.len(), 24 + 16 + 1);
        assert_eq!(table[24 + 8].gsi, 8, "first input of the second PIC");
        let last = table[40];
        assert_eq!((last.gsi, last.type_), (25, KVM_IRQ_ROUTING_MSI));
        // SAFETY: the entry's type says which field is set.
        let msi = unsafe { last.u.msi };
        assert_eq!((msi.address_lo, msi.address_hi, msi.data), (0xfee0_1000, 1, 0x41));
    }
}
