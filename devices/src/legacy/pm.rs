//! ACPI: sleep, reset, the power-management timer, the power button.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    bus::{BusDevice, Effect},
    interrupt::IrqLine,
    state::message,
};

/// Port of the [`PowerRegister`], as on EDK2's CloudHv platform.
pub const POWER_PORT: u64 = 0x600;

/// What is written to the [`PowerRegister`] to reset the machine: RESET_VALUE of the FADT.
pub const RESET_VALUE: u8 = 1;

/// SLP_TYPx for S5, soft off: what the `_S5` package holds.
pub const SLEEP_TYPE_S5: u8 = 5;

/// The sleep control register's SLP_TYPx, bits 2 to 4, and SLP_EN, bit 5 (ACPI 6.5, 4.8.3.7).
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;
const SLEEP_ENABLE: u8 = 1 << 5;

/// Sleep control, sleep status and reset register in one byte. What a guest writes to a sleep status register (only
/// WAK_STS, bit 7) means nothing in the others. It reads as zero: the machine never wakes from a sleep.
#[derive(Debug, Default)]
pub struct PowerRegister;

impl BusDevice for PowerRegister {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = 0,
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match data {
            [RESET_VALUE] => Effect::Reset,
            [value] if value & SLEEP_ENABLE != 0 => match value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK {
                SLEEP_TYPE_S5 => Effect::PowerOff,
                _ => Effect::None,
            },
            _ => Effect::None,
        }
    }
}

/// Port of the [`PmTimer`].
pub const TIMER_PORT: u64 = 0x608;
/// Its length in bytes.
pub const TIMER_LENGTH: u64 = 4;

/// Ticks a second (ACPI 6.5, 4.8.2.1).
const TIMER_FREQUENCY: u128 = 3_579_545;

/// The power-management timer, with 32 bits. It stands still while the machine is paused.
#[derive(Debug)]
pub struct PmTimer {
    /// Counted in before `since`.
    counted: Duration,
    /// `None` while paused.
    since: Option<Instant>,
}

impl PmTimer {
    /// Stops it.
    pub fn pause(&mut self) {
        self.counted = self.elapsed();
        self.since = None;
    }

    /// Lets it go on.
    pub fn resume(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    pub(super) fn save(&self) -> message::PmTimer {
        let counted = u64::try_from(self.elapsed().as_nanos());
        message::PmTimer {
            counted: counted.unwrap_or(u64::MAX),
        }
    }

    /// It is paused afterwards.
    pub(super) fn restore(&mut self, saved: &message::PmTimer) {
        self.counted = Duration::from_nanos(saved.counted);
        self.since = None;
    }

    fn elapsed(&self) -> Duration {
        let running = self.since.map(|since| since.elapsed()).unwrap_or_default();
        self.counted.saturating_add(running)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the counter wraps at 32 bits")]
    fn ticks(&self) -> u32 {
        const NANOS: u128 = Duration::from_secs(1).as_nanos();
        // 64 bits of nanoseconds and 22 of the frequency fit.
        let scaled = self.elapsed().as_nanos().wrapping_mul(TIMER_FREQUENCY);
        scaled.wrapping_div(NANOS) as u32
    }
}

impl Default for PmTimer {
    fn default() -> Self {
        Self {
            counted: Duration::ZERO,
            since: Some(Instant::now()),
        }
    }
}

impl BusDevice for PmTimer {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (offset, data) {
            (0, data) if data.len() == 4 => data.copy_from_slice(&self.ticks().to_le_bytes()),
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) -> Effect {
        Effect::None
    }
}

/// The power button: each press is an edge of an interrupt that means nothing else (see the module `legacy`).
pub struct PowerButton {
    line: Arc<dyn IrqLine>,
}

impl PowerButton {
    /// One at that interrupt.
    pub fn new(line: Arc<dyn IrqLine>) -> Self {
        Self { line }
    }

    /// Presses and releases it.
    pub fn press(&self) {
        self.line.pulse();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn of_all_values_only_reset_and_soft_off_have_an_effect() {
        for value in 0..=u8::MAX {
            let expected = match value {
                1 => Effect::Reset,
                _ if value & 0x20 != 0 && value >> 2 & 7 == 5 => Effect::PowerOff,
                _ => Effect::None,
            };
            assert_eq!(PowerRegister.write(0, &[value]), expected, "{value:#x}");
        }
        // What Linux writes to the status register before it sleeps, and what it polls there.
        assert_eq!(PowerRegister.write(0, &[0x80]), Effect::None);
        let mut data = [0xff];
        PowerRegister.read(0, &mut data);
        assert_eq!(data, [0]);
    }

    #[test]
    fn the_timer_counts_at_its_frequency_and_wraps() {
        let at = |counted| PmTimer { counted, since: None }.ticks();
        assert_eq!(at(Duration::ZERO), 0);
        assert_eq!(at(Duration::from_secs(1)), 3_579_545);
        assert_eq!(at(Duration::from_secs(1200)), 486_704);
        at(Duration::MAX);
    }

    #[test]
    fn a_paused_timer_stands_still() {
        let mut timer = PmTimer::default();
        timer.pause();
        let ticks = timer.ticks();
        assert_eq!(timer.ticks(), ticks);
        timer.resume();
        while timer.ticks() == ticks {}
    }

    #[test]
    fn the_timer_is_read_as_a_whole() {
        let mut timer = PmTimer {
            counted: Duration::from_secs(1),
            since: None,
        };
        let mut data = [0; 4];
        timer.read(0, &mut data);
        assert_eq!(u32::from_le_bytes(data), 3_579_545);
        let mut half = [0; 2];
        timer.read(0, &mut half);
        assert_eq!(half, [0xff; 2]);
        assert_eq!(timer.write(0, &[0; 4]), Effect::None);
    }

    #[test]
    fn each_press_of_the_button_is_an_edge() {
        struct Line(AtomicUsize);
        impl IrqLine for Line {
            fn pulse(&self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let line = Arc::new(Line(AtomicUsize::new(0)));
        let button = PowerButton::new(line.clone());
        button.press();
        button.press();
        assert_eq!(line.0.load(Ordering::Relaxed), 2);
    }
}
