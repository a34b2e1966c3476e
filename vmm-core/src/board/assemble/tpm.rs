//! The TPM.

use devices::tpm::{self, Tpm};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: machine::Tpm) -> Result<(), Failure> {
    let (data, control) = (assembly.fds.take(spec.data)?, assembly.fds.take(spec.control)?);
    let device = Tpm::new(data, control, assembly.sockets.sink());
    let device = device.map_err(|error| {
        let message = format!("spec.tpm: {error}: the log of the VM has the messages of swtpm");
        Failure::of(ErrorKind::Resources, message)
    })?;
    assembly
        .spaces
        .mmio
        .insert(tpm::ADDRESS.into(), tpm::LENGTH.into(), device.registers())?;
    assembly.components.push(Box::new(device));
    Ok(())
}
