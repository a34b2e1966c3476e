//! The small fixed devices of platform v1: real-time clock, keyboard controller, NMI status, pvpanic, and
//! the ACPI registers.
//!
//! | I/O ports | device | announcement in ACPI |
//! |---|---|---|
//! | 0x60, 0x64 | [`i8042`] | FADT: no 8042; with a keyboard, DSDT: PNP0303 |
//! | 0x61 | [`nmi_status`] | none |
//! | 0x70, 0x71 | [`rtc`] | DSDT: PNP0B00; FADT: index of the century |
//! | 0x505 | [`pvpanic`] | DSDT: QEMU0001 |
//! | 0x600 | [`pm::PowerRegister`] | FADT: reset register (value 1), sleep control and status register |
//! | 0x604 | [`pm::PowerButton`] | DSDT: the generic event device GED0 |
//! | 0x608 | [`pm::PmTimer`] | none: for EDK2, which has the address built in |
//!
//! A machine with firmware ([`LegacyDevices::with_firmware`]) has [`pm::Pm1Control`] at 0x604 and
//! the power button at 0x60c, and its size of RAM in the clock's memory.
//!
//! The ACPI is hardware-reduced (ACPI 6.5, 4.1), so there are no PM1 event and control blocks and
//! no SCI. The power button ([`pm::PowerButton`]) has its own interrupt and status register. A
//! generic event device (5.6.9) turns the interrupt into a notification of the PNP0C0C device.
//!
//! Port 0x80 (POST codes, which some kernels write for a delay) belongs to no device: the bus drops
//! writes to it.

pub mod i8042;
mod keyboard;
pub mod nmi_status;
pub mod pm;
pub mod pvpanic;
pub mod rtc;

use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Instant,
};

use crate::{
    bus::{Bus, BusError},
    component::{Component, ComponentError},
    input::Hub,
    interrupt::{IrqLine, LevelLine},
    state::{Section, StateError, message, required},
};

/// All of them.
pub struct LegacyDevices {
    rtc: Arc<Mutex<rtc::Rtc>>,
    i8042: Arc<Mutex<i8042::I8042>>,
    /// Where the keyboard is plugged in.
    hub: Arc<OnceLock<Arc<Hub>>>,
    pvpanic: Arc<Mutex<pvpanic::PvPanic>>,
    power: Arc<Mutex<pm::PowerRegister>>,
    timer: Arc<Mutex<pm::PmTimer>>,
    button: Arc<pm::PowerButton>,
    has_firmware: bool,
}

impl LegacyDevices {
    /// As after power-on, with the power button at the interrupt `button`.
    pub fn new(button: Arc<dyn LevelLine>) -> Self {
        Self {
            rtc: Arc::default(),
            i8042: Arc::default(),
            hub: Arc::default(),
            pvpanic: Arc::default(),
            power: Arc::default(),
            timer: Arc::default(),
            button: pm::PowerButton::new(button),
            has_firmware: false,
        }
    }

    /// Adds what firmware expects. RAM is `low` bytes below 4 GiB and `high` bytes above.
    pub fn with_firmware(mut self, low: u64, high: u64) -> Self {
        self.has_firmware = true;
        lock(&self.rtc).set_ram(low, high);
        self
    }

    /// Gives the real-time clock a difference to UTC ([`rtc::Rtc::set_offsets`]).
    pub fn with_clock_offsets(self, offsets: Vec<(u64, i32)>) -> Self {
        lock(&self.rtc).set_offsets(offsets);
        self
    }

    /// Plugs a keyboard into its controller, once, with its interrupt.
    pub fn plug_keyboard(&self, hub: &Arc<Hub>, irq: Arc<dyn IrqLine>) {
        if self.hub.set(Arc::clone(hub)).is_ok() {
            lock(&self.i8042).plug(irq);
            hub.add_keyboard(Arc::new(i8042::Handle(Arc::clone(&self.i8042))));
        }
    }

    /// The power button, for the requester of a shutdown.
    pub fn power_button(&self) -> Arc<pm::PowerButton> {
        Arc::clone(&self.button)
    }

    /// Maps them on the I/O bus.
    pub fn map(&self, pio: &Bus) -> Result<(), BusError> {
        // The serial port, the speaker and others lie between the two ports of the keyboard controller.
        pio.insert(
            i8042::DATA_PORT,
            1,
            Arc::new(Mutex::new(i8042::DataPort::new(&self.i8042, &self.hub))),
        )?;
        pio.insert(
            i8042::COMMAND_PORT,
            1,
            Arc::new(Mutex::new(i8042::CommandPort(Arc::clone(&self.i8042)))),
        )?;
        pio.insert(nmi_status::PORT, 1, Arc::new(Mutex::new(nmi_status::NmiStatus)))?;
        pio.insert(rtc::PORT, rtc::LENGTH, self.rtc.clone())?;
        pio.insert(pvpanic::PORT, 1, self.pvpanic.clone())?;
        pio.insert(pm::POWER_PORT, 1, self.power.clone())?;
        let button_port = if self.has_firmware {
            let control = Arc::new(Mutex::new(pm::Pm1Control));
            pio.insert(pm::CONTROL_PORT, pm::CONTROL_LENGTH, control)?;
            pm::FIRMWARE_BUTTON_PORT
        } else {
            pm::BUTTON_PORT
        };
        pio.insert(button_port, 1, self.button.register())?;
        pio.insert(pm::TIMER_PORT, pm::TIMER_LENGTH, self.timer.clone())
    }
}

