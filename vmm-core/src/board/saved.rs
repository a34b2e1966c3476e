//! The state of a whole machine: one section for each component, and a header with the
//! configuration from the assembly.
//!
//! Snapshots and migrations use only this state. Guest memory and the content of disks are not part
//! of it: both must be complete when the state is restored.
//!
//! [`Component`](devices::component::Component) documents the order of a save and of a restore, and
//! the reasons.
//!
//! A state that is read back is untrusted. Before any change, the header is compared, and each
//! section has found its component. A restore consumes the machine: after a failed restore, the
//! caller can only drop the machine.

mod header;
mod sections;
#[cfg(test)]
mod tests;

use std::sync::atomic::Ordering;

use vmm_protocol::{
    state::{self, MachineHeader, Section, StateError},
    vmm::ErrorKind,
};

pub(super) use self::header::header;
use self::sections::Sections;
use super::machine::Machine;
use crate::{
    kvm::GuestTime,
    lifecycle::{Failure, Notice, with_causes},
};

/// Ids of the sections that belong to no device.
const HEADER: &str = "machine";
const CONTROLLERS: &str = "interrupt-controllers";
const PIT: &str = "pit";
const CLOCK: &str = "kvmclock";
const PCI_ROOT: &str = "pci-root";
const HOT_PLUG: &str = "hot-plug";

/// Operation and object of a failure before anything is restored.
pub(super) const CHECKING: (&str, &str) = ("checking", "the machine's state");

fn vcpu(index: usize) -> String {
    format!("vcpu {index}")
}

/// The header of a saved machine.
pub(super) fn header_of(saved: &state::Machine) -> Result<MachineHeader, Failure> {
    let header = saved.sections.iter().find(|section| section.id == HEADER);
    let missing = || StateError::Missing {
        id: HEADER.to_owned(),
    };
    let header = header.ok_or_else(missing).and_then(Section::open);
    header.map_err(failed(CHECKING.0, CHECKING.1))
}

/// Makes a failure of `operation` on `part`.
pub(super) fn failed<E: Into<StateError>>(operation: &str, part: &str) -> impl Fn(E) -> Failure {
    move |error| {
        let error = error.into();
        Failure::of(
            match error {
                StateError::NotMigratable { .. } => ErrorKind::State,
                StateError::Host(..) => ErrorKind::Internal,
                _ => ErrorKind::Invalid,
            },
            format!("{operation} {part}: {}", with_causes(&error)),
        )
    }
}

/// Subtracts the counters' advance since the pause from their values, so that the values match the
/// kvmclock of the pause.
fn at_the_pause(mut vcpus: Vec<state::Vcpu>, paused: GuestTime) -> Vec<state::Vcpu> {
    let first = vcpus.first().and_then(|vcpu| vcpu.tsc);
    let since = first.map_or(0, |counter| counter.value.wrapping_sub(paused.counter));
    for counter in vcpus.iter_mut().filter_map(|vcpu| vcpu.tsc.as_mut()) {
        counter.value = counter.value.wrapping_sub(since);
    }
    vcpus
}

/// Decoded state that is restored in addition to the components.
struct Core {
    vcpus: Vec<state::Vcpu>,
    controllers: state::InterruptControllers,
    pit: Option<state::Pit>,
    clock: state::Clock,
    panicked: bool,
}

impl Core {
    fn take(
        sections: &mut Sections,
        vcpus: usize,
        has_pit: bool,
        panicked: bool,
    ) -> Result<Self, StateError> {
        Ok(Self {
            panicked,
            vcpus: (0..vcpus)
                .map(|index| sections.open(&vcpu(index)))
                .collect::<Result<_, _>>()?,
            controllers: sections.open(CONTROLLERS)?,
            pit: has_pit.then(|| sections.open(PIT)).transpose()?,
            clock: sections.open(CLOCK)?,
        })
    }
}

