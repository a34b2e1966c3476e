//! The registers and the time of the watchdog. All times are arguments.

use std::time::{Duration, Instant};

use crate::state::{StateError, check, message, narrow};

/// WDT Configuration Register in the configuration space (datasheet, 16.5.1), its lower byte.
const CONFIGURATION: usize = 0x60;
/// The prescaler: a tick of the timer is 2^5 clocks instead of 2^15.
const FAST: u8 = 1 << 2;
/// The timer does not reset the machine.
const NO_OUTPUT: u8 = 1 << 5;
/// The kind of interrupt and the bits above.
const CONFIGURATION_BITS: u8 = 0b11 | FAST | NO_OUTPUT;
/// WDT Lock Register in the configuration space (16.5.2).
const LOCK: usize = 0x68;
/// The register does not change until the next reset.
const LOCKED: u8 = 1 << 0;
const ENABLED: u8 = 1 << 1;
/// The timer starts again when it has ended.
const FREE_RUNNING: u8 = 1 << 2;
const LOCK_BITS: u8 = LOCKED | ENABLED | FREE_RUNNING;

/// Registers behind BAR 0 (16.5.3 to 16.5.6): preload values of the stages, restart and status.
const PRELOAD_1: u64 = 0x0;
const PRELOAD_2: u64 = 0x4;
const RELOAD: u64 = 0xc;
/// A write of these values to the last one, in this order, unlocks one write to a register.
const UNLOCK_1: u32 = 0x80;
const UNLOCK_2: u32 = 0x86;
/// In RELOAD: restart the timer.
const RESTART: u32 = 1 << 8;
/// In RELOAD: the timer has expired. Bit 9 in the datasheet; Linux reads and clears bit 12.
const EXPIRED: u32 = 1 << 9 | 1 << 12;
/// Bits of a preload value.
const PRELOAD: u32 = 0xf_ffff;

/// Nanoseconds of a clock of 33 MHz.
const CLOCK_NS: u64 = 30;
/// Shortest stage, which bounds the wake-ups that a guest can cause. A tick of the slow timer is a millisecond.
const SHORTEST: Duration = Duration::from_millis(10);

/// A stage that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    /// It ends then.
    Until(Instant),
    /// The machine is paused, and this is left.
    Left(Duration),
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Registers {
    configuration: u8,
    lock: u8,
    preload: [u32; 2],
    /// Writes of the unlock sequence.
    unlocked: u8,
    expired: bool,
    /// Whether the second stage counts, and its time.
    stage: Option<(bool, Time)>,
}

impl Default for Registers {
    fn default() -> Self {
        Self {
            configuration: 0,
            lock: 0,
            preload: [PRELOAD; 2],
            unlocked: 0,
            expired: false,
            stage: None,
        }
    }
}

impl Registers {
    /// When the present stage ends.
    pub fn due(&self) -> Option<Instant> {
        match self.stage {
            Some((_, Time::Until(due))) => Some(due),
            _ => None,
        }
    }

    /// Ends stages; says whether the last one has ended and the guest wants an action.
    pub fn expires(&mut self, now: Instant) -> bool {
        let Some((second, Time::Until(due))) = self.stage else {
            return false;
        };
        if now < due {
            return false;
        }
        if !second {
            self.start(true, now);
            return false;
        }
        if self.configuration & NO_OUTPUT == 0 {
            self.reset();
            self.expired = true;
            return true;
        }
        self.stage = None;
        if self.lock & FREE_RUNNING != 0 {
            self.start(false, now);
        }
        false
    }

    /// The state after power-on, except for the flag of an expiry.
    pub fn reset(&mut self) {
        *self = Self {
            expired: self.expired,
            ..Self::default()
        };
    }

    pub fn pause(&mut self, now: Instant) {
        if let Some((second, Time::Until(due))) = self.stage {
            self.stage = Some((second, Time::Left(due.saturating_duration_since(now))));
        }
    }

    pub fn resume(&mut self, now: Instant) {
        if let Some((second, Time::Left(left))) = self.stage {
            self.stage = Some((second, Time::Until(now.checked_add(left).unwrap_or(now))));
        }
    }

    /// Begins a stage.
    fn start(&mut self, second: bool, now: Instant) {
        let [first_preload, second_preload] = self.preload;
        let preload = if second { second_preload } else { first_preload };
        let prescaler = if self.configuration & FAST == 0 { 15 } else { 5 };
        // At most 2^20 * 2^15 * 30.
        let nanoseconds = (u64::from(preload) << prescaler).saturating_mul(CLOCK_NS);
        let length = Duration::from_nanos(nanoseconds).max(SHORTEST);
        self.stage = Some((second, Time::Until(now.checked_add(length).unwrap_or(now))));
    }

