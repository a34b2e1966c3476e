//! The watchdog, driven by the writes of Linux's driver (`drivers/watchdog/i6300esb.c`).

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use rstest::rstest;

use super::{registers::Registers, *};
use crate::state::refuses;

/// Two stages of 15 s each, as Linux sets up for a timeout of 30 s: ticks of 2^15 clocks of 30 ns.
const PRELOAD: u32 = 15 << 10;
const STAGE: Duration = Duration::from_nanos(15 * 1024 * 32768 * 30);

/// Accesses of a driver to the registers.
trait Driver {
    fn unlocked(&mut self, offset: u64, data: &[u8], now: Instant);

    /// `esb_timer_start`, after `esb_initdevice` and `esb_timer_set_heartbeat`.
    fn start(&mut self, preload: u32, now: Instant);

    /// `esb_timer_keepalive`.
    fn keep_alive(&mut self, now: Instant) {
        self.unlocked(0xc, &[0, 1], now);
    }
}

impl Driver for Registers {
    fn unlocked(&mut self, offset: u64, data: &[u8], now: Instant) {
        self.write(0xc, &[0x80, 0], now);
        self.write(0xc, &[0x86, 0], now);
        self.write(offset, data, now);
    }

    fn start(&mut self, preload: u32, now: Instant) {
        self.write_config(0x60, 0x03, now);
        self.write_config(0x68, 0x00, now);
        self.unlocked(0x0, &preload.to_le_bytes(), now);
        self.unlocked(0x4, &preload.to_le_bytes(), now);
        self.keep_alive(now);
        self.write_config(0x68, 0x02, now);
    }
}

fn status(registers: &Registers) -> u16 {
    let mut data = [0; 2];
    registers.read(0xc, &mut data);
    u16::from_le_bytes(data)
}

fn started(now: Instant) -> Registers {
    let mut registers = Registers::default();
    registers.start(PRELOAD, now);
    registers
}

#[test]
fn timer_that_is_not_restarted_expires_after_both_stages() {
    let now = Instant::now();
    let mut registers = started(now);
    assert_eq!(registers.due(), Some(now + STAGE));
    assert!(!registers.expires(now + STAGE - Duration::from_nanos(1)));
    assert!(!registers.expires(now + STAGE), "the first stage");
    assert_eq!(registers.due(), Some(now + 2 * STAGE));
    assert!(registers.expires(now + 2 * STAGE));
    // The next system reads why, and clears that.
    assert_eq!((registers.due(), status(&registers)), (None, 0x1200));
    registers.reset();
    assert_eq!(status(&registers), 0x1200);
    registers.unlocked(0xc, &[0, 0x12], now);
    assert_eq!(status(&registers), 0);
}

#[test]
fn restart_begins_the_first_stage_again() {
    let now = Instant::now();
    let mut registers = started(now);
    assert!(!registers.expires(now + STAGE));
    registers.keep_alive(now + STAGE);
    assert_eq!(registers.due(), Some(now + 2 * STAGE));
    assert!(!registers.expires(now + 2 * STAGE), "the first stage again");
    // Without the sequence, or after another write, nothing happens.
    registers.write(0xc, &[0, 1], now + 3 * STAGE);
    registers.write(0xc, &[0x86, 0], now + 3 * STAGE);
    registers.write(0xc, &[0, 1], now + 3 * STAGE);
    assert_eq!(registers.due(), Some(now + 3 * STAGE));
}

#[test]
fn disabled_timer_does_not_count_and_a_locked_one_goes_on() {
    let now = Instant::now();
    let mut registers = started(now);
    registers.write_config(0x68, 0, now);
    assert_eq!(registers.due(), None);
    registers.write_config(0x68, 0x03, now);
    registers.write_config(0x68, 0, now);
    assert!(registers.due().is_some());
    assert_eq!(registers.read_config(0x68), Some(3));
}

#[rstest]
#[case::once(0x02, false)]
#[case::free_running(0x06, true)]
fn timer_without_output_never_acts(#[case] lock: u8, #[case] again: bool) {
    let now = Instant::now();
    let mut registers = Registers::default();
    registers.start(PRELOAD, now);
    registers.write_config(0x60, 0x23, now);
    registers.write_config(0x68, lock, now);
    assert!(!registers.expires(now + STAGE));
    assert!(!registers.expires(now + 2 * STAGE));
    assert_eq!(registers.due().is_some(), again);
}

