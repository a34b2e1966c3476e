//! The keyboard controller, as far as it is needed to reset the machine and to be found without a keyboard.
//!
//! A driver that probes it gets an answer to each command at once: the controller and the interfaces of both ports are well,
//! and nothing is plugged in. Its interrupts are not connected. ACPI says that there is no controller, so kernels that believe ACPI
//! do not look for keyboard and mouse.

use std::{
    collections::VecDeque,
    iter::repeat,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    bus::{BusDevice, Effect},
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

/// Configuration byte: system flag; both devices' clocks off.
const CONFIG_DEFAULT: u8 = 1 << 2 | 1 << 4 | 1 << 5;

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

/// The controller.
#[derive(Debug)]
pub struct I8042 {
    config: u8,
    output_port: u8,
    answers: VecDeque<Answer>,
    /// The command that the next byte in the data port belongs to.
    pending: Option<u8>,
}

impl Default for I8042 {
    fn default() -> Self {
        Self {
            config: CONFIG_DEFAULT,
            output_port: OUTPUT_DEFAULT,
            answers: VecDeque::new(),
            pending: None,
        }
    }
}

impl I8042 {
    /// As after power-on.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    pub(super) fn save(&self) -> message::I8042 {
        message::I8042 {
            config: self.config.into(),
            output_port: self.output_port.into(),
            answers: self.answers.iter().map(|answer| answer.byte).collect(),
            pending: self.pending.map(u32::from),
            aux_answers: self.answers.iter().map(|answer| answer.is_aux).collect(),
        }
    }

    pub(super) fn restore(&mut self, saved: &message::I8042) -> Result<(), StateError> {
        check(saved.answers.len() <= MAX_ANSWERS, "i8042.answers", "too many")?;
        // Version 1 has none: no answer came from the auxiliary port.
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
        *self = Self {
            config: narrow("i8042.config", saved.config)?,
            output_port: narrow("i8042.output_port", saved.output_port)?,
            answers: answers.collect(),
            pending,
        };
        Ok(())
    }

    fn status(&self) -> u8 {
        match self.answers.front() {
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
            DISABLE_KEYBOARD => self.config |= 1 << 4,
            ENABLE_KEYBOARD => self.config &= !(1 << 4),
            TEST_AUX | TEST_KEYBOARD => self.answer(INTERFACE_WELL),
            SELF_TEST => self.answer(PASSED),
            READ_OUTPUT_PORT => self.answer(self.output_port),
            PULSE..=CLOCK_OFF if command & OUTPUT_NOT_RESET == 0 => return Effect::Reset,
            _ => {}
        }
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
            // What is for a keyboard or mouse goes nowhere.
            _ => {}
        }
        Effect::None
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
pub struct DataPort(pub Arc<Mutex<I8042>>);

/// The controller at its command port.
pub struct CommandPort(pub Arc<Mutex<I8042>>);

fn lock(controller: &Mutex<I8042>) -> MutexGuard<'_, I8042> {
    controller.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BusDevice for DataPort {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        match data {
            [byte] => *byte = lock(&self.0).answers.pop_front().map_or(0, |answer| answer.byte),
            _ => data.fill(0xff),
        }
    }

    fn write(&mut self, _offset: u64, data: &[u8]) -> Effect {
        match data {
            [byte] => lock(&self.0).data(*byte),
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
    use proptest::prelude::*;

    use super::*;

    fn controller() -> (DataPort, CommandPort) {
        let shared = Arc::new(Mutex::new(I8042::default()));
        (DataPort(Arc::clone(&shared)), CommandPort(shared))
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
    fn all_tests_pass_and_no_device_is_found() {
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
            let saved = lock(&twin.0.0).save();
            let mut restored = controller();
            lock(&restored.0.0).restore(&saved).unwrap();
            prop_assert_eq!(run(&mut restored, &after), run(&mut twin, &after));
            prop_assert_eq!(lock(&restored.0.0).save(), lock(&twin.0.0).save());
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

    /// What each access read, or had as its effect.
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
        let refused = [
            (
                "i8042.config",
                message::I8042 {
                    config: 256,
                    ..good.clone()
                },
            ),
            (
                "i8042.output_port",
                message::I8042 {
                    output_port: 256,
                    ..good.clone()
                },
            ),
            (
                "i8042.answers",
                message::I8042 {
                    answers: vec![0; 5],
                    ..good.clone()
                },
            ),
            (
                "i8042.aux_answers",
                message::I8042 {
                    aux_answers: vec![true],
                    ..good.clone()
                },
            ),
            (
                "i8042.pending",
                message::I8042 {
                    pending: Some(0x160),
                    ..good.clone()
                },
            ),
            (
                "i8042.pending",
                message::I8042 {
                    pending: Some(0xaa),
                    ..good.clone()
                },
            ),
        ];
        for (name, saved) in refused {
            let mut controller = I8042::default();
            let error = controller.restore(&saved).unwrap_err();
            assert!(
                matches!(error, StateError::Invalid { field, .. } if field == name),
                "{error}"
            );
            assert_eq!(controller.save(), good);
        }
    }
}
