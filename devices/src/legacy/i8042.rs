//! The keyboard controller: it resets the machine, and a keyboard may be plugged in.
//!
//! A probing driver gets an answer to each command at once: the controller and the interfaces of
//! both ports pass their tests. A machine with a screen has a keyboard; there is never a mouse.
//! Without a keyboard ACPI reports no controller, so kernels that rely on ACPI do not look for one.
//! The keyboard's interrupt signals bytes of the keyboard, not answers of the controller.

use std::{
    collections::VecDeque,
    iter::repeat,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use super::keyboard::AtKeyboard;
use crate::{
    bus::{BusDevice, Effect},
    input::{Hub, Key, Keyboard},
    interrupt::IrqLine,
    state::{StateError, check, message, narrow},
};

/// Data port.
pub const DATA_PORT: u64 = 0x60;
/// Command (written) and status (read) port.
pub const COMMAND_PORT: u64 = 0x64;

/// Status: a byte waits in the data port.
const STATUS_OUTPUT_FULL: u8 = 1;
/// Status: the controller passed its self-test.
const STATUS_SYSTEM: u8 = 1 << 2;
/// Status: the byte that waits came from the auxiliary port, the mouse's.
const STATUS_AUX: u8 = 1 << 5;

/// Configuration byte: the keyboard's interrupt is on.
const CONFIG_INTERRUPT: u8 = 1 << 0;
/// Configuration byte: the keyboard's clock is off, so it can't send.
const CONFIG_CLOCK_OFF: u8 = 1 << 4;
/// Configuration byte: bytes of the keyboard are translated to scan code set 1.
const CONFIG_TRANSLATE: u8 = 1 << 6;
/// Configuration byte: system flag; both devices' clocks off.
const CONFIG_DEFAULT: u8 = 1 << 2 | CONFIG_CLOCK_OFF | 1 << 5;

/// Output port: bit 0 low resets the processor; bit 1 is A20.
const OUTPUT_NOT_RESET: u8 = 1;
const OUTPUT_DEFAULT: u8 = 0b11;

/// Answers that wait at most: no guest needs more than two.
const MAX_ANSWERS: usize = 4;

const READ_CONFIG: u8 = 0x20;
const WRITE_CONFIG: u8 = 0x60;
const DISABLE_AUX: u8 = 0xa7;
const ENABLE_AUX: u8 = 0xa8;
const TEST_AUX: u8 = 0xa9;
const SELF_TEST: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const DISABLE_KEYBOARD: u8 = 0xad;
const ENABLE_KEYBOARD: u8 = 0xae;
const READ_OUTPUT_PORT: u8 = 0xd0;
const WRITE_OUTPUT_PORT: u8 = 0xd1;
/// The next byte is put into the data port as if the keyboard, or the mouse, had sent it.
const WRITE_KEYBOARD_OUTPUT: u8 = 0xd2;
const WRITE_AUX_OUTPUT: u8 = 0xd3;
const WRITE_AUX: u8 = 0xd4;
/// 0xf0 to 0xff pulse the output port's low bits whose bit in the command is 0.
const PULSE: u8 = 0xf0;

/// A byte that waits in the data port.
#[derive(Clone, Copy, Debug)]
struct Answer {
    byte: u8,
    /// Whether it came from the auxiliary port.
    is_aux: bool,
}

/// The keyboard and its interrupt.
struct Plugged {
    keyboard: AtKeyboard,
    irq: Arc<dyn IrqLine>,
    /// The driver was interrupted for the byte that waits.
    told: bool,
    /// The keyboard was restored, and no source holds its pressed keys.
    restored: bool,
}

/// The controller.
pub struct I8042 {
    config: u8,
    output_port: u8,
    answers: VecDeque<Answer>,
    /// The command that the next byte in the data port belongs to.
    pending: Option<u8>,
    plugged: Option<Plugged>,
}

impl Default for I8042 {
    fn default() -> Self {
        Self {
            config: CONFIG_DEFAULT,
            output_port: OUTPUT_DEFAULT,
            answers: VecDeque::new(),
            pending: None,
            plugged: None,
        }
    }
}

impl I8042 {
    /// As after power-on.
    pub fn reset(&mut self) {
        let plugged = self.plugged.take();
        *self = Self {
            plugged: plugged.map(|plugged| Plugged::new(plugged.irq)),
            ..Self::default()
        };
    }

    /// Plugs a keyboard in.
    pub(super) fn plug(&mut self, irq: Arc<dyn IrqLine>) {
        self.plugged = Some(Plugged::new(irq));
    }

    pub(super) fn save(&self) -> message::I8042 {
        message::I8042 {
            config: self.config.into(),
            output_port: self.output_port.into(),
            answers: self.answers.iter().map(|answer| answer.byte).collect(),
            pending: self.pending.map(u32::from),
            aux_answers: self.answers.iter().map(|answer| answer.is_aux).collect(),
            keyboard: self.plugged.as_ref().map(|plugged| plugged.keyboard.save()),
        }
    }

    pub(super) fn restore(&mut self, saved: &message::I8042) -> Result<(), StateError> {
        check(saved.answers.len() <= MAX_ANSWERS, "i8042.answers", "too many")?;
        // Empty in version 1: no answer came from the auxiliary port.
        check(
            saved.aux_answers.is_empty() || saved.aux_answers.len() == saved.answers.len(),
            "i8042.aux_answers",
            "not one for each answer",
        )?;
        let pending = saved.pending.map(|command| narrow("i8042.pending", command));
        let pending = pending.transpose()?;
        check(
            pending.is_none_or(takes_data),
            "i8042.pending",
            "no command that takes a byte of data",
        )?;
        let aux = saved.aux_answers.iter().copied().chain(repeat(false));
        let answers = saved.answers.iter().zip(aux);
        let answers = answers.map(|(byte, is_aux)| Answer { byte: *byte, is_aux });
        check(
            saved.keyboard.is_none() || self.plugged.is_some(),
            "i8042.keyboard",
            "this machine has no keyboard there",
        )?;
        let keyboard = saved.keyboard.as_ref().map(AtKeyboard::restored).transpose()?;
        let restored = Self {
            config: narrow("i8042.config", saved.config)?,
            output_port: narrow("i8042.output_port", saved.output_port)?,
            answers: answers.collect(),
            pending,
            plugged: None,
        };
        let plugged = self.plugged.take();
        *self = restored;
        // A state from a version without keyboards has no keyboard: the keyboard is as after
        // power-on then. The saved machine's interrupt is pending or handled; a spurious one does
        // no harm.
        self.plugged = plugged.map(|plugged| Plugged {
            keyboard: keyboard.unwrap_or_default(),
            restored: true,
            ..Plugged::new(plugged.irq)
        });
        Ok(())
    }

    /// The keyboard, while its clock is on.
    fn keyboard(&mut self) -> Option<&mut Plugged> {
        let clock_off = self.config & CONFIG_CLOCK_OFF != 0;
        self.plugged.as_mut().filter(|_| !clock_off)
    }

    /// Interrupts the driver for a byte of the keyboard.
    fn interrupt(&mut self) {
        if !self.answers.is_empty() || self.config & CONFIG_INTERRUPT == 0 {
            return;
        }
        if let Some(plugged) = self.keyboard()
            && plugged.keyboard.has_byte()
            && !std::mem::replace(&mut plugged.told, true)
        {
            plugged.irq.pulse();
        }
    }

    fn read_data(&mut self) -> u8 {
        if let Some(answer) = self.answers.pop_front() {
            self.interrupt();
            return answer.byte;
        }
        let translate = self.config & CONFIG_TRANSLATE != 0;
        let Some(plugged) = self.keyboard() else { return 0 };
        let byte = plugged.keyboard.take(translate);
        plugged.told = false;
        self.interrupt();
        byte.unwrap_or(0)
    }

    /// Returns whether a driver reads the keyboard's bytes.
    fn is_listening(&self) -> bool {
        self.config & (CONFIG_INTERRUPT | CONFIG_CLOCK_OFF) == CONFIG_INTERRUPT
            && self
                .plugged
                .as_ref()
                .is_some_and(|plugged| plugged.keyboard.is_scanning())
    }

    /// The machine runs from now on. After a restore all keys are released.
    pub(super) fn resume(&mut self) {
        if let Some(plugged) = &mut self.plugged
            && std::mem::take(&mut plugged.restored)
        {
            plugged.keyboard.release_all();
            self.interrupt();
        }
    }

    /// The lights of the keyboard, if there is one.
    pub(super) fn leds(&self) -> Option<u8> {
        Some(self.plugged.as_ref()?.keyboard.leds())
    }

    fn status(&mut self) -> u8 {
        let typed = self.keyboard().is_some_and(|plugged| plugged.keyboard.has_byte());
        match self.answers.front() {
            None if typed => STATUS_SYSTEM | STATUS_OUTPUT_FULL,
            None => STATUS_SYSTEM,
            Some(Answer { is_aux: false, .. }) => STATUS_SYSTEM | STATUS_OUTPUT_FULL,
            Some(Answer { is_aux: true, .. }) => STATUS_SYSTEM | STATUS_OUTPUT_FULL | STATUS_AUX,
        }
    }

    fn answer(&mut self, byte: u8) {
        self.put(byte, false);
    }

    fn put(&mut self, byte: u8, is_aux: bool) {
        if self.answers.len() < MAX_ANSWERS {
            self.answers.push_back(Answer { byte, is_aux });
        }
    }

    fn command(&mut self, command: u8) -> Effect {
        const CLOCK_OFF: u8 = 0xfe;
        const PASSED: u8 = 0x55;
        /// Clock and data lines are neither stuck high nor low.
        const INTERFACE_WELL: u8 = 0;
        self.pending = None;
        match command {
            READ_CONFIG => self.answer(self.config),
            _ if takes_data(command) => self.pending = Some(command),
            DISABLE_AUX => self.config |= 1 << 5,
            ENABLE_AUX => self.config &= !(1 << 5),
            DISABLE_KEYBOARD => self.config |= CONFIG_CLOCK_OFF,
            ENABLE_KEYBOARD => self.config &= !CONFIG_CLOCK_OFF,
            TEST_AUX | TEST_KEYBOARD => self.answer(INTERFACE_WELL),
            SELF_TEST => self.answer(PASSED),
            READ_OUTPUT_PORT => self.answer(self.output_port),
            PULSE..=CLOCK_OFF if command & OUTPUT_NOT_RESET == 0 => return Effect::Reset,
            _ => {}
        }
        self.interrupt();
        Effect::None
    }

    fn data(&mut self, byte: u8) -> Effect {
        match self.pending.take() {
            Some(WRITE_CONFIG) => self.config = byte,
            Some(WRITE_OUTPUT_PORT) => {
                if byte & OUTPUT_NOT_RESET == 0 {
                    return Effect::Reset;
                }
                self.output_port = byte;
            }
            Some(WRITE_KEYBOARD_OUTPUT) => self.put(byte, false),
            Some(WRITE_AUX_OUTPUT) => self.put(byte, true),
            // Bytes for a mouse are dropped.
            Some(_) => {}
            None => {
                if let Some(plugged) = &mut self.plugged {
                    plugged.keyboard.command(byte);
                    // So that it can answer.
                    self.config &= !CONFIG_CLOCK_OFF;
                }
            }
        }
        self.interrupt();
        Effect::None
    }
}

impl Plugged {
    fn new(irq: Arc<dyn IrqLine>) -> Self {
        Self {
            keyboard: AtKeyboard::default(),
            irq,
            told: false,
            restored: false,
        }
    }
}

/// The keyboard as the hub sees it.
pub(super) struct Handle(pub Arc<Mutex<I8042>>);

impl Keyboard for Handle {
    fn is_listening(&self) -> bool {
        lock(&self.0).is_listening()
    }

    fn key(&self, key: Key, down: bool) {
        let mut controller = lock(&self.0);
        if let Some(plugged) = &mut controller.plugged {
            plugged.keyboard.key(key, down);
        }
        controller.interrupt();
    }

    fn is_waiting(&self) -> bool {
        let controller = lock(&self.0);
        controller
            .plugged
            .as_ref()
            .is_some_and(|plugged| plugged.keyboard.has_byte())
    }

    fn repeat(&self, key: Key) {
        let mut controller = lock(&self.0);
        if let Some(plugged) = &mut controller.plugged {
            plugged.keyboard.repeat(key);
        }
        controller.interrupt();
    }
}

/// Whether the byte that is next written to the data port belongs to `command`.
fn takes_data(command: u8) -> bool {
    matches!(
        command,
        WRITE_CONFIG | WRITE_OUTPUT_PORT | WRITE_KEYBOARD_OUTPUT | WRITE_AUX_OUTPUT | WRITE_AUX
    )
}

/// The controller at its data port.
pub struct DataPort {
    controller: Arc<Mutex<I8042>>,
    /// Receives the state of the keyboard's lights.
    hub: Arc<OnceLock<Arc<Hub>>>,
}

impl DataPort {
    pub(super) fn new(controller: &Arc<Mutex<I8042>>, hub: &Arc<OnceLock<Arc<Hub>>>) -> Self {
        Self {
            controller: Arc::clone(controller),
            hub: Arc::clone(hub),
        }
    }
}

/// The controller at its command port.
pub struct CommandPort(pub Arc<Mutex<I8042>>);

fn lock(controller: &Mutex<I8042>) -> MutexGuard<'_, I8042> {
    controller.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BusDevice for DataPort {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = lock(&self.controller).read_data(),
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match data {
            [byte] => {
                let mut controller = lock(&self.controller);
                let before = controller.leds();
                let effect = controller.data(*byte);
                let leds = controller.leds().filter(|leds| Some(*leds) != before);
                // The hub's lock comes before the controller's.
                drop(controller);
                if let Some((leds, hub)) = leds.zip(self.hub.get()) {
                    hub.set_leds(leds);
                }
                effect
            }
            _ => Effect::None,
        }
    }
}

