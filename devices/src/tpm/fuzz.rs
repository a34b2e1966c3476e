//! Fuzzer of the registers of a TPM.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::crb::{self, BUFFER, Crb, HEADER, LENGTH};
use crate::bus::{BusDevice, Effect};

/// Accesses to the registers, each of four bytes: kind and length, offset, value. It panics if a command
/// of another length than its header's would reach swtpm, if a command is lost, if a restored device
/// differs, or if the device panics itself.
pub fn registers(data: &[u8]) {
    let new = || Crb::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let mut device = new();
    for step in data.chunks_exact(4) {
        let [what, low, high, value] = [step[0], step[1], step[2], step[3]];
        let offset = u64::from(u16::from_le_bytes([low, high])) % u64::from(LENGTH);
        let length = (1 << (what >> 2 & 3)).min(usize::try_from(u64::from(LENGTH) - offset).unwrap());
        let executed = device.executes();
        match what & 3 {
            0 => device.read(offset, &mut [0; 8][..length]),
            1 => {
                let bytes = [value, low, high, what, 0xff, 0, 1, value];
                assert_eq!(device.write(offset, &bytes[..length]), Effect::None);
            }
            2 => assert_eq!(device.write(offset, &[value]), Effect::None),
            _ if value == 1 => {
                let Some(command) = device.command() else { continue };
                if let Ok(command) = &command {
                    assert!((HEADER..=BUFFER).contains(&command.len()));
                    assert_eq!(crb::length(command), Some(command.len()));
                }
                device.complete(&crb::response(command.err().unwrap_or_default()));
                assert!(!device.executes());
                continue;
            }
            _ if executed => {}
            _ if value == 0 => device.reset(),
            _ => {
                let saved = device.save();
                let mut other = new();
                other.restore(&saved).unwrap();
                assert_eq!(other.save(), saved);
            }
        }
        assert!(device.executes() || !executed, "a command is lost");
    }
}
