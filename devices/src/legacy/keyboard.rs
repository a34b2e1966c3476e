//! The keyboard behind the controller: an AT keyboard with scan code set 2 (IBM PS/2 Hardware
//! Interface Technical Reference, "Keyboards (101- and 102-Key)"), for guests without a driver for
//! a better one.
//!
//! A pressed key repeats only when the client repeats it, not on its own.

use std::collections::{BTreeSet, VecDeque};

use crate::{
    input::Key,
    state::{StateError, check, message, narrow},
};

/// Bytes that wait at most. Only what leaves room for the releases of all keys that are down is added.
const CAPACITY: usize = 128;
/// Longest sequence of a release: 0xe0 0xf0 code.
const LONGEST: usize = 3;

const ACK: u8 = 0xfa;
const RESEND: u8 = 0xfe;
const PASSED: u8 = 0xaa;
const EXTENDED: u8 = 0xe0;
const BREAK: u8 = 0xf0;

const SET_LEDS: u8 = 0xed;
const ECHO: u8 = 0xee;
const SCAN_CODE_SET: u8 = 0xf0;
const IDENTIFY: u8 = 0xf2;
const SET_RATE: u8 = 0xf3;
const ENABLE: u8 = 0xf4;
const DISABLE: u8 = 0xf5;
const SET_DEFAULTS: u8 = 0xf6;
const RESET: u8 = 0xff;
/// The only scan code set that it has.
const SET: u8 = 2;

/// The controller's translation of each byte of set 2 to set 1 (the 8042's own table).
const TRANSLATED: [u8; 0x85] = [
    0xff, 0x43, 0x41, 0x3f, 0x3d, 0x3b, 0x3c, 0x58, 0x64, 0x44, 0x42, 0x40, 0x3e, 0x0f, 0x29, 0x59, //
    0x65, 0x38, 0x2a, 0x70, 0x1d, 0x10, 0x02, 0x5a, 0x66, 0x71, 0x2c, 0x1f, 0x1e, 0x11, 0x03, 0x5b, //
    0x67, 0x2e, 0x2d, 0x20, 0x12, 0x05, 0x04, 0x5c, 0x68, 0x39, 0x2f, 0x21, 0x14, 0x13, 0x06, 0x5d, //
    0x69, 0x31, 0x30, 0x23, 0x22, 0x15, 0x07, 0x5e, 0x6a, 0x72, 0x32, 0x24, 0x16, 0x08, 0x09, 0x5f, //
    0x6b, 0x33, 0x25, 0x17, 0x18, 0x0b, 0x0a, 0x60, 0x6c, 0x34, 0x35, 0x26, 0x27, 0x19, 0x0c, 0x61, //
    0x6d, 0x73, 0x28, 0x74, 0x1a, 0x0d, 0x62, 0x6e, 0x3a, 0x36, 0x1c, 0x1b, 0x75, 0x2b, 0x63, 0x76, //
    0x55, 0x56, 0x77, 0x78, 0x79, 0x7a, 0x0e, 0x7b, 0x7c, 0x4f, 0x7d, 0x4b, 0x47, 0x7e, 0x7f, 0x6f, //
    0x52, 0x53, 0x50, 0x4c, 0x4d, 0x48, 0x01, 0x45, 0x57, 0x4e, 0x51, 0x4a, 0x37, 0x49, 0x46, 0x54, //
    0x80, 0x81, 0x82, 0x41, 0x54,
];

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct AtKeyboard {
    /// It sends keys.
    scanning: bool,
    /// Bit 0 scroll lock, bit 1 num lock, bit 2 caps lock.
    leds: u8,
    /// The command that the next byte belongs to.
    pending: Option<u8>,
    queue: VecDeque<u8>,
    down: BTreeSet<Key>,
}

impl AtKeyboard {
    pub fn is_scanning(&self) -> bool {
        self.scanning
    }

    pub fn leds(&self) -> u8 {
        self.leds
    }

