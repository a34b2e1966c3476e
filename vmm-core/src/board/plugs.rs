//! Devices of one kind that can be attached and detached while the machine runs: disks, NICs or shares.
//!
//! ```text
//!            attach          eject, force, reset           backend closed
//!  (nothing) ──────▶ fitted ─────────────────────▶ leaving ──────────────▶ told as detached
//! ```
//!
//! A *fitted* device has its function on the PCI bus. The guest's eject takes the function off the
//! bus on the vCPU's thread, and does nothing else. The owner of this struct does the rest on the
//! next notification: a fitted device whose function is not on the bus leaves.
//!
//! A *leaving* device was ejected by the guest or removed by force. It ends on a thread of its own,
//! however long the host takes for the requests in flight, and its backend is closed there. The
//! device's name stays taken until then; its slot does not. All waits for it have a deadline: those
//! of a forced detach, of a pause and a reset (the device may still write to guest memory), and of
//! the end of the machine.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use devices::{component::Component, pci::HotPlug, virtio::transport::VirtioPciDevice};
use vmm_protocol::vmm::ErrorKind;
use vmmd_spec::pci::PciSlot;

use super::{
    assemble::Sockets,
    leaving::{Leaving, Phase},
};
use crate::lifecycle::{Detached, Failure, Pluggable, Progress, Token};

/// Time that a forcibly detached device has to end before the caller gets an error about the delay.
const FORCE_TIMEOUT: Duration = Duration::from_secs(10);

/// A device in its slot.
pub(super) struct Plugged<C> {
    /// Unique among those of its kind.
    pub name: String,
    pub slot: u8,
    pub device: VirtioPciDevice,
    /// Controls of the device, and resources that must live as long as the device.
    pub control: C,
}

/// See the module.
pub(super) struct Plugs<C> {
    what: Pluggable,
    fitted: Vec<Plugged<C>>,
    leaving: Vec<Leaving>,
    pub sockets: Sockets,
    pub hotplug: Arc<HotPlug>,
    /// Results that the driver has not collected yet.
    answers: Vec<(Token, Result<(), Failure>)>,
}

