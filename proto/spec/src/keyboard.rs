//! Keyboard layouts: the key of each character. The `vmm` turns keysyms of viewers into keys by these tables, and `vmmctl type` refuses
//! characters without a key.

use vmmd_api::v1;

/// A keyboard layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// United States.
    #[default]
    Us,
    /// Germany.
    De,
    /// Denmark.
    Dk,
    /// France.
    Fr,
    /// United Kingdom.
    Gb,
    /// Spain.
    Es,
    /// Japan.
    Jp,
}

/// Each with its name in the API.
const WIRE: [(Layout, v1::KeyboardLayout); 7] = [
    (Layout::Us, v1::KeyboardLayout::Us),
    (Layout::De, v1::KeyboardLayout::De),
    (Layout::Dk, v1::KeyboardLayout::Dk),
    (Layout::Fr, v1::KeyboardLayout::Fr),
    (Layout::Gb, v1::KeyboardLayout::Gb),
    (Layout::Es, v1::KeyboardLayout::Es),
    (Layout::Jp, v1::KeyboardLayout::Jp),
];

/// The modifier that a character needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Nothing.
    Alone,
    /// Shift.
    Shift,
    /// AltGr.
    AltGr,
}

/// Where a character is on the keyboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The key, as Linux numbers it (linux/input-event-codes.h, `KEY_*`).
    pub key: u8,
    /// The modifier.
    pub level: Level,
    /// The key alone gives nothing: a space must follow.
    pub dead: bool,
    /// Caps lock exchanges the meaning of Shift.
    pub letter: bool,
}

/// Adjacent keys from `first` on, with their characters alone, with Shift and with AltGr; a space
/// stands for no character.
struct Row {
    first: u8,
    levels: [&'static str; 3],
}

impl Row {
    /// Whether Shift makes the key's character a capital: caps lock does so too.
    fn is_letter(&self, at: usize) -> bool {
        let [alone, shift, _] = self.levels.map(|level| level.chars().nth(at));
        alone.zip(shift).is_some_and(|(alone, shift)| {
            alone != shift && alone.is_alphabetic() && alone.to_uppercase().eq([shift])
        })
    }
}

const fn row(first: u8, alone: &'static str, shift: &'static str, alt_gr: &'static str) -> Row {
    Row {
        first,
        levels: [alone, shift, alt_gr],
    }
}

static US: [Row; 6] = [
    row(2, "1234567890-=", "!@#$%^&*()_+", ""),
    row(16, "qwertyuiop[]", "QWERTYUIOP{}", ""),
    row(30, "asdfghjkl;'`", "ASDFGHJKL:\"~", ""),
    row(43, "\\zxcvbnm,./", "|ZXCVBNM<>?", ""),
    row(86, "<", ">", ""),
    row(55, "*", "", ""),
];

static DE: [Row; 5] = [
    row(2, "1234567890ß´", "!\"§$%&/()=?`", " ²³   {[]}\\"),
    row(16, "qwertzuiopü+", "QWERTZUIOPÜ*", "@ €        ~"),
    row(30, "asdfghjklöä^", "ASDFGHJKLÖÄ°", ""),
    row(43, "#yxcvbnm,.-", "'YXCVBNM;:_", "       µ"),
    row(86, "<", ">", "|"),
];

static DK: [Row; 5] = [
    row(2, "1234567890+´", "!\"#¤%&/()=?`", " @£$€ {[]} |"),
    row(16, "qwertyuiopå¨", "QWERTYUIOPÅ^", "  €        ~"),
    row(30, "asdfghjklæø½", "ASDFGHJKLÆØ§", ""),
    row(43, "'zxcvbnm,.-", "*ZXCVBNM;:_", "       µ"),
    row(86, "<", ">", "\\"),
];

static FR: [Row; 5] = [
    row(2, "&é\"'(-è_çà)=", "1234567890°+", " ~#{[|`\\^@]}"),
    row(16, "azertyuiop^$", "AZERTYUIOP¨£", "  €        ¤"),
    row(30, "qsdfghjklmù²", "QSDFGHJKLM%", ""),
    row(43, "*wxcvbn,;:!", "µWXCVBN?./§", ""),
    row(86, "<", ">", ""),
];

static GB: [Row; 5] = [
    row(2, "1234567890-=", "!\"£$%^&*()_+", "   €"),
    row(16, "qwertyuiop[]", "QWERTYUIOP{}", ""),
    row(30, "asdfghjkl;'`", "ASDFGHJKL:@¬", ""),
    row(43, "#zxcvbnm,./", "~ZXCVBNM<>?", ""),
    row(86, "\\", "|", ""),
];

static ES: [Row; 5] = [
    row(2, "1234567890'¡", "!\"·$%&/()=?¿", "|@#~ ¬"),
    row(16, "qwertyuiop`+", "QWERTYUIOP^*", "  €       []"),
    row(30, "asdfghjklñ´º", "ASDFGHJKLÑ¨ª", "          {\\"),
    row(43, "çzxcvbnm,.-", "ÇZXCVBNM;:_", "}"),
    row(86, "<", ">", ""),
];

/// With the keys left of the right Shift and of Backspace that only this one has.
static JP: [Row; 6] = [
    row(2, "1234567890-^", "!\"#$%&'() =~", ""),
    row(16, "qwertyuiop@[", "QWERTYUIOP`{", ""),
    row(30, "asdfghjkl;:", "ASDFGHJKL+*", ""),
    row(43, "]zxcvbnm,./", "}ZXCVBNM<>?", ""),
    row(89, "\\", "_", ""),
    row(124, "¥", "|", ""),
];

impl Layout {
    /// Of the API; `None` when it is not known.
    pub fn of_spec(wire: i32) -> Option<Self> {
        let wire = v1::KeyboardLayout::try_from(wire).ok()?;
        if wire == v1::KeyboardLayout::Unspecified {
            return Some(Self::default());
        }
        let found = WIRE.iter().find(|(_, of_spec)| *of_spec == wire)?;
        Some(found.0)
    }

