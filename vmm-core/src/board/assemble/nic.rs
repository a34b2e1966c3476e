//! A network interface.

use devices::{
    net::{Offloads, Tap, TapError},
    virtio::net::{Net, NetOptions},
};
use proto::{model, vmm::ErrorKind};

use super::{Assembly, Failure};
use crate::lifecycle::with_causes;

pub(super) fn build(assembly: &mut Assembly, spec: &model::machine::Nic) -> Result<(), Failure> {
    let name = format!("nic {}", spec.name);
    let tap = Tap::new(assembly.fds.take(spec.fd)?).map_err(|error| Failure {
        kind: match error {
            TapError::Host(..) => ErrorKind::Resources,
            TapError::NotATap(_) | TapError::Flags => ErrorKind::Invalid,
        },
        message: format!("{name}: {}", with_causes(&error)),
    })?;
    // What the protocol can't choose, guests find as they always did.
    let options = NetOptions {
        control: false,
        offloads: Offloads::all() - Offloads::USO,
        ..NetOptions::new(&spec.name, spec.mac.octets(), spec.mtu)
    };
    let device = Net::new(vec![Box::new(tap)], options);
    assembly.nics.push((spec.name.clone(), device.control()));
    assembly.add_virtio(&name, spec.slot, Box::new(device))
}
