//! Fuzzer of the registers of a watchdog.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]

use std::time::{Duration, Instant};

use super::registers::Registers;

/// Accesses to the registers, each of six bytes: kind and length, offset, value. It panics if a stage is shorter than 10 ms, if an
/// expired timer still counts, if a restored device differs, or if the device panics itself.
pub fn registers(data: &[u8]) {
    let mut device = Registers::default();
    let mut now = Instant::now();
    for step in data.chunks_exact(6) {
        let (what, offset, value) = (step[0], step[1], &step[2..]);
        let length = 1 << (what >> 3 & 1) << (what >> 4 & 1);
        match what & 7 {
            0 => device.write_config(0x60, value[0], now),
            1 => device.write_config(0x68, value[0], now),
            2 => device.write_config(offset.into(), value[0], now),
            3 => device.write(u64::from(offset) % 16, &value[..length], now),
            4 => device.read(u64::from(offset) % 16, &mut [0; 8][..length]),
            5 => {
                for unlock in [0x80, 0x86] {
                    device.write(0xc, &[unlock], now);
                }
            }
            6 => {
                device.pause(now);
                let saved = device.save();
                device = Registers::restored(&saved).unwrap();
                assert_eq!(device.save(), saved);
                device.resume(now);
            }
            _ => {
                now += Duration::from_millis(u16::from_le_bytes([value[0], value[1]]).into());
                let due = device.due();
                let acts = device.expires(now);
                assert!(!acts || due.is_some_and(|due| due <= now));
                assert!(!acts || device.due().is_none(), "an expired timer counts");
                let next = device.due().filter(|next| due != Some(*next));
                assert!(next.is_none_or(|next| next - now >= Duration::from_millis(10)));
            }
        }
    }
}
