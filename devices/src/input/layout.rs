//! What keys mean: X11 keysyms and characters by the layout that the guest is set to.

pub use vmmd_spec::keyboard::Layout;
use vmmd_spec::keyboard::Level;

use super::code::Key;

/// Key and modifiers that produce a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stroke {
    /// The key.
    pub key: Key,
    /// With Shift, without, or either.
    pub shift: Option<bool>,
    /// With AltGr, without, or either.
    pub alt_gr: Option<bool>,
    /// The key alone gives nothing: a space must follow.
    pub dead: bool,
    /// Caps lock exchanges the meaning of Shift.
    pub letter: bool,
}

impl Stroke {
    const fn plain(key: Key) -> Self {
        Self {
            key,
            shift: None,
            alt_gr: None,
            dead: false,
            letter: false,
        }
    }

    /// How that character is typed; `None` when the layout does not have it.
    pub fn of_character(layout: Layout, character: char) -> Option<Self> {
        match character {
            '\n' | '\r' => return Some(Self::plain(Key::ENTER)),
            '\t' => return Some(Self::plain(Key::TAB)),
            '\u{8}' => return Some(Self::plain(Key::BACKSPACE)),
            '\u{1b}' => return Some(Self::plain(Key::ESC)),
            ' ' => {
                return Some(Self {
                    shift: Some(false),
                    alt_gr: Some(false),
                    ..Self::plain(Key::SPACE)
                });
            }
            _ => {}
        }
        let place = layout.place(character)?;
        Some(Self {
            key: Key::new(place.key)?,
            shift: Some(place.level == Level::Shift),
            alt_gr: Some(place.level == Level::AltGr),
            dead: place.dead,
            letter: place.letter,
        })
    }

    /// Returns the key of an X11 keysym (keysymdef.h) and its modifiers; `None` if the layout lacks
    /// the keysym.
    pub fn of_keysym(layout: Layout, keysym: u32) -> Option<Self> {
        if let Some((_, code)) = FUNCTIONS.iter().find(|(found, _)| *found == keysym) {
            return Key::new(*code).map(Self::plain);
        }
        let code = |first: u32, key: u32| {
            let code = keysym.checked_sub(first)?.checked_add(key)?;
            Key::new(u8::try_from(code).ok()?).map(Self::plain)
        };
        match keysym {
            // F1 to F10, F11 and F12.
            0xffbe..=0xffc7 => return code(0xffbe, 59),
            0xffc8 | 0xffc9 => return code(0xffc8, 87),
            _ => {}
        }
        if let Some((_, character)) = DEAD.iter().find(|(found, _)| *found == keysym) {
            // The character that follows arrives as an event of its own.
            return Self::of_character(layout, *character).map(|stroke| Self {
                dead: false,
                ..stroke
            });
        }
        let character = match keysym {
            0x20..=0x7e | 0xa0..=0xff => keysym,
            0x20ac => 0x20ac,
            0x0100_0100..=0x0110_ffff => keysym & 0x00ff_ffff,
            _ => return None,
        };
        Self::of_character(layout, char::from_u32(character)?)
    }
}

/// Keysyms of keys that wait for another one.
const DEAD: [(u32, char); 5] = [
    (0xfe50, '`'),
    (0xfe51, '´'),
    (0xfe52, '^'),
    (0xfe53, '~'),
    (0xfe57, '¨'),
];

/// Keysyms that are keys in every layout.
const FUNCTIONS: [(u32, u8); 67] = [
    (0xff08, 14),
    (0xff09, 15),
    (0xfe20, 15),
    (0xff0a, 28),
    (0xff0d, 28),
    (0xff13, 119),
    (0xff14, 70),
    (0xff15, 99),
    (0xff1b, 1),
    (0xff50, 102),
    (0xff51, 105),
    (0xff52, 103),
    (0xff53, 106),
    (0xff54, 108),
    (0xff55, 104),
    (0xff56, 109),
    (0xff57, 107),
    (0xff61, 99),
    (0xff63, 110),
    (0xff67, 127),
    (0xff6b, 119),
    (0xff7e, 100),
    (0xff7f, 69),
    (0xff8d, 96),
    (0xff95, 71),
    (0xff96, 75),
    (0xff97, 72),
    (0xff98, 77),
    (0xff99, 80),
    (0xff9a, 73),
    (0xff9b, 81),
    (0xff9c, 79),
    (0xff9d, 76),
    (0xff9e, 82),
    (0xff9f, 83),
    (0xffaa, 55),
    (0xffab, 78),
    (0xffad, 74),
    (0xffae, 83),
    (0xffac, 83),
    (0xffaf, 98),
    (0xffb0, 82),
    (0xffb1, 79),
    (0xffb2, 80),
    (0xffb3, 81),
    (0xffb4, 75),
    (0xffb5, 76),
    (0xffb6, 77),
    (0xffb7, 71),
    (0xffb8, 72),
    (0xffb9, 73),
    (0xffe1, 42),
    (0xffe2, 54),
    (0xffe3, 29),
    (0xffe4, 97),
    (0xffe5, 58),
    (0xffe6, 58),
    (0xffe7, 125),
    (0xffe8, 126),
    (0xffe9, 56),
    (0xffea, 100),
    (0xffeb, 125),
    (0xffec, 126),
    (0xfe03, 100),
    (0xffff, 111),
    (0x1008_ff11, 114),
    (0x1008_ff13, 115),
];