impl<C: Send + 'static> Plugs<C> {
    /// Devices of a machine that notifies its guest of changes through `hotplug`.
    pub fn new(what: Pluggable, sockets: Sockets, hotplug: Arc<HotPlug>) -> Self {
        Self {
            what,
            fitted: Vec::new(),
            leaving: Vec::new(),
            sockets,
            hotplug,
            answers: Vec::new(),
        }
    }

    /// Takes in a device that has been put into its slot before the machine is switched on.
    pub fn fit(&mut self, device: Plugged<C>) {
        self.fitted.push(device);
    }

    /// Takes in a device that has been put into its slot, and notifies the guest.
    pub fn attach(&mut self, device: Plugged<C>) {
        self.hotplug.plugged(device.slot);
        self.fit(device);
    }

    /// The fitted devices, in the order of their attachment.
    pub fn iter(&self) -> impl Iterator<Item = &Plugged<C>> {
        self.fitted.iter()
    }

    /// The fitted devices, in the order of their slots.
    pub fn by_slot(&self) -> Vec<&Plugged<C>> {
        let mut devices: Vec<_> = self.iter().collect();
        devices.sort_by_key(|device| device.slot);
        devices
    }

    /// The one of that name.
    pub fn get(&self, name: &str) -> Result<&Plugged<C>, Failure> {
        let found = self.fitted.iter().find(|device| device.name == name);
        found.ok_or_else(|| not_found(self.what, name))
    }

    /// The one of that name.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut Plugged<C>, Failure> {
        let found = self.fitted.iter_mut().find(|device| device.name == name);
        found.ok_or_else(|| not_found(self.what, name))
    }

    /// Devices that take part in the machine's pause, resume and reset.
    pub fn components(&mut self) -> impl Iterator<Item = &mut dyn Component> {
        self.fitted
            .iter_mut()
            .map(|fitted| &mut fitted.device as &mut dyn Component)
    }

    /// Slots of the fitted devices, and the names of their components.
    pub fn slots(&self) -> impl Iterator<Item = (u8, String)> {
        self.fitted
            .iter()
            .map(|fitted| (fitted.slot, fitted.device.name().to_owned()))
    }

    /// Whether there are none, also none that are being taken away.
    pub fn is_empty(&self) -> bool {
        self.fitted.is_empty() && self.leaving.is_empty()
    }

    /// Returns an error if a new device cannot have this name or this slot.
    pub fn check_free(&mut self, name: &str, slot: PciSlot) -> Result<(), Failure> {
        self.sweep();
        let number = slot.number();
        let message = if self.get(name).is_ok() {
            format!("there is a {} {name} already", self.what)
        } else if self.leaving.iter().any(|other| other.name == name) {
            format!("a {} {name} is still being taken away", self.what)
        } else if self.sockets.pci.is_taken(number) {
            format!("PCI slot {number} is taken")
        } else {
            return Ok(());
        };
        Err(Failure::of(ErrorKind::State, message))
    }

    /// Asks the guest for the device `name`, or takes it away.
    pub fn detach(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure> {
        self.sweep();
        match self.fitted.iter().position(|fitted| fitted.name == name) {
            Some(index) if force => {
                let fitted = self.fitted.remove(index);
                self.hotplug.withdraw(fitted.slot, || {
                    self.sockets.pci.remove_by_force(fitted.slot, &self.sockets.mmio);
                });
                self.leave(fitted, true);
            }
            Some(index) => {
                if let Some(fitted) = self.fitted.get(index) {
                    self.hotplug.ask(fitted.slot);
                }
            }
            None if self.leaving.iter().any(|other| other.name == name) => {}
            None => return Err(not_found(self.what, name)),
        }
        match self.leaving.iter_mut().find(|other| other.name == name) {
            Some(leaving) if force => {
                leaving.waiting.push((token, Instant::now() + FORCE_TIMEOUT));
                Ok(Progress::Pending)
            }
            _ => Ok(Progress::Done),
        }
    }

    /// Has those leave that the guest ejected.
    fn sweep(&mut self) {
        let pci = &self.sockets.pci;
        let ejected: Vec<Plugged<C>> = self
            .fitted
            .extract_if(.., |fitted| !pci.holds(fitted.slot, &fitted.device.function()))
            .collect();
        for fitted in ejected {
            self.leave(fitted, false);
        }
    }

    fn leave(&mut self, plugged: Plugged<C>, forced: bool) {
        let which = (self.what, plugged.name, forced);
        let notifier = self.sockets.notifier.clone();
        let leaving = Leaving::end(which, plugged.device, plugged.control, notifier);
        self.leaving.push(leaving);
    }

    /// Takes in a device that is about to end, or that was never fitted.
    pub fn add_leaving(&mut self, leaving: Leaving) {
        self.leaving.push(leaving);
    }

    /// Queues the answer of a request.
    pub fn answer(&mut self, token: Token, result: Result<(), Failure>) {
        self.answers.push((token, result));
    }

    /// See [`Machine::collect_detached`](crate::lifecycle::Machine::collect_detached).
    pub fn collect_detached(&mut self) -> Vec<Detached> {
        self.sweep();
        let gone = self
            .leaving
            .extract_if(.., |leaving| leaving.look(Instant::now()) == Phase::Gone);
        gone.map(|leaving| {
            let waiting = leaving.waiting.into_iter();
            self.answers.extend(waiting.map(|(token, _)| (token, Ok(()))));
            Detached {
                what: self.what,
                name: leaving.name,
                forced: leaving.forced,
            }
        })
        .collect()
    }

    /// See [`Machine::collect_answers`](crate::lifecycle::Machine::collect_answers).
    pub fn collect_answers(&mut self) -> Vec<(Token, Result<(), Failure>)> {
        let now = Instant::now();
        for leaving in &mut self.leaving {
            self.answers.extend(leaving.give_up(now));
        }
        std::mem::take(&mut self.answers)
    }

    /// See [`Machine::next_deadline`](crate::lifecycle::Machine::next_deadline).
    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.leaving.iter().flat_map(|leaving| &leaving.waiting);
        waiting.map(|(_, deadline)| *deadline).min()
    }

    /// Waits until nothing that is off the bus touches guest memory any more.
    pub fn wait_for_leaving(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        self.sweep();
        let mut devices = self.leaving.iter_mut().filter(|leaving| leaving.has_device);
        let still = devices.find_map(|leaving| leaving.ends_after(deadline).transpose());
        still.transpose()
    }
}

fn not_found(what: Pluggable, name: &str) -> Failure {
    Failure::of(ErrorKind::NotFound, format!("there is no {what} {name}"))
}
