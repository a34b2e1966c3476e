//! The firmware, if the machine boots through it.

use std::fs::File;

use vmm_protocol::machine::{Boot, Machine};

use super::{
    super::{firmware::Firmware, image::Image},
    Assembly, Failure,
};

pub(super) fn build(assembly: &mut Assembly, spec: &Machine, image: &Image) -> Result<(), Failure> {
    let (Boot::Firmware { variables, .. }, Some(code)) = (&spec.boot, image.firmware()) else {
        return Ok(());
    };
    let variables = match variables {
        Some(index) => Some(File::from(assembly.fds.take(*index)?)),
        None => None,
    };
    let firmware = Firmware::new(
        &assembly.vm,
        assembly.ram.memory(),
        &assembly.spaces.mmio,
        &assembly.spaces.pio,
        (code, variables),
        &image.described(spec, spec.memory_bytes),
    )?;
    assembly.components.push(Box::new(firmware));
    Ok(())
}
