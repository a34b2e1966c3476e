//! Devices of one kind that can be attached and detached while the machine runs, as disks can
//! ([`disks`](super::disks)).
//!
//! A *fitted* device has its function on the PCI bus. A *leaving* device was ejected by the guest
//! or removed by force. It ends on a thread of its own, which then closes the device's backend.

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

/// A kind of device that comes and goes.
pub(super) trait Plug {
    /// Which.
    const WHAT: Pluggable;

    /// Unique among those of its kind.
    fn name(&self) -> &str;

    /// In its slot.
    fn device(&self) -> &VirtioPciDevice;

    /// For pause, resume and reset.
    fn device_mut(&mut self) -> &mut VirtioPciDevice;

    /// The device, and the resources that must live as long as the device.
    fn apart(self) -> (VirtioPciDevice, Box<dyn Send>);
}

/// A device in its slot.
struct Fitted<P> {
    slot: u8,
    plug: P,
}

/// See the module.
pub(super) struct Plugs<P> {
    fitted: Vec<Fitted<P>>,
    leaving: Vec<Leaving>,
    pub sockets: Sockets,
    hotplug: Arc<HotPlug>,
    /// Results that the driver has not collected yet.
    answers: Vec<(Token, Result<(), Failure>)>,
}

impl<P: Plug> Plugs<P> {
    /// Devices of a machine that notifies its guest of changes through `hotplug`.
    pub fn new(sockets: Sockets, hotplug: Arc<HotPlug>) -> Self {
        Self {
            fitted: Vec::new(),
            leaving: Vec::new(),
            sockets,
            hotplug,
            answers: Vec::new(),
        }
    }

    /// Takes in a device that has been put into its slot before the machine is switched on.
    pub fn fit(&mut self, slot: PciSlot, plug: P) {
        let slot = slot.number();
        self.fitted.push(Fitted { slot, plug });
    }

    /// The fitted devices, in the order of their attachment.
    pub fn iter(&self) -> impl Iterator<Item = &P> {
        self.fitted.iter().map(|fitted| &fitted.plug)
    }

    /// The one of that name.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut P, Failure> {
        let mut plugs = self.fitted.iter_mut().map(|fitted| &mut fitted.plug);
        plugs
            .find(|plug| plug.name() == name)
            .ok_or_else(|| not_found::<P>(name))
    }

    /// Devices that take part in the machine's pause, resume and reset.
    pub fn components(&mut self) -> impl Iterator<Item = &mut dyn Component> {
        self.fitted
            .iter_mut()
            .map(|fitted| fitted.plug.device_mut() as &mut dyn Component)
    }

    /// Slots of the fitted devices, and the names of their components.
    pub fn slots(&self) -> impl Iterator<Item = (u8, String)> {
        self.fitted
            .iter()
            .map(|fitted| (fitted.slot, fitted.plug.device().name().to_owned()))
    }

    /// Whether there are none, also none that are being taken away.
    pub fn is_empty(&self) -> bool {
        self.fitted.is_empty() && self.leaving.is_empty()
    }

    /// Attaches the device `name` and notifies the guest. `plug` creates the device and adds it to
    /// its slot.
    pub fn attach(
        &mut self,
        name: &str,
        slot: PciSlot,
        plug: impl FnOnce(&Sockets) -> Result<P, Failure>,
    ) -> Result<(), Failure> {
        let refused = |message| {
            Err(Failure {
                kind: ErrorKind::State,
                message,
            })
        };
        self.sweep();
        if self.iter().any(|other| other.name() == name) {
            return refused(format!("there is a {} {name} already", P::WHAT));
        }
        if self.leaving.iter().any(|other| other.name == name) {
            return refused(format!("a {} {name} is still being taken away", P::WHAT));
        }
        let number = slot.number();
        if self.sockets.pci.is_taken(number) {
            return refused(format!("PCI slot {number} is taken"));
        }
        let plug = plug(&self.sockets)?;
        self.fit(slot, plug);
        self.hotplug.plugged(number);
        Ok(())
    }

    /// Asks the guest for the device `name`, or takes it away.
    pub fn detach(&mut self, token: Token, name: &str, force: bool) -> Result<Progress, Failure> {
        self.sweep();
        match self.fitted.iter().position(|fitted| fitted.plug.name() == name) {
            Some(index) if force => {
                let fitted = self.fitted.remove(index);
                self.hotplug.withdraw(fitted.slot, || {
                    self.sockets.pci.remove_by_force(fitted.slot, &self.sockets.mmio);
                });
                self.leave(fitted.plug, true);
            }
            Some(index) => {
                if let Some(fitted) = self.fitted.get(index) {
                    self.hotplug.ask(fitted.slot);
                }
            }
            None if self.leaving.iter().any(|other| other.name == name) => {}
            None => return Err(not_found::<P>(name)),
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
        let ejected: Vec<Fitted<P>> = self
            .fitted
            .extract_if(.., |fitted| {
                !pci.holds(fitted.slot, &fitted.plug.device().function())
            })
            .collect();
        for fitted in ejected {
            self.leave(fitted.plug, false);
        }
    }

    fn leave(&mut self, plug: P, forced: bool) {
        let which = (P::WHAT, plug.name().to_owned(), forced);
        let (device, rest) = plug.apart();
        let notifier = self.sockets.notifier.clone();
        self.leaving.push(Leaving::end(which, device, rest, notifier));
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
                what: P::WHAT,
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
        let mut leaving = self.leaving.iter_mut();
        let still = leaving.find_map(|leaving| leaving.ends_after(deadline).transpose());
        still.transpose()
    }
}

fn not_found<P: Plug>(name: &str) -> Failure {
    Failure {
        kind: ErrorKind::NotFound,
        message: format!("there is no {} {name}", P::WHAT),
    }
}
