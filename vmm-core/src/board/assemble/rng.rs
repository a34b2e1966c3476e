//! The entropy device.

use std::fs::File;

use devices::virtio::rng::Rng;
use proto::model;

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly, spec: &model::machine::Rng) -> Result<(), Failure> {
    let source = File::from(assembly.fds.take(spec.fd)?);
    assembly.add_virtio("rng", spec.slot, Box::new(Rng::new(source)))
}