    /// Whether a byte waits.
    pub fn has_byte(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next byte, as it is or translated to set 1; `None` when there is none.
    pub fn take(&mut self, translate: bool) -> Option<u8> {
        let byte = self.queue.pop_front()?;
        if !translate {
            return Some(byte);
        }
        let translated = |byte: u8| TRANSLATED.get(usize::from(byte)).copied().unwrap_or(byte);
        if byte == BREAK {
            return self.queue.pop_front().map(|code| translated(code) | 0x80);
        }
        Some(translated(byte))
    }

    /// A key went down, or up.
    pub fn key(&mut self, key: Key, down: bool) {
        let Some((code, extended)) = code(key) else { return };
        if !down {
            if self.down.remove(&key) && self.scanning {
                self.queue.extend(extended.then_some(EXTENDED));
                self.queue.extend([BREAK, code]);
            }
            return;
        }
        let releases = self.down.len().saturating_add(2).saturating_mul(LONGEST);
        let room = self.queue.len().saturating_add(releases) <= CAPACITY;
        if self.scanning && room && self.down.insert(key) {
            self.queue.extend(extended.then_some(EXTENDED));
            self.queue.push_back(code);
        }
    }

    /// Releases all pressed keys, because their holder is gone.
    pub fn release_all(&mut self) {
        for key in self.down.clone() {
            self.key(key, false);
        }
    }

    /// A key that is down is repeated: its code is sent once more, as a real keyboard does while a key is held.
    pub fn repeat(&mut self, key: Key) {
        let Some((code, extended)) = code(key) else { return };
        let releases = self.down.len().saturating_add(1).saturating_mul(LONGEST);
        let room = self.queue.len().saturating_add(releases) <= CAPACITY;
        if self.scanning && room && self.down.contains(&key) {
            self.queue.extend(extended.then_some(EXTENDED));
            self.queue.push_back(code);
        }
    }

    /// A byte of the driver.
    pub fn command(&mut self, byte: u8) {
        let pending = self.pending.take();
        if let Some(command) = pending.filter(|_| byte < SET_LEDS) {
            self.argument(command, byte);
            return;
        }
        match byte {
            SET_LEDS | SCAN_CODE_SET | SET_RATE => {
                self.pending = Some(byte);
                self.answer(&[ACK]);
            }
            ECHO => self.answer(&[ECHO]),
            IDENTIFY => self.answer(&[ACK, 0xab, 0x83]),
            ENABLE => {
                self.forget();
                self.scanning = true;
                self.answer(&[ACK]);
            }
            DISABLE => {
                self.forget();
                self.scanning = false;
                self.answer(&[ACK]);
            }
            SET_DEFAULTS => {
                self.forget();
                self.answer(&[ACK]);
            }
            RESET => {
                *self = Self {
                    scanning: true,
                    ..Self::default()
                };
                self.answer(&[ACK, PASSED]);
            }
            _ => self.answer(&[RESEND]),
        }
    }

    fn argument(&mut self, command: u8, byte: u8) {
        match (command, byte) {
            (SET_LEDS, leds) => self.leds = leds & 0b111,
            (SCAN_CODE_SET, 0) => {
                self.answer(&[ACK, SET]);
                return;
            }
            (SCAN_CODE_SET, SET) | (SET_RATE, _) => {}
            _ => {
                self.answer(&[RESEND]);
                return;
            }
        }
        self.answer(&[ACK]);
    }

    /// Drops waiting keys, as documented for the commands that change the keyboard's state; pressed
    /// keys are not released.
    fn forget(&mut self) {
        self.queue.clear();
        self.down.clear();
    }

    fn answer(&mut self, bytes: &[u8]) {
        let releases = self.down.len().saturating_mul(LONGEST);
        let room = CAPACITY.saturating_sub(releases);
        // A driver that reads no answer gets no further one.
        if self.queue.len().saturating_add(bytes.len()) <= room {
            self.queue.extend(bytes);
        }
    }

    pub fn save(&self) -> message::AtKeyboard {
        message::AtKeyboard {
            scanning: self.scanning,
            leds: self.leds.into(),
            pending: self.pending.map(u32::from),
            queue: self.queue.iter().copied().collect(),
            down: self.down.iter().map(|key| key.code()).collect(),
        }
    }

    pub fn restored(saved: &message::AtKeyboard) -> Result<Self, StateError> {
        check(saved.queue.len() <= CAPACITY, "keyboard.queue", "too long")?;
        let down: Option<BTreeSet<Key>> = saved.down.iter().map(|code| Key::new(*code)).collect();
        let down = down.ok_or_else(|| StateError::invalid("keyboard.down", "no key has that number"))?;
        let room = CAPACITY.checked_sub(down.len().saturating_mul(LONGEST));
        let room = room.ok_or_else(|| StateError::invalid("keyboard.down", "too many keys"))?;
        let pending = saved.pending.map(|command| narrow("keyboard.pending", command));
        let pending = pending.transpose()?;
        let takes_byte = |command: u8| matches!(command, SET_LEDS | SCAN_CODE_SET | SET_RATE);
        check(
            pending.is_none_or(takes_byte),
            "keyboard.pending",
            "no command that takes a byte",
        )?;
        let leds: u8 = narrow("keyboard.leds", saved.leds)?;
        check(leds <= 0b111, "keyboard.leds", "there are three")?;
        Ok(Self {
            scanning: saved.scanning,
            leds,
            pending,
            // Earlier programs left no room for releases beside a full queue.
            queue: saved.queue.iter().copied().take(room).collect(),
            down,
        })
    }
}

/// A key's code in set 2, and whether 0xe0 comes before it. `None` for keys that send more than that (Pause), or nothing.
fn code(key: Key) -> Option<(u8, bool)> {
    let (translated, extended) = key.xt()?;
    let code = match translated {
        // Two codes become the same.
        0x41 => 0x83,
        0x54 => 0x84,
        _ => TRANSLATED.iter().position(|code| *code == translated)?,
    };
    Some((u8::try_from(code).ok()?, extended))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]
mod tests {
    use super::*;
    use crate::state::{Change, refuses};

