//! A network interface.

use devices::{
    net::{Tap, TapError},
    virtio::net::Net,
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
    let device = Net::new(Box::new(tap), &spec.name, spec.mac.octets(), spec.mtu);
    assembly.nics.push((spec.name.to_string(), device.stats()));
    assembly.add_virtio(&name, spec.slot, Box::new(device))
}
