//! A directory of the node that another process serves.

use devices::virtio::fs::{Fs, FsControl};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Failure, Fds, Sockets};
use crate::board::plugs::Plugged;

/// Puts a share into its PCI slot.
pub(in crate::board) fn plug(
    sockets: &Sockets,
    spec: &machine::Share,
    fds: &mut Fds,
) -> Result<Plugged<FsControl>, Failure> {
    let name = format!("share {}", spec.name);
    let socket = fds.take(spec.fd)?;
    let device = Fs::new(&spec.name, &spec.tag, socket)
        .map_err(|error| Failure::of(ErrorKind::Resources, format!("{name}: {error}")))?;
    let control = device.control();
    Ok(Plugged {
        name: spec.name.clone(),
        slot: spec.slot.number(),
        device: sockets.plug(&name, spec.slot, Box::new(device))?,
        control,
    })
}
