//! Channels to programs of the guest.

use std::{io, os::unix::net::UnixListener};

use devices::virtio::channels::{Channel, Channels};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: &machine::Channels) -> Result<(), Failure> {
    let mut channels = Vec::with_capacity(spec.channels.len());
    for (name, socket) in &spec.channels {
        channels.push(Channel {
            name: name.clone(),
            listener: Some(UnixListener::from(assembly.fds.take(*socket)?)),
        });
    }
    let device =
        Channels::new(channels).map_err(Failure::during::<io::Error>(ErrorKind::Resources, "channels"))?;
    assembly.add_virtio("channels", spec.slot, Box::new(device))
}
