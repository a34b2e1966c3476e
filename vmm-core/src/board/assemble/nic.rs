//! A network interface.

use std::sync::Arc;

use devices::{
    net::{NetBackend, Offloads, PairServer, Tap, TapError, VhostNet},
    virtio::{
        net::{Net, NetOptions},
        rate::Limiter,
    },
};
use vmm_protocol::{machine, vmm::ErrorKind};
use vmmd_spec::nic::NicSwitches;

use super::{Failure, Fds, Sockets, disk};
use crate::{
    board::{nics::Nic, plugs::Plugged},
    lifecycle::with_causes,
};

/// Puts a NIC into its PCI slot.
pub(in crate::board) fn plug(
    sockets: &Sockets,
    spec: &machine::Nic,
    fds: &mut Fds,
) -> Result<Plugged<Nic>, Failure> {
    let name = format!("nic {}", spec.name);
    let mut queues: Vec<Box<dyn NetBackend>> = Vec::with_capacity(spec.fds.len());
    for fd in &spec.fds {
        let tap = Tap::new(fds.take(*fd)?).map_err(|error| failure(&name, &error))?;
        queues.push(Box::new(tap));
    }
    let receive_limiter = spec.receive_limit.map(disk::limits).map(Limiter::new);
    let transmit_limiter = spec.transmit_limit.map(disk::limits).map(Limiter::new);
    let options = NetOptions {
        name: spec.name.clone(),
        mac: spec.mac.octets(),
        mtu: spec.mtu,
        offloads: offloads(spec.without),
        merge: !spec.without.merge,
        control: spec.control,
        link_up: spec.link_up,
        receive_limit: receive_limiter.as_ref().map(Arc::clone),
        transmit_limit: transmit_limiter.as_ref().map(Arc::clone),
    };
    let mut servers: Vec<Box<dyn PairServer>> = Vec::with_capacity(spec.vhosts.len());
    for fd in &spec.vhosts {
        let vhost = VhostNet::new(fds.take(*fd)?)
            .map_err(|error| Failure::of(ErrorKind::Resources, format!("{name}: use vhost-net: {error}")))?;
        servers.push(Box::new(vhost));
    }
    let mut device = Net::new(queues, options);
    device.serve_by(servers);
    let control = device.control();
    let device = sockets.plug(&name, spec.slot, Box::new(device))?;
    Ok(Plugged {
        name: spec.name.clone(),
        slot: spec.slot.number(),
        device,
        control: Nic {
            control,
            receive_limiter,
            transmit_limiter,
        },
    })
}

fn offloads(without: NicSwitches) -> Offloads {
    let mut offloads = Offloads::all();
    offloads.set(Offloads::CHECKSUM, !without.checksum);
    let tso = Offloads::TSO4 | Offloads::TSO6 | Offloads::TSO_ECN;
    offloads.set(tso, !without.tso);
    offloads.set(Offloads::USO, !without.uso);
    offloads
}

fn failure(name: &str, error: &TapError) -> Failure {
    Failure::of(
        match error {
            TapError::Host(..) => ErrorKind::Resources,
            TapError::NotATap(_) | TapError::Flags => ErrorKind::Invalid,
        },
        format!("{name}: {}", with_causes(error)),
    )
}
