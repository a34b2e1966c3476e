//! The keyboard controller, as far as it is needed to reset the machine and to be found without a keyboard.
//!
//! A driver that probes it gets an answer to each command at once, and none from a keyboard or mouse: both ports fail
//! their test, so that Linux does not wait for devices on them.

use std::{
    collections::VecDeque,
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
const WRITE_AUX_OUTPUT: u8 = 0xd3;
const WRITE_AUX: u8 = 0xd4;
/// 0xf0 to 0xff pulse the output port's low bits whose bit in the command is 0.
const PULSE: u8 = 0xf0;

/// The controller.
#[derive(Debug)]
pub struct I8042 {
    config: u8,
    output_port: u8,
    answers: VecDeque<u8>,
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
            answers: self.answers.iter().copied().collect(),
            pending: self.pending.map(u32::from),
        }
    }

    pub(super) fn restore(&mut self, saved: &message::I8042) -> Result<(), StateError> {
        check(saved.answers.len() <= MAX_ANSWERS, "i8042.answers", "too many")?;
        let pending = saved.pending.map(|command| narrow("i8042.pending", command));
        let pending = pending.transpose()?;
        check(
            pending.is_none_or(takes_data),
            "i8042.pending",
            "no command that takes a byte of data",
        )?;
        *self = Self {
            config: narrow("i8042.config", saved.config)?,
            output_port: narrow("i8042.output_port", saved.output_port)?,
            answers: saved.answers.iter().copied().collect(),
            pending,
        };
        Ok(())
    }

    fn status(&self) -> u8 {
        if self.answers.is_empty() {
            STATUS_SYSTEM
        } else {
            STATUS_SYSTEM | STATUS_OUTPUT_FULL
        }
    }

    fn answer(&mut self, byte: u8) {
        if self.answers.len() < MAX_ANSWERS {
            self.answers.push_back(byte);
        }
    }

    fn command(&mut self, command: u8) -> Effect {
        const CLOCK_OFF: u8 = 0xfe;
        const PASSED: u8 = 0x55;
        self.pending = None;
        match command {
            READ_CONFIG => self.answer(self.config),
            _ if takes_data(command) => self.pending = Some(command),
            DISABLE_AUX => self.config |= 1 << 5,
            ENABLE_AUX => self.config &= !(1 << 5),
            DISABLE_KEYBOARD => self.config |= 1 << 4,
            ENABLE_KEYBOARD => self.config &= !(1 << 4),
            // 4: data line stuck high. Nothing is plugged in.
            TEST_AUX | TEST_KEYBOARD => self.answer(4),
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
            // What is put in the buffer as if the mouse had sent it: Linux tests for a mouse port this way and must
            // not find one, so it is dropped. What is for a keyboard or mouse goes nowhere.
            _ => {}
        }
        Effect::None
    }
}

/// Whether the byte that is next written to the data port belongs to `command`.
fn takes_data(command: u8) -> bool {
    matches!(
        command,
        WRITE_CONFIG | WRITE_OUTPUT_PORT | WRITE_AUX_OUTPUT | WRITE_AUX
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
            [byte] => *byte = lock(&self.0).answers.pop_front().unwrap_or(0),
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
    fn the_self_test_passes_and_no_device_is_found() {
        let (mut data, mut command) = controller();
        for (asked, answer) in [(0xaa, 0x55), (0xab, 4), (0xa9, 4), (0x20, 0x34)] {
            assert_eq!(read(&mut command) & 1, 0);
            assert_eq!(command.write(0, &[asked]), Effect::None);
            assert_eq!(read(&mut command) & 1, 1);
            assert_eq!(read(&mut data), answer, "{asked:#x}");
        }
        // A byte for the mouse, or looped back as if from it, has no answer.
        for asked in [0xd3, 0xd4] {
            assert_eq!(command.write(0, &[asked]), Effect::None);
            assert_eq!(data.write(0, &[0x5a]), Effect::None);
            assert_eq!(read(&mut command) & 1, 0);
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