impl BusDevice for CommandPort {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = lock(&self.0).status(),
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match data {
            [byte] => lock(&self.0).command(*byte),
            _ => Effect::None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::{super::LegacyDevices, *};
    use crate::{
        component::Component as _,
        input::LED_CAPS,
        state::{Change, refuses},
    };

    fn controller() -> (DataPort, CommandPort) {
        let shared = Arc::new(Mutex::new(I8042::default()));
        (DataPort::new(&shared, &Arc::default()), CommandPort(shared))
    }

    fn read(port: &mut dyn BusDevice) -> u8 {
        let mut data = [0];
        port.read(0, &mut data);
        data[0]
    }

    #[test]
    fn the_ways_to_reset_a_machine_work() {
        let (mut data, mut command) = controller();
        assert_eq!(command.write(0, &[0xfe]), Effect::Reset);
        assert_eq!(command.write(0, &[0xff]), Effect::None);
        assert_eq!(command.write(0, &[0xd1]), Effect::None);
        assert_eq!(data.write(0, &[0xfe]), Effect::Reset);
        // Only behind the command.
        assert_eq!(data.write(0, &[0xfe]), Effect::None);
        assert_eq!(command.write(0, &[0xd1]), Effect::None);
        assert_eq!(data.write(0, &[0xdf]), Effect::None);
        assert_eq!(command.write(0, &[0xd0]), Effect::None);
        assert_eq!(read(&mut data), 0xdf);
    }

    #[test]
    fn all_tests_pass_and_no_device_is_found_where_none_is_plugged_in() {
        let (mut data, mut command) = controller();
        for (asked, answer) in [(0xaa, 0x55), (0xab, 0), (0xa9, 0), (0x20, 0x34)] {
            assert_eq!(read(&mut command) & 1, 0);
            assert_eq!(command.write(0, &[asked]), Effect::None);
            assert_eq!(read(&mut command) & 1, 1);
            assert_eq!(read(&mut data), answer, "{asked:#x}");
        }
        // A byte for the keyboard or the mouse has no answer.
        for asked in [None, Some(0xd4)] {
            if let Some(asked) = asked {
                assert_eq!(command.write(0, &[asked]), Effect::None);
            }
            assert_eq!(data.write(0, &[0xf2]), Effect::None);
            assert_eq!(read(&mut command) & 1, 0);
        }
    }

    /// Linux takes a controller whose auxiliary port does not loop back for one of a time before the mouse port.
    #[test]
    fn bytes_are_looped_back_as_if_a_device_had_sent_them() {
        let (mut data, mut command) = controller();
        for (asked, status) in [(0xd2, 0x05), (0xd3, 0x25)] {
            assert_eq!(command.write(0, &[asked]), Effect::None);
            assert_eq!(data.write(0, &[0x5a]), Effect::None);
            assert_eq!(read(&mut command), status, "{asked:#x}");
            assert_eq!(read(&mut data), 0x5a);
            assert_eq!(read(&mut command), 0x04);
        }
    }

    #[derive(Default)]
    struct Irq(std::sync::atomic::AtomicU32);

    impl IrqLine for Irq {
        fn pulse(&self) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    impl Irq {
        fn take(&self) -> u32 {
            self.0.swap(0, std::sync::atomic::Ordering::SeqCst)
        }
    }

    /// A machine with a keyboard: its devices, what types, and the interrupt.
    fn machine() -> (LegacyDevices, Arc<Hub>, Arc<Irq>) {
        let (hub, irq) = (
            Arc::new(Hub::new(crate::input::Layout::Us)),
            Arc::new(Irq::default()),
        );
        let devices = LegacyDevices::new(Arc::new(super::super::tests::Line::default()));
        devices.plug_keyboard(&hub, Arc::clone(&irq) as _);
        (devices, hub, irq)
    }

    /// The same by its ports.
    fn with_keyboard() -> (DataPort, CommandPort, Arc<Hub>, Arc<Irq>) {
        let (devices, hub, irq) = machine();
        let data = DataPort::new(&devices.i8042, &devices.hub);
        (data, CommandPort(Arc::clone(&devices.i8042)), hub, irq)
    }

    fn ask(ports: (&mut DataPort, &mut CommandPort), bytes: &[u8]) -> Vec<u8> {
        let (data, command) = ports;
        for byte in bytes {
            assert_eq!(data.write(0, &[*byte]), Effect::None);
        }
        let waits = |command: &mut CommandPort| read(command) & 1 == 1;
        let mut answers = Vec::new();
        while waits(command) {
            answers.push(read(data));
        }
        answers
    }

    #[test]
    fn what_is_typed_reaches_a_driver_with_an_interrupt_for_each_byte() {
        let (mut data, mut command, hub, irq) = with_keyboard();
        let mut source = Hub::source(&hub);
        source.key(Key::ENTER, true);
        source.key(Key::ENTER, false);
        assert_eq!(read(&mut command) & 1, 0, "nobody listens yet");
        // Interrupt on, clock on, translated.
        assert_eq!(command.write(0, &[WRITE_CONFIG]), Effect::None);
        assert_eq!(data.write(0, &[0x45]), Effect::None);
        assert_eq!(ask((&mut data, &mut command), &[0xf4]), [0xfa]);
        assert_eq!(irq.take(), 1);
        source.key(Key::ENTER, true);
        source.key(Key::ENTER, false);
        assert_eq!(irq.take(), 1, "the second byte waits behind the first");
        assert_eq!(read(&mut data), 0x1c);
        assert_eq!(irq.take(), 1);
        assert_eq!(read(&mut data), 0x9c);
        assert_eq!((irq.take(), read(&mut command) & 1), (0, 0));

        // While the clock is off the byte waits; the driver is notified when the clock is on again.
        assert_eq!(command.write(0, &[DISABLE_KEYBOARD]), Effect::None);
        source.key(Key::ESC, true);
        assert_eq!((irq.take(), read(&mut command) & 1), (0, 0));
        assert_eq!(command.write(0, &[ENABLE_KEYBOARD]), Effect::None);
        assert_eq!(irq.take(), 0, "keys that nobody listens to are lost");
    }

    #[test]
    fn the_keyboards_lights_reach_the_hub_and_a_reset_leaves_it_plugged_in() {
        let (mut data, mut command, hub, _irq) = with_keyboard();
        assert_eq!(ask((&mut data, &mut command), &[0xed, 0b110]), [0xfa, 0xfa]);
        assert_eq!(hub.leds(), 0b110);
        let shared = Arc::clone(&command.0);
        lock(&shared).reset();
        assert_eq!(ask((&mut data, &mut command), &[0xf2]), [0xfa, 0xab, 0x83]);
    }

    #[test]
    fn a_controller_is_restored_with_its_keyboard() {
        let (mut data, mut command, _hub, _irq) = with_keyboard();
        assert_eq!(command.write(0, &[WRITE_CONFIG]), Effect::None);
        assert_eq!(data.write(0, &[0x45]), Effect::None);
        assert_eq!(data.write(0, &[0xf4]), Effect::None);
        let saved = lock(&command.0).save();
        let (mut data, command, _hub, irq) = with_keyboard();
        lock(&command.0).restore(&saved).unwrap();
        assert_eq!(lock(&command.0).save(), saved);
        assert_eq!(read(&mut data), 0xfa);
        assert_eq!(irq.take(), 0);
        assert!(I8042::default().restore(&saved).is_err());
        // One from before there were keyboards.
        lock(&command.0).restore(&I8042::default().save()).unwrap();
        assert_eq!(
            ask((&mut data, &mut CommandPort(Arc::clone(&command.0))), &[0xee]),
            [0xee]
        );
    }

    #[test]
    fn a_restored_machine_has_the_lights_of_the_saved_one_and_nobody_holds_its_keys() {
        let (mut saved, hub, _irq) = machine();
        let mut data = DataPort::new(&saved.i8042, &saved.hub);
        let mut command = CommandPort(Arc::clone(&saved.i8042));
        assert_eq!(command.write(0, &[WRITE_CONFIG]), Effect::None);
        assert_eq!(data.write(0, &[0x45]), Effect::None);
        let answers = ask((&mut data, &mut command), &[0xf4, 0xed, LED_CAPS]);
        assert_eq!(answers, [0xfa; 3]);
        let mut source = Hub::source(&hub);
        source.key(Key::LEFT_SHIFT, true);
        assert_eq!(read(&mut data), 0x2a);
        saved.pause(Instant::now()).unwrap();
        let section = saved.save().unwrap();
        // The saved machine continues, and its key stays pressed.
        saved.resume().unwrap();
        assert_eq!(read(&mut command) & 1, 0);

        let (mut restored, hub, irq) = machine();
        let mut data = DataPort::new(&restored.i8042, &restored.hub);
        let mut command = CommandPort(Arc::clone(&restored.i8042));
        restored.restore(&section).unwrap();
        assert_eq!(hub.leds(), LED_CAPS);
        assert_eq!(restored.save().unwrap(), section);
        restored.resume().unwrap();
        assert_eq!((irq.take(), read(&mut data)), (1, 0xaa));
        restored.pause(Instant::now()).unwrap();
        restored.resume().unwrap();
        assert_eq!((irq.take(), read(&mut command) & 1), (0, 0));
    }

    #[test]
    fn the_configuration_is_kept_until_a_reset() {
        let (mut data, mut command) = controller();
        for (asked, value) in [(0x60, Some(0x07)), (0xad, None), (0xa8, None)] {
            assert_eq!(command.write(0, &[asked]), Effect::None);
            if let Some(value) = value {
                assert_eq!(data.write(0, &[value]), Effect::None);
            }
        }
        let mut config = || {
            assert_eq!(command.write(0, &[0x20]), Effect::None);
            read(&mut data)
        };
        assert_eq!(config(), 0x17);
        let shared = command.0.clone();
        shared.lock().unwrap().reset();
        assert_eq!(command.write(0, &[0x20]), Effect::None);
        assert_eq!(read(&mut data), 0x34);
    }

    #[test]
    fn answers_that_nobody_reads_do_not_pile_up() {
        let (_, mut command) = controller();
        for _ in 0..1000 {
            assert_eq!(command.write(0, &[0xaa]), Effect::None);
        }
        assert_eq!(command.0.lock().unwrap().answers.len(), MAX_ANSWERS);
    }

    proptest! {
        #[test]
        fn a_restored_controller_behaves_as_its_twin_that_was_not_saved(
            before in accesses(),
            after in accesses(),
        ) {
            let mut twin = controller();
            run(&mut twin, &before);
            let saved = lock(&twin.0.controller).save();
            let mut restored = controller();
            lock(&restored.0.controller).restore(&saved).unwrap();
            prop_assert_eq!(run(&mut restored, &after), run(&mut twin, &after));
            prop_assert_eq!(lock(&restored.0.controller).save(), lock(&twin.0.controller).save());
        }
    }

    /// An access of the command port, or of the data port; a write if there is a value.
    type Access = (bool, Option<u8>);

    fn accesses() -> impl Strategy<Value = Vec<Access>> {
        let commands = prop::sample::select(vec![
            READ_CONFIG,
            WRITE_CONFIG,
            DISABLE_AUX,
            ENABLE_KEYBOARD,
            SELF_TEST,
            READ_OUTPUT_PORT,
            WRITE_OUTPUT_PORT,
            WRITE_AUX_OUTPUT,
            WRITE_AUX,
        ]);
        let write = prop_oneof![commands, any::<u8>()];
        prop::collection::vec((any::<bool>(), prop::option::of(write)), 0..40)
    }

    /// Returns the value or effect of each access.
    fn run(ports: &mut (DataPort, CommandPort), accesses: &[Access]) -> Vec<(u8, Effect)> {
        let access = |(is_command, value): &Access| {
            let port: &mut dyn BusDevice = if *is_command { &mut ports.1 } else { &mut ports.0 };
            match value {
                Some(value) => (0, port.write(0, &[*value])),
                None => (read(port), Effect::None),
            }
        };
        accesses.iter().map(access).collect()
    }

    #[test]
    fn a_saved_state_that_no_controller_has_is_refused_and_changes_nothing() {
        let good = I8042::default().save();
        let changes: [Change<message::I8042>; 6] = [
            ("i8042.config", |saved| saved.config = 256),
            ("i8042.output_port", |saved| saved.output_port = 256),
            ("i8042.answers", |saved| saved.answers = vec![0; 5]),
            ("i8042.aux_answers", |saved| saved.aux_answers = vec![true]),
            ("i8042.pending", |saved| saved.pending = Some(0x160)),
            ("i8042.pending", |saved| saved.pending = Some(0xaa)),
        ];
        refuses(&good, &changes, |saved| {
            let mut controller = I8042::default();
            let result = controller.restore(saved);
            assert_eq!(controller.save(), good);
            result
        });
    }
}
