//! The SATA controller, if the machine has disks on it.

use devices::{
    ahci::{Ahci, Drive, Parts},
    pci::root::SATA_SLOT,
};
use vmm_protocol::vmm::ErrorKind;

use super::{Assembly, Failure};

/// Name of the controller in messages and in the machine's state.
const NAME: &str = "sata";

/// Puts a controller with drives at these ports into the machine.
pub(super) fn build(assembly: &mut Assembly, drives: Vec<(u8, Drive)>) -> Result<(), Failure> {
    if drives.is_empty() {
        return Ok(());
    }
    let sockets = &assembly.sockets;
    let parts = Parts {
        name: NAME.to_owned(),
        memory: sockets.memory.clone(),
        msi: sockets.msi.as_ref(),
        sink: sockets.sink(),
    };
    let device = Ahci::new(parts, drives).map_err(Failure::during(ErrorKind::Resources, NAME))?;
    let added = sockets.pci.add_sata(device.function());
    added.map_err(Failure::during(ErrorKind::Invalid, NAME))?;
    assembly.slots.push((SATA_SLOT, NAME.to_owned()));
    assembly.components.push(Box::new(device));
    Ok(())
}
