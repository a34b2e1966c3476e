//! The CMOS real-time clock (Motorola MC146818), without its interrupts.
//!
//! It shows the host's time in UTC, or with a difference to UTC, and cannot be set: writes to the time registers are
//! dropped.
//! Control registers, the alarm and the memory are stored. Its interrupt is not connected, so no
//! interrupt may be announced to the guest.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{
    bus::{BusDevice, Effect},
    state::{StateError, check, message, narrow},
};

/// First port: the index (written); the second is the data.
pub const PORT: u64 = 0x70;
/// Number of ports.
pub const LENGTH: u64 = 2;

/// Bytes behind the index register. Its bit 7 turns NMIs off, which has no use here.
const SIZE: usize = 128;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY_OF_MONTH: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const REGISTER_A: u8 = 0x0a;
const REGISTER_B: u8 = 0x0b;
const REGISTER_C: u8 = 0x0c;
const REGISTER_D: u8 = 0x0d;
/// Index of the century register, announced by the FADT (ACPI 6.5, 5.2.9: CENTURY).
pub const CENTURY: u8 = 0x32;

/// Register A: update in progress; and the divider of a 32,768 Hz clock with a periodic rate of 1,024 Hz.
const A_UPDATE: u8 = 1 << 7;
const A_DEFAULT: u8 = 0x26;
/// Register B: updates are stopped so that the time can be set; binary, not BCD; 24, not 12 hours.
const B_SET: u8 = 1 << 7;
const B_BINARY: u8 = 1 << 2;
const B_24_HOURS: u8 = 1 << 1;
/// Register B: the three interrupts.
const B_INTERRUPTS: u8 = 0b111 << 4;
/// Register D: the battery is good.
const D_VALID: u8 = 1 << 7;
/// An hour after noon, on a 12-hour clock.
const PM: u8 = 1 << 7;

/// How long before a second's end the update flag is up (table 5 of the data sheet).
const UPDATE_TIME: Duration = Duration::from_micros(244);

/// The clock.
#[derive(Debug)]
pub struct Rtc {
    index: u8,
    memory: [u8; SIZE],
    now: fn() -> SystemTime,
    /// See [`set_offsets`](Self::set_offsets).
    offsets: Vec<(u64, i32)>,
}

impl Default for Rtc {
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

impl Rtc {
    /// A clock that shows what `now` says.
    pub fn new(now: fn() -> SystemTime) -> Self {
        let mut memory = [0; SIZE];
        for (index, value) in [(REGISTER_A, A_DEFAULT), (REGISTER_B, B_24_HOURS)] {
            if let Some(byte) = memory.get_mut(usize::from(index)) {
                *byte = value;
            }
        }
        Self {
            index: 0,
            memory,
            now,
            offsets: Vec::new(),
        }
    }

    /// Sets the difference to UTC: from a time on, in seconds of Unix time, so many seconds. The times ascend. Before
    /// the first of them the clock shows UTC.
    pub(super) fn set_offsets(&mut self, offsets: Vec<(u64, i32)>) {
        self.offsets = offsets;
    }

    /// Writes the size of RAM to the memory, as firmware of PCs reads it: `low` bytes below 4 GiB in units of 64 KiB
    /// beyond 16 MiB, `high` bytes above 4 GiB in units of 64 KiB.
    pub(super) fn set_ram(&mut self, low: u64, high: u64) {
        const UNIT: u64 = 64 << 10;
        let [first, second, ..] = (low.saturating_sub(16 << 20) / UNIT).to_le_bytes();
        let [third, fourth, fifth, ..] = (high / UNIT).to_le_bytes();
        for (index, value) in [
            (0x34, first),
            (0x35, second),
            (0x5b, third),
            (0x5c, fourth),
            (0x5d, fifth),
        ] {
            self.store(index, value);
        }
    }

    /// The reset line: interrupts are off, the time and the memory stay.
    pub fn reset(&mut self) {
        self.index = 0;
        let b = self.stored(REGISTER_B) & !B_INTERRUPTS;
        self.store(REGISTER_B, b);
    }

    pub(super) fn save(&self) -> message::Rtc {
        message::Rtc {
            index: self.index.into(),
            memory: self.memory.to_vec(),
        }
    }

