//! The small fixed devices.

use devices::legacy::LegacyDevices;

use super::{Assembly, Failure};

pub(super) fn build(assembly: &mut Assembly) -> Result<(), Failure> {
    let legacy = LegacyDevices::new();
    legacy.map(&assembly.spaces.pio)?;
    assembly.components.push(Box::new(legacy));
    Ok(())
}