/// They have no threads, and only the timer notices a pause. A keyboard notices that a restored machine runs.
impl Component for LegacyDevices {
    fn name(&self) -> &str {
        "legacy devices"
    }

    fn pause(&mut self, _deadline: Instant) -> Result<(), ComponentError> {
        lock(&self.timer).pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), ComponentError> {
        lock(&self.timer).resume();
        lock(&self.i8042).resume();
        Ok(())
    }

    /// The clock and its memory have a battery, the timer counts on, and a press of the button stays.
    fn reset(&mut self) -> Result<(), ComponentError> {
        lock(&self.rtc).reset();
        lock(&self.i8042).reset();
        Ok(())
    }

    /// pvpanic, the NMI status and the power register hold nothing.
    fn save(&self) -> Result<Section, StateError> {
        let state = message::LegacyDevices {
            i8042: Some(lock(&self.i8042).save()),
            rtc: Some(lock(&self.rtc).save()),
            pm_timer: Some(lock(&self.timer).save()),
            power_button: Some(self.button.save()),
        };
        Ok(Section::new(self.name(), &state))
    }

    fn restore(&mut self, section: &Section) -> Result<(), StateError> {
        let saved: message::LegacyDevices = section.open()?;
        lock(&self.i8042).restore(required("i8042", saved.i8042.as_ref())?)?;
        let leds = lock(&self.i8042).leds().filter(|leds| *leds != 0);
        // The hub is new. Another keyboard of it may have lights on.
        if let Some((leds, hub)) = leds.zip(self.hub.get()) {
            hub.set_leds(leds);
        }
        lock(&self.rtc).restore(required("rtc", saved.rtc.as_ref())?)?;
        lock(&self.timer).restore(required("pm_timer", saved.pm_timer.as_ref())?);
        // Missing in version 1: its button was an edge without state.
        self.button.restore(saved.power_button.unwrap_or_default());
        Ok(())
    }
}