#[test]
fn shortest_stage_bounds_the_wake_ups() {
    let now = Instant::now();
    let mut registers = Registers::default();
    registers.write_config(0x60, 0x04, now);
    registers.start(0, now);
    assert_eq!(registers.due(), Some(now + Duration::from_millis(10)));
}

#[test]
fn time_stands_still_during_a_pause() {
    let now = Instant::now();
    let mut registers = started(now);
    registers.pause(now + STAGE / 3);
    assert_eq!(registers.due(), None);
    assert!(!registers.expires(now + 10 * STAGE));
    let saved = registers.save();
    let mut other = Registers::restored(&saved).unwrap();
    assert_eq!(other, registers);
    other.resume(now + 5 * STAGE);
    assert_eq!(other.due(), Some(now + 5 * STAGE + (STAGE - STAGE / 3)));
}

#[test]
fn wrong_state_is_refused_by_field() {
    let now = Instant::now();
    let mut good = started(now);
    good.pause(now);
    refuses(
        &good.save(),
        &[
            ("configuration", |it| it.configuration = 0x80),
            ("configuration", |it| it.configuration = 0x100),
            ("lock", |it| it.lock = 8),
            ("preload_1", |it| it.preload_1 = 1 << 20),
            ("preload_2", |it| it.preload_2 = 1 << 20),
            ("unlocked", |it| it.unlocked = 3),
            ("stage", |it| it.stage = 3),
            ("left_ns", |it| it.left_ns = u64::MAX),
        ],
        |saved| Registers::restored(saved).map(drop),
    );
}

/// A watchdog, and how often its owner was called.
fn device() -> (Watchdog, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let started = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    (Watchdog::new("watchdog", Box::new(started)).unwrap(), calls)
}

fn enable(watchdog: &Watchdog, on: bool) {
    let effect = lock(&watchdog.function).write_config(0x68, &[u8::from(on) << 1]);
    assert_eq!(effect, Effect::None);
}

#[test]
fn owner_is_called_once_for_an_earlier_time() {
    let (watchdog, calls) = device();
    let (timer, count) = (watchdog.timer(), || calls.load(Ordering::Relaxed));
    assert_eq!((timer.due(), count()), (None, 0));
    for _ in 0..10 {
        enable(&watchdog, true);
        enable(&watchdog, false);
    }
    assert_eq!(count(), 1, "the owner has not asked since");
    enable(&watchdog, true);
    let due = timer.due().unwrap();
    // A restart that only makes it later.
    enable(&watchdog, false);
    enable(&watchdog, true);
    assert!(timer.due().unwrap() >= due);
    assert_eq!(count(), 1);
}

#[test]
fn configuration_space_has_the_identity_and_the_registers() {
    let (watchdog, _) = device();
    let mut function = lock(&watchdog.function);
    let read = |function: &mut Function, offset: usize| {
        let mut data = [0; 4];
        function.read_config(offset, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(&mut function, 0), 0x25ab_8086);
    assert_eq!(read(&mut function, 8), 0x0880_0000);
    assert_eq!(function.write_config(0x60, &[0xff, 0xff]), Effect::None);
    assert_eq!(read(&mut function, 0x60), 0x27);
    function.reset();
    assert_eq!(read(&mut function, 0x60), 0);
}

#[test]
fn state_of_the_first_version_is_restored() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/watchdog.bin");
    let (mut watchdog, _) = device();
    lock(&watchdog.function).registers = started(Instant::now());
    watchdog.pause(Instant::now()).unwrap();
    if std::env::var_os("VMMD_WRITE_GOLDEN").is_some() {
        let section = watchdog.save().unwrap();
        std::fs::write(path, section.payload).unwrap();
    }
    let section = Section {
        kind: "watchdog".into(),
        version: 1,
        id: "watchdog".into(),
        payload: std::fs::read(path).unwrap(),
    };
    let (mut other, calls) = device();
    other.restore(&section).unwrap();
    assert_eq!(other.save().unwrap().payload, section.payload);
    other.resume().unwrap();
    assert!(other.timer().due().is_some());
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}
