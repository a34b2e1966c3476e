//! The NMI status and control register of a PC (Intel ICH9 datasheet, 13.7.1, NMI_SC), where the handler of a
//! non-maskable interrupt looks for the cause. In a machine with KVM's timer chip KVM has this port.

use crate::bus::{BusDevice, Effect};

/// Its only port.
pub const PORT: u64 = 0x61;

/// The output of timer 2 is high, so that nothing waits for it. Bits 6 and 7, an error of a device or of a
/// bus, are clear: the cause is unknown to the machine.
const NO_ERROR: u8 = 1 << 5;

/// The register. Writes have no effect.
#[derive(Debug, Default)]
pub struct NmiStatus;

impl BusDevice for NmiStatus {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = NO_ERROR,
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }
}
