//! A disk.

use devices::{
    block::{OpenError, RawImage},
    virtio::blk::{Blk, BlkOptions, OnError},
};
use proto::{model, vmm::ErrorKind};

use super::{Assembly, Failure};
use crate::lifecycle::with_causes;

pub(super) fn build(assembly: &mut Assembly, spec: &model::machine::Disk) -> Result<(), Failure> {
    let name = format!("disk {}", spec.name);
    let image = RawImage::open(assembly.fds.take(spec.fd)?, spec.read_only).map_err(|error| Failure {
        kind: match error {
            OpenError::Host(..) => ErrorKind::Resources,
            _ => ErrorKind::Image,
        },
        message: format!("{name}: {}", with_causes(&error)),
    })?;
    let options = BlkOptions {
        name: spec.name.clone(),
        serial: spec.serial.clone(),
        queues: 1,
        logical_block: 512,
        on_error: OnError::Report,
        limiter: None,
    };
    let device = Blk::new(Box::new(image), options);
    assembly.add_virtio(&name, spec.slot, Box::new(device))
}
