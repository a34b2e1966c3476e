//! pvpanic: how a guest's kernel says that it panicked (QEMU's docs/specs/pvpanic.rst).

use crate::bus::{BusDevice, Effect};

/// Its only port.
pub const PORT: u64 = 0x505;

/// The kernel panicked.
const PANICKED: u8 = 1;
/// The kernel panicked and a crash kernel is about to run.
const CRASH_LOADED: u8 = 1 << 1;

/// The device. A read gives the events that it knows.
#[derive(Debug, Default)]
pub struct PvPanic;

impl BusDevice for PvPanic {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = PANICKED | CRASH_LOADED,
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match data {
            // A crash kernel writes a dump and resets the machine: the guest helps itself.
            [event] if event & PANICKED != 0 => Effect::GuestPanicked,
            _ => Effect::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_events_are_told_and_reported_and_unknown_ones_ignored() {
        let mut data = [0];
        PvPanic.read(0, &mut data);
        assert_eq!(data, [3]);
        for (value, effect) in [
            (1, Effect::GuestPanicked),
            (2, Effect::None),
            (4, Effect::None),
            (0, Effect::None),
        ] {
            assert_eq!(PvPanic.write(0, &[value]), effect);
        }
        assert_eq!(PvPanic.write(0, &[1, 0]), Effect::None);
    }
}
