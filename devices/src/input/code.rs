//! Keys by their place on the keyboard.

/// A key, as Linux numbers it (linux/input-event-codes.h, `KEY_*`): 1 to 127.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u8);

#[allow(missing_docs, reason = "the names of linux/input-event-codes.h")]
impl Key {
    pub const ESC: Self = Self(1);
    pub const BACKSPACE: Self = Self(14);
    pub const TAB: Self = Self(15);
    pub const ENTER: Self = Self(28);
    pub const LEFT_SHIFT: Self = Self(42);
    pub const RIGHT_SHIFT: Self = Self(54);
    pub const SPACE: Self = Self(57);
    pub const RIGHT_ALT: Self = Self(100);
}

impl Key {
    /// The largest number.
    pub const MAX: u8 = 127;

    /// The key with that number.
    pub const fn new(code: u8) -> Option<Self> {
        if code == 0 || code > Self::MAX {
            return None;
        }
        Some(Self(code))
    }

    /// Its number.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The key with an XT scancode (set 1), as QEMU's key events have it: the prefix 0xe0 is bit 7.
    pub fn from_xt(scancode: u32) -> Option<Self> {
        let code = u8::try_from(scancode).ok()?;
        // Linux numbers the keys of the XT keyboard by their scancodes.
        let plain = |code: u8| match code {
            0x01..=0x53 | 0x56..=0x58 => Some(code),
            0x54 => Some(99),
            0x59 => Some(117),
            0x70 => Some(93),
            0x73 => Some(89),
            0x79 => Some(92),
            0x7b => Some(94),
            0x7d => Some(124),
            0x7e => Some(121),
            _ => None,
        };
        let found = match code {
            0..=0x7f => plain(code)?,
            _ => EXTENDED.iter().find(|(scancode, _)| *scancode == code)?.1,
        };
        Self::new(found)
    }

    /// Its scancode in set 1, without the prefix 0xe0, and whether it has that prefix. `None` for keys that a PC keyboard
    /// sends otherwise (Pause) or not at all.
    pub fn xt(self) -> Option<(u8, bool)> {
        let plain = (0..=0x7f_u8).find(|code| Self::from_xt((*code).into()) == Some(self));
        if let Some(code) = plain {
            return Some((code, false));
        }
        let (code, _) = EXTENDED.iter().find(|(_, key)| *key == self.0)?;
        (self.0 != PAUSE).then_some((code & 0x7f, true))
    }
}

const PAUSE: u8 = 119;

/// Scancodes with the prefix 0xe0 (as bit 7), and the keys.
const EXTENDED: [(u8, u8); 26] = [
    (0x9c, 96),
    (0x9d, 97),
    (0xa0, 113),
    (0xae, 114),
    (0xb0, 115),
    (0xb5, 98),
    (0xb7, 99),
    (0xb8, 100),
    (0xc6, PAUSE),
    (0xc7, 102),
    (0xc8, 103),
    (0xc9, 104),
    (0xcb, 105),
    (0xcd, 106),
    (0xcf, 107),
    (0xd0, 108),
    (0xd1, 109),
    (0xd2, 110),
    (0xd3, 111),
    (0xdb, 125),
    (0xdc, 126),
    (0xdd, 127),
    (0xde, 116),
    // Left and right shift that keyboards send around others.
    (0xaa, 42),
    (0xb6, 54),
    (0xb9, 57),
];
