//! The small fixed devices.

use std::sync::Arc;

use devices::{
    input::Hub,
    legacy::{LegacyDevices, pm::PowerButton},
};

use super::{
    super::{KEYBOARD_GSI, POWER_BUTTON_GSI},
    Assembly, Failure,
};

/// Gives the power button. `hub`: there is a keyboard.
pub(super) fn build(assembly: &mut Assembly, hub: Option<&Arc<Hub>>) -> Result<Arc<PowerButton>, Failure> {
    let legacy = LegacyDevices::new(assembly.vm.level_line(POWER_BUTTON_GSI));
    if let Some(hub) = hub {
        legacy.plug_keyboard(hub, assembly.irq_line(KEYBOARD_GSI)?);
    }
    legacy.map(&assembly.spaces.pio)?;
    let power_button = legacy.power_button();
    assembly.components.push(Box::new(legacy));
    Ok(power_button)
}