    fn all(keyboard: &mut AtKeyboard, translate: bool) -> Vec<u8> {
        std::iter::from_fn(|| keyboard.take(translate)).collect()
    }

    fn enabled() -> AtKeyboard {
        let mut keyboard = AtKeyboard::default();
        keyboard.command(ENABLE);
        assert_eq!(all(&mut keyboard, false), [ACK]);
        keyboard
    }

    #[test]
    fn keys_are_sent_in_set_2_and_in_set_1_when_the_controller_translates() {
        let (enter, right_alt) = (Key::ENTER, Key::RIGHT_ALT);
        let mut keyboard = enabled();
        for translate in [false, true] {
            for key in [enter, right_alt] {
                keyboard.key(key, true);
                keyboard.key(key, false);
            }
            let wanted: &[u8] = if translate {
                &[0x1c, 0x9c, 0xe0, 0x38, 0xe0, 0xb8]
            } else {
                &[0x5a, 0xf0, 0x5a, 0xe0, 0x11, 0xe0, 0xf0, 0x11]
            };
            assert_eq!(all(&mut keyboard, translate), wanted);
        }
    }

    #[test]
    fn a_key_that_is_held_is_repeated_and_never_so_often_that_its_release_is_lost() {
        let mut keyboard = enabled();
        keyboard.repeat(Key::ENTER);
        keyboard.key(Key::ENTER, true);
        keyboard.repeat(Key::ENTER);
        keyboard.repeat(Key::RIGHT_ALT);
        assert_eq!(all(&mut keyboard, false), [0x5a, 0x5a]);
        for _ in 0..CAPACITY * 2 {
            keyboard.repeat(Key::ENTER);
        }
        keyboard.key(Key::ENTER, false);
        let sent = all(&mut keyboard, false);
        assert!(
            sent.len() <= CAPACITY && sent.ends_with(&[0x5a, 0xf0, 0x5a]),
            "{}",
            sent.len()
        );
    }

    #[test]
    fn every_key_that_has_a_code_comes_back_as_it_was_by_translation() {
        let mut count = 0;
        for key in (1..=Key::MAX).filter_map(Key::new) {
            let Some((code, extended)) = key.xt() else {
                continue;
            };
            let mut keyboard = enabled();
            keyboard.key(key, true);
            let sent = all(&mut keyboard, true);
            let prefix = extended.then_some(EXTENDED);
            assert_eq!(
                sent,
                prefix.into_iter().chain([code]).collect::<Vec<_>>(),
                "{key:?}"
            );
            count += 1;
        }
        assert!(count > 100, "{count}");
    }

