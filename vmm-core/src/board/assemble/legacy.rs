//! The small fixed devices.

use std::sync::Arc;

use devices::legacy::{LegacyDevices, pm::PowerButton};

use super::{super::POWER_BUTTON_GSI, Assembly, Failure};

/// Gives the power button.
pub(super) fn build(assembly: &mut Assembly) -> Result<Arc<PowerButton>, Failure> {
    let legacy = LegacyDevices::new(assembly.vm.level_line(POWER_BUTTON_GSI));
    legacy.map(&assembly.spaces.pio)?;
    let power_button = legacy.power_button();
    assembly.components.push(Box::new(legacy));
    Ok(power_button)
}
