//! The firmware, if the machine boots through it.

use std::fs::File;

use vmm_protocol::machine::{Boot, Machine};

use super::{
    super::{firmware::Firmware, image::Image},
    Assembly, Failure,
};

pub(super) fn build(assembly: &mut Assembly, spec: &Machine, image: &Image) -> Result<(), Failure> {
    let Boot::Firmware { code, variables } = spec.boot else {
        return Ok(());
    };
    let files = (
        File::from(assembly.fds.take(code)?),
        File::from(assembly.fds.take(variables)?),
    );
    let firmware = Firmware::new(
        &assembly.vm,
        assembly.ram.memory(),
        &assembly.spaces.mmio,
        &assembly.spaces.pio,
        files,
        &image.described(spec, spec.memory_bytes),
    )?;
    assembly.components.push(Box::new(firmware));
    Ok(())
}
