//! The small fixed devices.

use std::sync::Arc;

use devices::{
    input::Hub,
    legacy::{LegacyDevices, pm::PowerButton},
};

use vmm_protocol::machine::Machine;

use super::{
    super::{KEYBOARD_GSI, POWER_BUTTON_GSI, image::map},
    Assembly, Failure,
};

/// Gives the power button. `hub`: there is a keyboard.
pub(super) fn build(
    assembly: &mut Assembly,
    spec: &Machine,
    hub: Option<&Arc<Hub>>,
) -> Result<Arc<PowerButton>, Failure> {
    let button = assembly.vm.level_line(POWER_BUTTON_GSI);
    let mut legacy = LegacyDevices::new(button).with_clock_offsets(spec.clock_offsets.clone());
    let map = map(spec);
    if map.has_firmware() {
        let (low, high) = map.ram_ranges(spec.memory_bytes);
        legacy = legacy.with_firmware(low.end, high.end.saturating_sub(high.start));
    }
    if let Some(hub) = hub {
        legacy.plug_keyboard(hub, assembly.irq_line(KEYBOARD_GSI)?);
    }
    legacy.map(&assembly.spaces.pio)?;
    let power_button = legacy.power_button();
    assembly.components.push(Box::new(legacy));
    Ok(power_button)
}