    fn rows(self) -> &'static [Row] {
        match self {
            Self::Us => &US,
            Self::De => &DE,
            Self::Dk => &DK,
            Self::Fr => &FR,
            Self::Gb => &GB,
            Self::Es => &ES,
            Self::Jp => &JP,
        }
    }

    /// Whether keys that give that character wait for another one.
    fn is_dead(self, character: char) -> bool {
        match self {
            Self::Us | Self::Gb | Self::Jp => false,
            Self::De => matches!(character, '^' | '´' | '`'),
            Self::Dk => matches!(character, '^' | '´' | '`' | '¨' | '~'),
            Self::Fr => matches!(character, '^' | '¨'),
            Self::Es => matches!(character, '^' | '´' | '`' | '¨'),
        }
    }

    /// Where a character is; `None` when the layout does not have it. Characters of keys that are the same in every layout (space,
    /// Enter) are not looked for.
    pub fn place(self, character: char) -> Option<Place> {
        // Characters with the fewest keys come first.
        (0..)
            .zip([Level::Alone, Level::Shift, Level::AltGr])
            .find_map(|(index, level)| {
                self.rows().iter().find_map(|row| {
                    let characters: &str = row.levels.get::<usize>(index)?;
                    let at = characters.chars().position(|found| found == character)?;
                    Some(Place {
                        key: u8::try_from(at).ok()?.checked_add(row.first)?,
                        level,
                        dead: self.is_dead(character),
                        letter: level != Level::AltGr && row.is_letter(at),
                    })
                })
            })
    }

    /// Whether a text can have that character.
    pub fn has(self, character: char) -> bool {
        matches!(character, ' ' | '\n' | '\t') || self.place(character).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_ascii_and_their_own_letters_alone() {
        for (layout, of_spec) in WIRE {
            assert_eq!(Layout::of_spec(of_spec.into()), Some(layout));
            let lacking: String = (' '..='~').filter(|one| !layout.has(*one)).collect();
            assert_eq!(lacking, "", "{layout:?}");
        }
        assert_eq!(
            (Layout::of_spec(0), Layout::of_spec(99)),
            (Some(Layout::Us), None)
        );
        let own = [
            (Layout::De, 'ß'),
            (Layout::Fr, 'é'),
            (Layout::Gb, '£'),
            (Layout::Es, 'ñ'),
            (Layout::Jp, '¥'),
        ];
        for (layout, character) in own {
            assert!(layout.has(character) && !Layout::Us.has(character), "{character}");
        }
    }
}
