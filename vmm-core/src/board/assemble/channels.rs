//! Channels to programs of the guest.

use std::{io, os::unix::net::UnixListener, sync::Arc};

use devices::virtio::channels::{Channel, Channels, OpenChannels};
use vmm_protocol::{machine, vmm::ErrorKind};

use super::{Assembly, Failure};
use crate::lifecycle::Notice;

pub(super) fn build(assembly: &mut Assembly, spec: &machine::Channels) -> Result<Arc<OpenChannels>, Failure> {
    let mut channels = Vec::with_capacity(spec.channels.len());
    for (name, socket) in &spec.channels {
        channels.push(Channel {
            name: name.clone(),
            listener: Some(UnixListener::from(assembly.fds.take(*socket)?)),
        });
    }
    let notifier = assembly.sockets.notifier.clone();
    let on_change = Box::new(move || notifier.notify(Notice::ChannelsChanged));
    let device = Channels::new(channels, on_change);
    let device = device.map_err(Failure::during::<io::Error>(ErrorKind::Resources, "channels"))?;
    let open = device.open();
    assembly.add_virtio("channels", spec.slot, Box::new(device))?;
    Ok(open)
}