impl Machine {
    /// Returns the state of the paused machine, which may continue afterwards.
    pub fn save(&mut self) -> Result<state::Machine, Failure> {
        let Some(paused) = self.paused_at else {
            return Err(Failure::of(
                ErrorKind::State,
                "a machine that runs can't be saved",
            ));
        };
        if let Some(index) = self.vcpus.ended() {
            // Its report is not part of the state: a restored machine would never be reset.
            return Err(Failure::of(
                ErrorKind::State,
                format!("vCPU {index} has just reset the machine, powered it off or crashed: try again"),
            ));
        }
        let mut sections = vec![Section::new(HEADER, &self.current_header())];
        for part in self.parts() {
            let section = part.save().map_err(failed("saving", part.name()))?;
            sections.push(section);
        }
        sections.push(self.pci.save().map_err(failed("saving", PCI_ROOT))?);
        sections.push(self.hotplug.save().map_err(failed("saving", HOT_PLUG))?);
        let controllers = self.vm.save_interrupt_controllers();
        let controllers = controllers.map_err(failed("saving", CONTROLLERS))?;
        sections.push(Section::new(CONTROLLERS, &controllers));
        if let Some(pit) = self.vm.save_pit().map_err(failed("saving", PIT))? {
            sections.push(Section::new(PIT, &pit));
        }
        for (index, saved) in at_the_pause(self.vcpus.save()?, paused).iter().enumerate() {
            sections.push(Section::new(&vcpu(index), saved));
        }
        sections.push(Section::new(CLOCK, &state::Clock::from(paused.clock)));
        Ok(state::Machine { sections })
    }

    /// Takes over a saved state. The machine was built the same and has never run; its memory is complete. It is paused
    /// afterwards.
    pub(super) fn restore(mut self, saved: state::Machine) -> Result<Self, Failure> {
        let (core, parts, pci, hotplug) = self.take_apart(saved).map_err(failed(CHECKING.0, CHECKING.1))?;
        let counter = core.vcpus.first().and_then(|vcpu| vcpu.tsc);
        self.paused_at = Some(GuestTime {
            clock: core.clock.into(),
            counter: counter.map_or(0, |counter| counter.value),
        });
        self.vcpus.restore(core.vcpus)?;
        let controllers = self.vm.restore_interrupt_controllers(&core.controllers);
        controllers.map_err(failed("restoring", CONTROLLERS))?;
        if let Some(pit) = &core.pit {
            self.vm.restore_pit(pit).map_err(failed("restoring", PIT))?;
        }
        for (part, section) in self.parts().into_iter().zip(&parts) {
            let restored = part.restore(section);
            restored.map_err(failed("restoring", part.name()))?;
        }
        let restored = self.pci.restore(&pci, &self.spaces.mmio);
        restored.map_err(failed("restoring", PCI_ROOT))?;
        let restored = self.hotplug.restore(&hotplug);
        restored.map_err(failed("restoring", HOT_PLUG))?;
        if core.panicked {
            self.panicked.store(true, Ordering::Relaxed);
            self.notifier.notify(Notice::GuestPanicked(None));
        }
        Ok(self)
    }

    /// The sections for all that the machine has, and nothing else: those of the parts in the order of
    /// [`parts`](Self::parts), then those of the buses and of hot-plug.
    fn take_apart(
        &mut self,
        saved: state::Machine,
    ) -> Result<(Core, Vec<Section>, Section, Section), StateError> {
        let mut sections = Sections::new(saved.sections)?;
        let header: MachineHeader = sections.open(HEADER)?;
        header::compare(&self.current_header(), &header)?;
        let (vcpus, has_pit) = (self.vcpus.len(), self.vm.has_pit());
        let core = Core::take(&mut sections, vcpus, has_pit, header.panicked)?;
        let parts = self.parts();
        let parts = parts.iter().map(|part| sections.take(part.name()));
        let parts = parts.collect::<Result<_, _>>()?;
        let (pci, hotplug) = (sections.take(PCI_ROOT)?, sections.take(HOT_PLUG)?);
        sections.finish()?;
        Ok((core, parts, pci, hotplug))
    }

    /// With the devices that there are now.
    pub(super) fn current_header(&self) -> MachineHeader {
        let device = |(slot, name): (u8, String)| state::PciDevice {
            slot: slot.into(),
            name,
        };
        let fixed = self.slots.iter().cloned();
        let mut devices: Vec<_> = fixed
            .chain(self.nics.slots())
            .chain(self.shares.slots())
            .chain(self.disks.slots())
            .map(device)
            .collect();
        devices.sort_by_key(|device| device.slot);
        MachineHeader {
            devices,
            panicked: self.panicked.load(Ordering::Relaxed),
            ..self.header.clone()
        }
    }
}