    pub(super) fn restore(&mut self, saved: &message::Rtc) -> Result<(), StateError> {
        let index: u8 = narrow("rtc.index", saved.index)?;
        check(usize::from(index) < SIZE, "rtc.index", "no such register")?;
        let memory = saved.memory.as_slice().try_into();
        self.memory = memory.map_err(|_| StateError::invalid("rtc.memory", "it does not have 128 bytes"))?;
        self.index = index;
        let a = self.stored(REGISTER_A) & !A_UPDATE;
        self.store(REGISTER_A, a);
        Ok(())
    }

    fn stored(&self, index: u8) -> u8 {
        self.memory.get(usize::from(index)).copied().unwrap_or(0)
    }

    fn store(&mut self, index: u8, value: u8) {
        if let Some(byte) = self.memory.get_mut(usize::from(index)) {
            *byte = value;
        }
    }

    fn read_data(&self) -> u8 {
        match self.index {
            REGISTER_A => self.stored(REGISTER_A) | if self.updating() { A_UPDATE } else { 0 },
            // No interrupt ever happened.
            REGISTER_C => 0,
            REGISTER_D => D_VALID,
            SECONDS | MINUTES | HOURS | DAY_OF_WEEK..=YEAR | CENTURY => self.time_register(),
            index => self.stored(index),
        }
    }

    fn write_data(&mut self, value: u8) {
        match self.index {
            REGISTER_A => self.store(REGISTER_A, value & !A_UPDATE),
            REGISTER_C | REGISTER_D => {}
            SECONDS | MINUTES | HOURS | DAY_OF_WEEK..=YEAR | CENTURY => {}
            index => self.store(index, value),
        }
    }

    fn updating(&self) -> bool {
        let Ok(now) = (self.now)().duration_since(UNIX_EPOCH) else {
            return false;
        };
        let left = Duration::from_secs(1).saturating_sub(Duration::from_nanos(now.subsec_nanos().into()));
        self.stored(REGISTER_B) & B_SET == 0 && left <= UPDATE_TIME
    }

    /// The time that the clock shows, as seconds since 1970.
    fn seconds(&self) -> u64 {
        let utc = (self.now)()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let mut begun = self.offsets.iter().rev().filter(|(from, _)| *from <= utc);
        let offset = begun.next().map_or(0, |(_, seconds)| *seconds);
        utc.saturating_add_signed(offset.into())
    }

    fn time_register(&self) -> u8 {
        let time = Time::from_unix(self.seconds());
        let b = self.stored(REGISTER_B);
        let value = match self.index {
            SECONDS => time.second,
            MINUTES => time.minute,
            HOURS if b & B_24_HOURS == 0 => {
                let pm = if time.hour >= 12 { PM } else { 0 };
                // 0 is 12.
                let hour = match time.hour.checked_rem(12) {
                    Some(0) | None => 12,
                    Some(hour) => hour,
                };
                return self.encode(hour) | pm;
            }
            HOURS => time.hour,
            DAY_OF_WEEK => time.weekday,
            DAY_OF_MONTH => time.day,
            MONTH => time.month,
            YEAR => time.year_of_century,
            _ => time.century,
        };
        self.encode(value)
    }

    /// A number below 100 in the form that register B asks for.
    fn encode(&self, value: u8) -> u8 {
        if self.stored(REGISTER_B) & B_BINARY != 0 {
            return value;
        }
        let (tens, ones) = (value.wrapping_div(10), value.wrapping_rem(10));
        tens << 4 | ones
    }
}

impl BusDevice for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (offset, data) {
            (0, [byte]) => *byte = self.index,
            (1, [byte]) => *byte = self.read_data(),
            (_, data) => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        match (offset, data) {
            (0, [byte]) => self.index = byte & 0x7f,
            (1, [byte]) => self.write_data(*byte),
            _ => {}
        }
        Effect::None
    }
}