    #[test]
    fn it_answers_as_a_driver_that_probes_it_expects() {
        let mut keyboard = AtKeyboard::default();
        let mut ask = |bytes: &[u8]| {
            for byte in bytes {
                keyboard.command(*byte);
            }
            all(&mut keyboard, true)
        };
        assert_eq!(ask(&[RESET]), [ACK, PASSED]);
        assert_eq!(ask(&[IDENTIFY]), [ACK, 0xab, 0x41]);
        assert_eq!(ask(&[SET_LEDS, 0b100]), [ACK, ACK]);
        assert_eq!(ask(&[SET_RATE, 0]), [ACK, ACK]);
        assert_eq!(ask(&[SCAN_CODE_SET, 0]), [ACK, ACK, 0x41]);
        assert_eq!(ask(&[SCAN_CODE_SET, 3]), [ACK, RESEND]);
        assert_eq!(ask(&[ECHO]), [ECHO]);
        assert_eq!(ask(&[0x77]), [RESEND]);
        // A command instead of an argument is handled as a command; this one drops waiting keys.
        assert_eq!(ask(&[SET_LEDS, ENABLE]), [ACK]);
        assert_eq!((keyboard.leds(), keyboard.is_scanning()), (0b100, true));
    }

    #[test]
    fn a_flood_is_cut_and_every_key_that_went_down_comes_up() {
        let mut keyboard = enabled();
        let keys: Vec<Key> = (1..=80).filter_map(Key::new).collect();
        for _ in 0..10 {
            for key in &keys {
                keyboard.key(*key, true);
            }
        }
        for key in &keys {
            keyboard.key(*key, false);
        }
        let sent = all(&mut keyboard, true);
        assert!(sent.len() <= CAPACITY && sent.len() > 20, "{}", sent.len());
        let (down, up): (Vec<u8>, Vec<u8>) = sent
            .into_iter()
            .filter(|byte| *byte != EXTENDED)
            .partition(|byte| byte & 0x80 == 0);
        assert_eq!(down, up.iter().map(|byte| byte & 0x7f).collect::<Vec<_>>());
        for _ in 0..1000 {
            keyboard.command(ECHO);
        }
        assert_eq!(keyboard.queue.len(), CAPACITY);
    }

    #[test]
    fn answers_that_nobody_reads_leave_room_for_releases() {
        let mut keyboard = enabled();
        let keys: Vec<Key> = (1..=80).filter_map(Key::new).collect();
        for key in &keys {
            keyboard.key(*key, true);
        }
        assert!(keyboard.down.len() > 20);
        for _ in 0..1000 {
            keyboard.command(ECHO);
        }
        for key in &keys {
            keyboard.key(*key, false);
        }
        let saved = keyboard.save();
        assert_eq!(AtKeyboard::restored(&saved).unwrap().save(), saved);
        // As an earlier program has saved it.
        let full = message::AtKeyboard {
            queue: vec![ECHO; CAPACITY],
            down: vec![30, 48],
            ..saved
        };
        let mut restored = AtKeyboard::restored(&full).unwrap();
        restored.release_all();
        AtKeyboard::restored(&restored.save()).unwrap();
    }

    #[test]
    fn a_keyboard_that_is_not_scanning_sends_no_key() {
        let mut keyboard = AtKeyboard::default();
        keyboard.key(Key::ENTER, true);
        assert!(!keyboard.has_byte());
        let mut keyboard = enabled();
        keyboard.key(Key::ENTER, true);
        keyboard.command(DISABLE);
        keyboard.key(Key::ENTER, false);
        assert_eq!(all(&mut keyboard, false), [ACK]);
    }

    #[test]
    fn a_restored_keyboard_goes_on_and_a_state_that_none_has_is_refused() {
        let mut keyboard = enabled();
        keyboard.key(Key::LEFT_SHIFT, true);
        keyboard.command(SET_LEDS);
        let saved = keyboard.save();
        let mut restored = AtKeyboard::restored(&saved).unwrap();
        assert_eq!(restored.save(), saved);
        restored.command(1);
        restored.key(Key::LEFT_SHIFT, false);
        assert_eq!(all(&mut restored, true), [0x2a, ACK, ACK, 0xaa]);
        assert_eq!(restored.leds(), 1);
        let changes: [Change<message::AtKeyboard>; 5] = [
            ("keyboard.queue", |saved| saved.queue = vec![0; CAPACITY + 1]),
            ("keyboard.down", |saved| saved.down = vec![0]),
            ("keyboard.down", |saved| saved.down = (1..100).collect()),
            ("keyboard.pending", |saved| saved.pending = Some(0xf4)),
            ("keyboard.leds", |saved| saved.leds = 8),
        ];
        refuses(&keyboard.save(), &changes, |saved| {
            AtKeyboard::restored(saved).map(|_| ())
        });
    }
}
