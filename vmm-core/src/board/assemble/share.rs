//! A directory of the node that another process serves.

use devices::virtio::fs::Fs;
use proto::{model::machine, vmm::ErrorKind};

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: &machine::Share) -> Result<(), Failure> {
    let name = format!("share {}", spec.name);
    let socket = assembly.fds.take(spec.fd)?;
    let device = Fs::new(&spec.name, &spec.tag, socket).map_err(|error| Failure {
        kind: ErrorKind::Resources,
        message: format!("{name}: {error}"),
    })?;
    assembly.shares.push((spec.name.clone(), device.control()));
    assembly.add_virtio(&name, spec.slot, Box::new(device))
}