/// A moment in the proleptic Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Time {
    century: u8,
    year_of_century: u8,
    /// 1 to 12.
    month: u8,
    /// 1 to 31.
    day: u8,
    /// Sunday is 1.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Time {
    /// Years up to 9999 are shown right.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "each value is below 256 by its modulus"
    )]
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "divisors are constants, and 64 bits hold all products"
    )]
    fn from_unix(seconds: u64) -> Self {
        let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
        // Days since 1 March of year 0, so that a leap day is a year's last: 719,468 of them came before 1970. Eras
        // are the calendar's period of 400 years, 146,097 days.
        let shifted = days.saturating_add(719_468);
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // March is 0; months of 31 and 30 days alternate in a pattern of 153 days.
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let (month, next_year) = if shifted_month < 10 {
            (shifted_month + 3, 0)
        } else {
            (shifted_month - 9, 1)
        };
        let year = era.saturating_mul(400).saturating_add(year_of_era + next_year);
        Self {
            century: (year / 100 % 100) as u8,
            year_of_century: (year % 100) as u8,
            month: month as u8,
            day: day as u8,
            // 1 January 1970 was a Thursday.
            weekday: ((days + 4) % 7 + 1) as u8,
            hour: (second_of_day / 3600) as u8,
            minute: (second_of_day / 60 % 60) as u8,
            second: (second_of_day % 60) as u8,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::state::{Change, refuses};

    fn at(seconds: u64, nanos: u32) -> SystemTime {
        UNIX_EPOCH + Duration::new(seconds, nanos)
    }

    fn read(rtc: &mut Rtc, index: u8) -> u8 {
        let mut data = [0];
        assert_eq!(rtc.write(0, &[index]), Effect::None);
        rtc.read(1, &mut data);
        data[0]
    }

    fn write(rtc: &mut Rtc, index: u8, value: u8) {
        assert_eq!(rtc.write(0, &[index]), Effect::None);
        assert_eq!(rtc.write(1, &[value]), Effect::None);
    }

    fn registers(rtc: &mut Rtc) -> [u8; 8] {
        [
            CENTURY,
            YEAR,
            MONTH,
            DAY_OF_MONTH,
            DAY_OF_WEEK,
            HOURS,
            MINUTES,
            SECONDS,
        ]
        .map(|index| read(rtc, index))
    }

    // 29 February 2024, a Thursday, 23:59:58.
    fn leap_day() -> SystemTime {
        at(1_709_251_198, 0)
    }

    #[test]
    fn the_hosts_time_is_shown_in_bcd_binary_and_twelve_hours() {
        let mut rtc = Rtc::new(leap_day);
        assert_eq!(registers(&mut rtc), [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58]);
        write(&mut rtc, REGISTER_B, B_24_HOURS | B_BINARY);
        assert_eq!(registers(&mut rtc), [20, 24, 2, 29, 5, 23, 59, 58]);
        write(&mut rtc, REGISTER_B, 0);
        assert_eq!(read(&mut rtc, HOURS), 0x91);
        let mut rtc = Rtc::new(|| at(0, 0));
        assert_eq!(registers(&mut rtc), [0x19, 0x70, 0x01, 0x01, 5, 0, 0, 0]);
        write(&mut rtc, REGISTER_B, 0);
        assert_eq!(read(&mut rtc, HOURS), 0x12);
    }

    #[test]
    fn local_time_follows_the_changes_of_its_zone() {
        let mut rtc = Rtc::new(leap_day);
        let utc = registers(&mut rtc);
        let now = leap_day().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let mut hours = |offsets: &[(u64, i32)]| {
            rtc.set_offsets(offsets.to_vec());
            let local = registers(&mut rtc);
            assert_eq!(local[..2], utc[..2], "seconds and minutes");
            local
        };
        assert_eq!(hours(&[]), utc);
        assert_eq!(
            hours(&[(now + 1, 3600)]),
            utc,
            "the first offset is in the future"
        );
        assert_eq!(
            hours(&[(0, 0), (now, 7200), (now + 1, 3600)]),
            hours(&[(0, 7200)])
        );
        assert_ne!(hours(&[(0, -86400)]), utc, "the day before");
    }

    #[test]
    fn an_update_is_announced_shortly_before_the_second_ends() {
        let a = |now: fn() -> SystemTime| read(&mut Rtc::new(now), REGISTER_A);
        assert_eq!(a(|| at(1, 0)), A_DEFAULT);
        assert_eq!(a(|| at(1, 999_755_000)), A_DEFAULT);
        assert_eq!(a(|| at(1, 999_757_000)), A_DEFAULT | A_UPDATE);
        let mut stopped = Rtc::new(|| at(1, 999_999_999));
        write(&mut stopped, REGISTER_B, B_SET);
        assert_eq!(read(&mut stopped, REGISTER_A), A_DEFAULT);
    }

    #[test]
    fn setting_the_time_does_nothing_and_memory_is_kept_over_a_reset() {
        let mut rtc = Rtc::new(leap_day);
        write(&mut rtc, YEAR, 0x99);
        write(&mut rtc, CENTURY, 0x19);
        assert_eq!((read(&mut rtc, CENTURY), read(&mut rtc, YEAR)), (0x20, 0x24));
        write(&mut rtc, 0x7f, 0xa5);
        write(&mut rtc, 0x05, 0x12);
        write(&mut rtc, REGISTER_B, B_24_HOURS | B_INTERRUPTS);
        rtc.reset();
        assert_eq!((read(&mut rtc, 0x7f), read(&mut rtc, 0x05)), (0xa5, 0x12));
        assert_eq!(read(&mut rtc, REGISTER_B), B_24_HOURS);
        assert_eq!(
            (read(&mut rtc, REGISTER_C), read(&mut rtc, REGISTER_D)),
            (0, D_VALID)
        );
    }

    #[test]
    fn the_nmi_bit_is_no_part_of_the_index() {
        let mut rtc = Rtc::new(leap_day);
        assert_eq!(read(&mut rtc, 0x80 | MONTH), 0x02);
    }

    proptest! {
        #[test]
        fn dates_count_up_day_by_day(day in 0_u64..2_900_000) {
            let (today, tomorrow) = (Time::from_unix(day * 86_400), Time::from_unix((day + 1) * 86_400));
            prop_assert_eq!(tomorrow.weekday, today.weekday % 7 + 1);
            let year = u32::from(today.century) * 100 + u32::from(today.year_of_century);
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match today.month { 2 if leap => 29, 2 => 28, 4 | 6 | 9 | 11 => 30, _ => 31 };
            let next = if today.day < length {
                (year, today.month, today.day + 1)
            } else if today.month < 12 {
                (year, today.month + 1, 1)
            } else {
                (year + 1, 1, 1)
            };
            let found = u32::from(tomorrow.century) * 100 + u32::from(tomorrow.year_of_century);
            prop_assert_eq!((found, tomorrow.month, tomorrow.day), next);
        }

        #[test]
        fn no_access_and_no_time_panics(seconds: u64, steps: Vec<(u8, u8)>) {
            Time::from_unix(seconds);
            let mut rtc = Rtc::default();
            for (index, value) in steps {
                write(&mut rtc, index, value);
                read(&mut rtc, index);
            }
        }

        #[test]
        fn a_restored_clock_behaves_as_its_twin_that_was_not_saved(
            before: Vec<(u8, Option<u8>)>,
            after: Vec<(u8, Option<u8>)>,
        ) {
            let run = |rtc: &mut Rtc, steps: &[(u8, Option<u8>)]| -> Vec<u8> {
                let step = |(index, value): &(u8, Option<u8>)| {
                    if let Some(value) = value {
                        write(rtc, *index, *value);
                    }
                    let mut selected = [0];
                    rtc.read(1, &mut selected);
                    selected[0]
                };
                steps.iter().map(step).collect()
            };
            let mut twin = Rtc::new(leap_day);
            run(&mut twin, &before);
            let mut restored = Rtc::new(leap_day);
            restored.restore(&twin.save()).unwrap();
            prop_assert_eq!(run(&mut restored, &[(0, None)]), run(&mut twin, &[(0, None)]));
            prop_assert_eq!(run(&mut restored, &after), run(&mut twin, &after));
            for index in 0..128 {
                prop_assert_eq!(read(&mut restored, index), read(&mut twin, index), "register {:#x}", index);
            }
        }
    }

    #[test]
    fn a_saved_state_that_no_clock_has_is_refused_or_mended() {
        let good = Rtc::new(leap_day).save();
        let changes: [Change<message::Rtc>; 4] = [
            ("rtc.index", |saved| saved.index = 128),
            ("rtc.index", |saved| saved.index = 256),
            ("rtc.memory", |saved| saved.memory = vec![0; 127]),
            ("rtc.memory", |saved| saved.memory = vec![0; 129]),
        ];
        refuses(&good, &changes, |saved| {
            let mut rtc = Rtc::new(leap_day);
            let result = rtc.restore(saved);
            assert_eq!(rtc.save(), good);
            result
        });
        // The update flag is not stored: it would never go.
        let mut rtc = Rtc::new(leap_day);
        let memory = vec![0xff; 128];
        rtc.restore(&message::Rtc { memory, index: 0 }).unwrap();
        assert_eq!(read(&mut rtc, REGISTER_A), 0x7f);
    }
}
