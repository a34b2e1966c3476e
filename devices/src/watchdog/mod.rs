//! A watchdog of the kind i6300esb: the timer of Intel's 6300ESB I/O controller (datasheet, order number 300641, chapter 16), with
//! drivers in Linux (`i6300esb`) and BSD.
//!
//! The driver enables the timer in the configuration space, and restarts it by a sequence of writes behind BAR 0. The timer has two
//! stages of equal kind. At the end of the first one the hardware can raise an interrupt, which no driver uses and this device does
//! not have. At the end of the second one the machine's owner acts ([`WatchdogTimer::expires`]).
//!
//! The device has no thread. The owner waits until [`WatchdogTimer::due`], and is called when that becomes earlier than it knows.
//! A timer that is not enabled has no due time, so it causes no wake-ups. A restart in time causes none either: the owner finds the
//! later time when it wakes up.

#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
mod registers;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests;

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use self::registers::Registers;
use crate::{
    bus::Effect,
    component::{Component, ComponentError},
    pci::{BarKind, ConfigSpace, Header, PciFunction, SharedFunction, config::ConfigError, root::lock},
    state::{Section, StateError, message, required},
};

/// The BAR of the registers.
const BAR: usize = 0;
/// Bytes behind it.
const BAR_SIZE: u64 = 16;

/// Called when the timer is due earlier than its owner knows. Must not wait for vCPUs.
pub type Started = Box<dyn Fn() + Send>;

/// See the module.
struct Function {
    config: ConfigSpace,
    registers: Registers,
    started: Started,
    /// Due time that the owner knows.
    known: Option<Instant>,
    /// The owner was called and has not asked since.
    called: bool,
}

impl Function {
    /// Calls the owner if it has to wait for an earlier time.
    fn announce(&mut self) {
        let Some(due) = self.registers.due() else { return };
        if !self.called && self.known.is_none_or(|known| due < known) {
            self.called = true;
            (self.started)();
        }
    }

    fn save(&self) -> message::Watchdog {
        message::Watchdog {
            pci: Some(self.config.save()),
            ..self.registers.save()
        }
    }

    fn restore(&mut self, saved: &message::Watchdog) -> Result<(), StateError> {
        self.registers = Registers::restored(saved)?;
        self.config.restore(required("pci", saved.pci.as_ref())?)
    }
}

impl PciFunction for Function {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
        for (at, byte) in (offset..).zip(data) {
            if let Some(value) = self.registers.read_config(at) {
                *byte = value;
            }
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        for (at, byte) in (offset..).zip(data) {
            self.registers.write_config(at, *byte, Instant::now());
        }
        self.announce();
        Effect::None
    }

    fn read_bar(&mut self, _bar: usize, offset: u64, data: &mut [u8]) {
        self.registers.read(offset, data);
    }

    fn write_bar(&mut self, _bar: usize, offset: u64, data: &[u8]) -> Effect {
        self.registers.write(offset, data, Instant::now());
        self.announce();
        Effect::None
    }

    fn bar_moved(&mut self, _bar: usize, _address: Option<u64>) {}

    /// The flag of an expiry stays: the next system reads why it was reset.
    fn reset(&mut self) {
        self.config.reset();
        self.registers.reset();
    }
}

/// The time of a watchdog, for its owner.
#[derive(Clone)]
pub struct WatchdogTimer(Arc<Mutex<Function>>);

impl WatchdogTimer {
    /// When to call [`expires`](Self::expires); `None` while the timer does not count.
    pub fn due(&self) -> Option<Instant> {
        let mut function = lock(&self.0);
        function.called = false;
        function.known = function.registers.due();
        function.known
    }

    /// Ends the stages that are over at `now`. Returns whether the guest did not restart its watchdog in time: the owner then acts.
    /// The timer is disabled afterwards.
    pub fn expires(&self, now: Instant) -> bool {
        lock(&self.0).registers.expires(now)
    }
}

/// A watchdog as a part of the machine.
pub struct Watchdog {
    name: String,
    function: Arc<Mutex<Function>>,
}

impl Watchdog {
    /// A watchdog that is not enabled. `started` is called by the vCPU that starts it.
    pub fn new(name: &str, started: Started) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::new(&Header {
            vendor: 0x8086,
            device: 0x25ab,
            // System peripheral, other.
            class: 0x08_80_00,
            ..Header::default()
        });
        config.add_bar(BAR, BarKind::Memory32, BAR_SIZE)?;
        Ok(Self {
            name: name.to_owned(),
            function: Arc::new(Mutex::new(Function {
                config,
                registers: Registers::default(),
                started,
                known: None,
                called: false,
            })),
        })
    }

    /// For [`PciRoot::add`](crate::pci::PciRoot::add).
    pub fn function(&self) -> SharedFunction {
        let function: Arc<Mutex<Function>> = Arc::clone(&self.function);
        function
    }

    /// Its time.
    pub fn timer(&self) -> WatchdogTimer {
        WatchdogTimer(Arc::clone(&self.function))
    }
}

impl Component for Watchdog {
    fn name(&self) -> &str {
        &self.name
    }

    fn pause(&mut self, _deadline: Instant) -> Result<(), ComponentError> {
        lock(&self.function).registers.pause(Instant::now());
        Ok(())
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        let mut function = lock(&self.function);
        function.registers.resume(Instant::now());
        function.announce();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), ComponentError> {
        lock(&self.function).reset();
        Ok(())
    }

    fn save(&self) -> Result<Section, StateError> {
        Ok(Section::new(&self.name, &lock(&self.function).save()))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        lock(&self.function).restore(&section.open()?)
    }
}
