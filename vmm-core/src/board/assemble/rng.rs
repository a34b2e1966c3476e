//! The entropy device.

use std::fs::File;

use devices::virtio::rng::Rng;

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: &vmm_protocol::machine::Rng) -> Result<(), Failure> {
    let source = File::from(assembly.fds.take(spec.fd)?);
    assembly.add_virtio("rng", spec.slot, Box::new(Rng::new(source)))
}
