//! ACPI: sleep, reset, the power-management timer, the power button.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::lock;
use crate::{
    bus::{BusDevice, Effect, SharedDevice},
    interrupt::LevelLine,
    state::message,
};

/// Port of the [`PowerRegister`], as on EDK2's CloudHv platform.
pub const POWER_PORT: u64 = 0x600;

/// Value that resets the machine when written to the [`PowerRegister`]: RESET_VALUE of the FADT.
pub const RESET_VALUE: u8 = 1;

/// SLP_TYPx for S5, soft off: the value in the `_S5` package.
pub const SLEEP_TYPE_S5: u8 = 5;

/// The sleep control register's SLP_TYPx, bits 2 to 4, and SLP_EN, bit 5 (ACPI 6.5, 4.8.3.7).
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;
const SLEEP_ENABLE: u8 = 1 << 5;

/// Sleep control, sleep status and reset register in one byte. Valid writes to a sleep status
/// register (only WAK_STS, bit 7) have no effect in the others. The register reads as zero: the
/// machine never wakes from a sleep.
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

    /// Lets the timer run again.
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

/// Port of the [`PowerButton`]'s status register, one byte.
pub const BUTTON_PORT: u64 = 0x604;
/// The same port on a machine with firmware, which has the [`Pm1Control`] at the former.
pub const FIRMWARE_BUTTON_PORT: u64 = 0x60c;

/// Port of the [`Pm1Control`]: PMBASE of Q35 and four.
pub const CONTROL_PORT: u64 = 0x604;
/// Its length in bytes.
pub const CONTROL_LENGTH: u64 = 2;

/// The PM1 control register, for firmware: OVMF powers the machine off with it. Its SLP_TYP for S5
/// is 0, as on QEMU's Q35 (ACPI 6.5, 4.8.3.2.1). Guests read about the [`PowerRegister`] in the
/// FADT, which is hardware-reduced.
#[derive(Debug, Default)]
pub struct Pm1Control;

/// SLP_TYP, bits 10 to 12, SLP_EN, bit 13, and SCI_EN, bit 0, which reads as set.
const CONTROL_SLEEP_TYPE: u16 = 0b111 << 10;
const CONTROL_SLEEP_ENABLE: u16 = 1 << 13;
const CONTROL_SCI_ENABLE: u16 = 1;

impl BusDevice for Pm1Control {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match <&mut [u8; 2]>::try_from(&mut *data) {
            Ok(register) => *register = CONTROL_SCI_ENABLE.to_le_bytes(),
            Err(_) => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match <[u8; 2]>::try_from(data).map(u16::from_le_bytes) {
            Ok(value) if value & CONTROL_SLEEP_ENABLE != 0 && value & CONTROL_SLEEP_TYPE == 0 => {
                Effect::PowerOff
            }
            _ => Effect::None,
        }
    }
}

/// Status register: the button was pressed. Set by a press, cleared by writing a one, as PWRBTN_STS is in the fixed
/// registers of a machine that is not hardware-reduced (ACPI 6.5, 4.8.3.1.1).
pub const BUTTON_PRESSED: u8 = 1;

/// The power button. A press sets a bit in the status register, and the interrupt line is high
/// while the bit is set. If the guest has masked the interrupt or has no driver yet, it receives
/// the press when it unmasks the interrupt.
///
/// A press that no guest has cleared survives a reset of the machine: a shutdown may be requested
/// during a reboot.
pub struct PowerButton {
    pressed: Mutex<bool>,
    line: Arc<dyn LevelLine>,
}

impl PowerButton {
    /// One that is not pressed, at that interrupt.
    pub fn new(line: Arc<dyn LevelLine>) -> Arc<Self> {
        Arc::new(Self {
            pressed: Mutex::new(false),
            line,
        })
    }

    /// The status register, to be mapped at [`BUTTON_PORT`].
    pub fn register(self: &Arc<Self>) -> SharedDevice {
        Arc::new(Mutex::new(ButtonRegister(Arc::clone(self))))
    }

    /// Presses and releases it.
    pub fn press(&self) {
        self.set(true);
    }

    /// Sets the interrupt line again: interrupt controllers lose the level of their inputs in a
    /// reset.
    pub fn refresh(&self) {
        self.line.set(*self.pressed());
    }

    pub(super) fn save(&self) -> message::PowerButton {
        let pressed = *self.pressed();
        message::PowerButton { pressed }
    }

    pub(super) fn restore(&self, saved: message::PowerButton) {
        self.set(saved.pressed);
    }

    fn set(&self, new: bool) {
        let mut pressed = self.pressed();
        *pressed = new;
        // With the lock held: the line never stays at an older state.
        self.line.set(new);
    }

    fn pressed(&self) -> MutexGuard<'_, bool> {
        lock(&self.pressed)
    }
}

struct ButtonRegister(Arc<PowerButton>);

impl BusDevice for ButtonRegister {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = if *self.0.pressed() { BUTTON_PRESSED } else { 0 },
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        if matches!(data, [value] if value & BUTTON_PRESSED != 0) {
            self.0.set(false);
        }
        Effect::None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use super::{super::tests::Line, *};

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
        // Linux's write to the status register before a sleep, and its poll there.
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

    fn read(button: &Arc<PowerButton>) -> u8 {
        let mut data = [0xff];
        lock(&button.register()).read(0, &mut data);
        data[0]
    }

    fn write(button: &Arc<PowerButton>, data: &[u8]) {
        assert_eq!(lock(&button.register()).write(0, data), Effect::None);
    }

    #[test]
    fn a_press_stays_until_the_guest_clears_it() {
        let line = Arc::new(Line::default());
        let button = PowerButton::new(line.clone());
        assert_eq!((read(&button), line.is_high()), (0, false));
        button.press();
        button.press();
        assert_eq!((read(&button), line.is_high()), (1, true));
        // Zeroes, other bits and other widths clear nothing.
        write(&button, &[0xfe]);
        write(&button, &[1, 0]);
        let mut word = [0; 2];
        lock(&button.register()).read(0, &mut word);
        assert_eq!((read(&button), line.is_high(), word), (1, true, [0xff; 2]));
        write(&button, &[1]);
        assert_eq!((read(&button), line.is_high()), (0, false));
        button.press();
        assert_eq!((read(&button), line.is_high()), (1, true));
    }

    #[test]
    fn a_press_reaches_interrupt_controllers_that_were_reset_and_a_restored_machine() {
        for pressed in [false, true] {
            let line = Arc::new(Line::default());
            let button = PowerButton::new(line.clone());
            if pressed {
                button.press();
            }
            line.set(!pressed);
            button.refresh();
            assert_eq!(line.is_high(), pressed);

            let other = Arc::new(Line::default());
            let restored = PowerButton::new(other.clone());
            restored.press();
            restored.restore(button.save());
            assert_eq!((read(&restored), other.is_high()), (pressed.into(), pressed));
        }
    }
}