fn lock<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::{
        bus::Effect,
        state::{Change, refuses},
    };

    /// An interrupt line without a listener.
    #[derive(Default)]
    pub(super) struct Line(AtomicBool);

    impl Line {
        pub(super) fn is_high(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    impl LevelLine for Line {
        fn set(&self, high: bool) {
            self.0.store(high, Ordering::SeqCst);
        }
    }

    fn legacy_devices() -> LegacyDevices {
        LegacyDevices::new(Arc::new(Line::default()))
    }

    #[test]
    fn each_is_at_the_platforms_address() {
        let (bus, devices) = (Bus::new(), legacy_devices());
        devices.map(&bus).unwrap();
        assert_eq!(bus.write(0x64, &[0xfe]), Effect::Reset);
        assert_eq!(bus.write(0x600, &[1]), Effect::Reset);
        assert_eq!(bus.write(0x600, &[5 << 2 | 1 << 5]), Effect::PowerOff);
        assert_eq!(bus.write(0x505, &[1]), Effect::GuestPanicked);
        assert_eq!(bus.write(0x70, &[0x0d]), Effect::None);
        let mut data = [0];
        bus.read(0x71, &mut data);
        assert_eq!(data, [0x80]);
        bus.read(0x61, &mut data);
        assert_eq!(data[0] & 0xc0, 0, "no error is the cause of an NMI");
        assert_eq!(bus.unclaimed(), 0);
        assert_eq!(bus.write(0x80, &[0]), Effect::None);
        assert!(devices.map(&bus).is_err());
    }

    #[test]
    fn firmware_finds_its_power_control_and_the_size_of_ram() {
        const MIB: u64 = 1 << 20;
        let bus = Bus::new();
        let devices = legacy_devices().with_firmware(2048 * MIB, 5 << 30);
        devices.map(&bus).unwrap();
        assert_eq!(bus.write(0x604, &0x2000_u16.to_le_bytes()), Effect::PowerOff);
        assert_eq!(bus.write(0x604, &0x3400_u16.to_le_bytes()), Effect::None);
        assert_eq!(bus.write(0x604, &1_u16.to_le_bytes()), Effect::None);
        let mut data = [0; 2];
        bus.read(0x604, &mut data);
        assert_eq!(data, [1, 0]);
        devices.power_button().press();
        let mut byte = [0];
        bus.read(0x60c, &mut byte);
        assert_eq!(byte, [1]);
        // 2,032 MiB and 5 GiB in units of 64 KiB.
        for (index, value) in [(0x34, 0), (0x35, 0x7f), (0x5b, 0), (0x5c, 0x40), (0x5d, 1)] {
            let _none = bus.write(0x70, &[index]);
            bus.read(0x71, &mut byte);
            assert_eq!(byte, [value], "{index:#x}");
        }
    }

    #[test]
    fn a_pause_stops_the_timer_and_a_reset_leaves_the_machine_usable() {
        let (bus, mut devices) = (Bus::new(), legacy_devices());
        devices.map(&bus).unwrap();
        let timer = || {
            let mut data = [0; 4];
            bus.read(0x608, &mut data);
            u32::from_le_bytes(data)
        };
        devices.pause(Instant::now()).unwrap();
        assert_eq!(timer(), timer());
        devices.reset().unwrap();
        devices.resume().unwrap();
        let before = timer();
        while timer() == before {}
    }

    #[test]
    fn restored_devices_go_on_where_the_saved_ones_stopped() {
        let (bus, mut saved) = (Bus::new(), legacy_devices());
        saved.map(&bus).unwrap();
        saved.power_button().press();
        // A byte that waits, a command that waits for its byte, a byte of CMOS memory.
        assert_eq!(bus.write(0x64, &[0xaa]), Effect::None);
        assert_eq!(bus.write(0x64, &[0xd1]), Effect::None);
        assert_eq!(bus.write(0x70, &[0x7f]), Effect::None);
        assert_eq!(bus.write(0x71, &[0xa5]), Effect::None);
        let timer = |bus: &Bus| {
            let mut data = [0; 4];
            bus.read(0x608, &mut data);
            u32::from_le_bytes(data)
        };
        // The restored timer, just built, is far behind.
        while timer(&bus) < 4000 {}
        saved.pause(Instant::now()).unwrap();
        let (section, stopped_at) = (saved.save().unwrap(), timer(&bus));
        drop((bus, saved));

        let (bus, mut restored) = (Bus::new(), legacy_devices());
        restored.map(&bus).unwrap();
        restored.restore(&section).unwrap();
        assert_eq!(timer(&bus), stopped_at);
        assert_eq!(restored.save().unwrap(), section);
        restored.resume().unwrap();
        while timer(&bus) == stopped_at {}
        let read = |port| {
            let mut data = [0];
            bus.read(port, &mut data);
            data[0]
        };
        assert_eq!(read(0x60), 0x55);
        assert_eq!((read(0x70), read(0x71)), (0x7f, 0xa5));
        assert_eq!(read(0x604), 1);
        // Output port with the reset line low.
        assert_eq!(bus.write(0x60, &[0xfe]), Effect::Reset);
    }

    #[test]
    fn a_section_without_one_of_the_devices_or_of_another_kind_is_refused() {
        let section = legacy_devices().save().unwrap();
        let whole: message::LegacyDevices = section.open().unwrap();
        let changes: [Change<message::LegacyDevices>; 3] = [
            ("i8042", |saved| saved.i8042 = None),
            ("rtc", |saved| saved.rtc = None),
            ("pm_timer", |saved| saved.pm_timer = None),
        ];
        refuses(&whole, &changes, |saved| {
            legacy_devices().restore(&Section::new("legacy devices", saved))
        });
        let other = Section::new("legacy devices", &message::Serial::default());
        let error = legacy_devices().restore(&other);
        assert!(matches!(error, Err(StateError::WrongKind { .. })));
    }

    #[test]
    fn a_state_of_version_1_is_still_read() {
        let mut rtc = vec![0x08, 0x0a, 0x12, 0x80, 0x01];
        rtc.extend([0x26; 128]);
        let mut payload = vec![0x0a, 0x09, 0x08, 0x34, 0x10, 0x03, 0x1a, 0x01, 0x55, 0x20, 0x60];
        payload.extend([0x12, 0x85, 0x01]);
        payload.extend(rtc);
        payload.extend([0x1a, 0x03, 0x08, 0xe8, 0x07]);
        let section = Section {
            kind: "legacy".into(),
            version: 1,
            id: "legacy devices".into(),
            payload,
        };
        let mut devices = legacy_devices();
        devices.power_button().press();
        devices.restore(&section).unwrap();
        let now: message::LegacyDevices = devices.save().unwrap().open().unwrap();
        assert_eq!(now.power_button, Some(message::PowerButton { pressed: false }));
        let old: message::LegacyDevices = section.open().unwrap();
        let i8042 = now.i8042.map(|i8042| message::I8042 {
            aux_answers: Vec::new(),
            ..i8042
        });
        let (rtc, pm_timer, power_button) = (now.rtc, now.pm_timer, None);
        let now = message::LegacyDevices {
            i8042,
            rtc,
            pm_timer,
            power_button,
        };
        assert_eq!(now, old);
    }
}
