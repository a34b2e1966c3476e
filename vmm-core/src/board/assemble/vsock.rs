//! The socket device.

use std::{io, sync::Arc};

use devices::virtio::vsock::{Vsock, VsockHost};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: machine::Vsock) -> Result<Arc<VsockHost>, Failure> {
    let device = Vsock::new(spec.cid);
    let device = device.map_err(Failure::during::<io::Error>(
        ErrorKind::Resources,
        "socket device",
    ))?;
    let host = device.host();
    assembly.add_virtio("vsock", spec.slot, Box::new(device))?;
    Ok(host)
}
