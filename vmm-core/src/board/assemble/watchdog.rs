//! The watchdog.

use devices::watchdog::{Watchdog, WatchdogTimer};
use vmm_protocol::vmm::ErrorKind;
use vmmd_spec::pci::PciSlot;

use super::{Assembly, Failure, Notice};

/// Name of the watchdog in messages and in the machine's state.
const NAME: &str = "watchdog";

/// Puts the watchdog into its slot.
pub(super) fn build(assembly: &mut Assembly, slot: PciSlot) -> Result<WatchdogTimer, Failure> {
    let notifier = assembly.sockets.notifier.clone();
    let started = Box::new(move || notifier.notify(Notice::WatchdogStarted));
    let device = Watchdog::new(NAME, started).map_err(Failure::during(ErrorKind::Internal, NAME))?;
    let added = assembly.sockets.pci.add(slot.number(), device.function());
    added.map_err(Failure::during(ErrorKind::Invalid, NAME))?;
    let timer = device.timer();
    assembly.slots.push((slot.number(), NAME.to_owned()));
    assembly.components.push(Box::new(device));
    Ok(timer)
}