    /// A byte of the configuration space; `None` for all except the two registers.
    pub fn read_config(&self, offset: usize) -> Option<u8> {
        match offset {
            CONFIGURATION => Some(self.configuration),
            LOCK => Some(self.lock),
            _ => None,
        }
    }

    /// The same for a write; others have no effect.
    pub fn write_config(&mut self, offset: usize, value: u8, now: Instant) {
        match offset {
            CONFIGURATION => self.configuration = value & CONFIGURATION_BITS,
            LOCK if self.lock & LOCKED == 0 => {
                let was = self.lock;
                self.lock = value & LOCK_BITS;
                if self.lock & ENABLED == 0 {
                    self.stage = None;
                } else if was & ENABLED == 0 {
                    self.start(false, now);
                }
            }
            _ => {}
        }
    }

    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            PRELOAD_1 => self.preload[0],
            PRELOAD_2 => self.preload[1],
            RELOAD if self.expired => EXPIRED,
            _ => 0,
        };
        let bytes = value.to_le_bytes().into_iter().chain(std::iter::repeat(0));
        for (to, from) in data.iter_mut().zip(bytes) {
            *to = from;
        }
    }

    pub fn write(&mut self, offset: u64, data: &[u8], now: Instant) {
        let low = data.iter().take(4).rev();
        let value = low.fold(0, |value, byte| value << 8 | u32::from(*byte));
        match (offset, value) {
            (RELOAD, UNLOCK_1) => self.unlocked = 1,
            (RELOAD, UNLOCK_2) if self.unlocked == 1 => self.unlocked = 2,
            _ if self.unlocked == 2 => {
                self.unlocked = 0;
                self.write_unlocked(offset, value, data.len(), now);
            }
            _ => {}
        }
    }

    fn write_unlocked(&mut self, offset: u64, value: u32, length: usize, now: Instant) {
        match (offset, length) {
            (PRELOAD_1, 4) => self.preload[0] = value & PRELOAD,
            (PRELOAD_2, 4) => self.preload[1] = value & PRELOAD,
            (RELOAD, 2 | 4) => {
                if value & RESTART != 0 && self.lock & ENABLED != 0 {
                    self.start(false, now);
                }
                if value & EXPIRED != 0 {
                    self.expired = false;
                }
            }
            _ => {}
        }
    }

    /// The state of a paused machine, without the configuration space.
    pub fn save(&self) -> message::Watchdog {
        let (stage, left) = match self.stage {
            Some((second, Time::Left(left))) => (u32::from(second).saturating_add(1), left),
            _ => (0, Duration::ZERO),
        };
        message::Watchdog {
            pci: None,
            configuration: self.configuration.into(),
            lock: self.lock.into(),
            preload_1: self.preload[0],
            preload_2: self.preload[1],
            unlocked: self.unlocked.into(),
            expired: self.expired,
            stage,
            left_ns: u64::try_from(left.as_nanos()).unwrap_or(u64::MAX),
        }
    }

    /// A saved state, which is untrusted.
    pub fn restored(saved: &message::Watchdog) -> Result<Self, StateError> {
        let bits = |field, value: u32, bits: u8| {
            let value: u8 = narrow(field, value)?;
            check(value & !bits == 0, field, "it has unknown bits")?;
            Ok::<_, StateError>(value)
        };
        for (field, preload) in [("preload_1", saved.preload_1), ("preload_2", saved.preload_2)] {
            check(preload <= PRELOAD, field, "it has more than 20 bits")?;
        }
        check(saved.unlocked <= 2, "unlocked", "the sequence has two writes")?;
        check(saved.stage <= 2, "stage", "there are two stages")?;
        let longest = (u64::from(PRELOAD) << 15).saturating_mul(CLOCK_NS);
        check(saved.left_ns <= longest, "left_ns", "no stage is that long")?;
        let left = Time::Left(Duration::from_nanos(saved.left_ns));
        Ok(Self {
            configuration: bits("configuration", saved.configuration, CONFIGURATION_BITS)?,
            lock: bits("lock", saved.lock, LOCK_BITS)?,
            preload: [saved.preload_1, saved.preload_2],
            unlocked: narrow("unlocked", saved.unlocked)?,
            expired: saved.expired,
            stage: (saved.stage != 0).then_some((saved.stage == 2, left)),
        })
    }
}
