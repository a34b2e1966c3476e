//! A machine that is built: its parts, and the order in which they stop, go on and start anew.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use devices::{component::Component, interrupt::IrqLine, pci::PciRoot, serial::SerialPort};
use proto::vmm::ErrorKind;
use tracing::{error, warn};

use super::{boot::Entry, image::Image};
use crate::{
    kvm::{AddressSpaces, Clock, IrqChipState, Vm},
    lifecycle::{self, Failure},
    memory::GuestRam,
    vcpu::Vcpus,
};

/// How long a pause waits for requests that are under way.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(10);

/// See the module. Fields are dropped in order: first the vCPUs, which use all else.
pub struct Machine {
    pub(super) vcpus: Vcpus,
    /// In the order of assembly. All but the serial port, which has an end of its own.
    pub(super) components: Vec<Box<dyn Component>>,
    pub(super) serial: SerialPort,
    pub(super) pci: Arc<PciRoot>,
    pub(super) spaces: AddressSpaces,
    pub(super) power_button: Arc<dyn IrqLine>,
    pub(super) image: Image,
    pub(super) ram: GuestRam,
    pub(super) vm: Arc<Vm>,
    /// The interrupt controllers after power-on.
    pub(super) irqchip: IrqChipState,
    /// kvmclock at the pause.
    pub(super) paused_clock: Option<Clock>,
    /// Is told that the guest starts anew.
    pub(super) on_reset: Box<dyn Fn()>,
}

impl Machine {
    /// Has the bootstrap processor begin there.
    pub(super) fn enter_at(&mut self, entry: Entry) -> Result<(), Failure> {
        Ok(self.vcpus.set_entry(move |special| entry.registers(special))?)
    }

    fn pause_components(&mut self, deadline: Instant) -> Result<(), Failure> {
        for index in 0..self.components.len() + 1 {
            let component = part(&mut self.components, &mut self.serial, index);
            if let Err(error) = component.pause(deadline) {
                let message = format!("pausing {}: {}", component.name(), lifecycle::with_causes(&error));
                // A part that failed runs on by itself; those before it are told to.
                for resumed in (0..index).rev() {
                    let component = part(&mut self.components, &mut self.serial, resumed);
                    if let Err(error) = component.resume() {
                        error!(part = component.name(), %error, "resuming after a failed pause");
                    }
                }
                return Err(Failure {
                    kind: ErrorKind::Internal,
                    message,
                });
            }
        }
        Ok(())
    }

    fn resume_components(&mut self) -> Result<(), Failure> {
        for index in (0..self.components.len() + 1).rev() {
            let component = part(&mut self.components, &mut self.serial, index);
            component.resume().map_err(|error| Failure {
                kind: ErrorKind::Internal,
                message: format!(
                    "resuming {}: {}",
                    component.name(),
                    lifecycle::with_causes(&error)
                ),
            })?;
        }
        Ok(())
    }
}

/// Component `index` in the order of assembly; the serial port is the last.
fn part<'a>(
    components: &'a mut [Box<dyn Component>],
    serial: &'a mut SerialPort,
    index: usize,
) -> &'a mut dyn Component {
    match components.get_mut(index) {
        Some(component) => component.as_mut(),
        None => serial,
    }
}

impl lifecycle::Machine for Machine {
    fn pause(&mut self) -> Result<(), Failure> {
        self.vcpus.stop()?;
        let clock = self.vm.clock().map_err(Failure::from);
        let paused = clock.and_then(|clock| {
            self.pause_components(Instant::now() + PAUSE_TIMEOUT)?;
            Ok(clock)
        });
        match paused {
            Ok(clock) => {
                self.paused_clock = Some(clock);
                Ok(())
            }
            Err(failure) => {
                self.vcpus.run()?;
                Err(failure)
            }
        }
    }

    fn resume(&mut self) -> Result<(), Failure> {
        if let Some(clock) = self.paused_clock {
            self.vm.set_clock(clock)?;
        }
        self.resume_components()?;
        self.paused_clock = None;
        Ok(self.vcpus.run()?)
    }

    fn reset(&mut self) -> Result<(), Failure> {
        self.vcpus.stop()?;
        for index in 0..self.components.len() + 1 {
            let component = part(&mut self.components, &mut self.serial, index);
            component.reset().map_err(|error| Failure {
                kind: ErrorKind::Internal,
                message: format!(
                    "resetting {}: {}",
                    component.name(),
                    lifecycle::with_causes(&error)
                ),
            })?;
        }
        self.pci.reset(&self.spaces.mmio);
        self.irqchip.restore(&self.vm)?;
        self.vcpus.reset()?;
        self.ram.clear()?;
        (self.on_reset)();
        let entry = self.image.load(&self.ram)?;
        self.enter_at(entry)
    }

    fn start(&mut self) -> Result<(), Failure> {
        Ok(self.vcpus.run()?)
    }

    fn press_power_button(&mut self) {
        self.power_button.pulse();
    }

    fn halt(&mut self) {
        if let Err(error) = self.vcpus.stop() {
            error!(error = lifecycle::with_causes(&error), "stopping the vCPUs");
        }
        if self.paused_clock.is_none()
            && let Err(failure) = self.pause_components(Instant::now() + PAUSE_TIMEOUT)
        {
            warn!(error = failure.message, "devices did not come to rest at the end");
        }
        self.serial.finish();
    }
}
