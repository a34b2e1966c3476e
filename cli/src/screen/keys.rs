//! Keys by their names, as X11 keysyms.

use vmmd_spec::keyboard::Layout;

use crate::failure::{Code, Failure, Result};

/// Keys that are pressed one after the other and held until all are.
pub type Chord = Vec<u32>;

/// Names of keys, in lower case.
const NAMES: [(&str, u32); 42] = [
    ("ctrl", 0xffe3),
    ("control", 0xffe3),
    ("shift", 0xffe1),
    ("alt", 0xffe9),
    ("altgr", 0xfe03),
    ("super", 0xffeb),
    ("meta", 0xffeb),
    ("win", 0xffeb),
    ("enter", 0xff0d),
    ("return", 0xff0d),
    ("esc", 0xff1b),
    ("escape", 0xff1b),
    ("tab", 0xff09),
    ("space", 0x20),
    ("plus", 0x2b),
    ("backspace", 0xff08),
    ("delete", 0xffff),
    ("del", 0xffff),
    ("insert", 0xff63),
    ("home", 0xff50),
    ("end", 0xff57),
    ("pageup", 0xff55),
    ("pagedown", 0xff56),
    ("up", 0xff52),
    ("down", 0xff54),
    ("left", 0xff51),
    ("right", 0xff53),
    ("f1", 0xffbe),
    ("f2", 0xffbf),
    ("f3", 0xffc0),
    ("f4", 0xffc1),
    ("f5", 0xffc2),
    ("f6", 0xffc3),
    ("f7", 0xffc4),
    ("f8", 0xffc5),
    ("f9", 0xffc6),
    ("f10", 0xffc7),
    ("f11", 0xffc8),
    ("f12", 0xffc9),
    ("print", 0xff61),
    ("pause", 0xff13),
    ("menu", 0xff67),
];

/// The keys of "ctrl+alt+delete".
pub fn chord(text: &str) -> Result<Chord> {
    text.split('+').map(key).collect()
}

/// Returns the keys to press for a character of a text.
pub fn of_character(character: char) -> Result<Chord> {
    let code = u32::from(character);
    match character {
        '\n' => Ok(vec![0xff0d]),
        '\t' => Ok(vec![0xff09]),
        _ if character.is_control() => {
            let message = format!("the text has a control character (U+{code:04X})");
            Err(Failure::new(Code::Usage, message).hint("`vmmctl send-key` for keys without a character"))
        }
        _ => Ok(vec![keysym(character)]),
    }
}

/// Refuses a text with characters that the layout of the VM's keyboard does not have.
pub fn check(vm: &str, layout: Layout, text: &str) -> Result<()> {
    let mut lacking: Vec<char> = text.chars().filter(|one| !layout.has(*one)).collect();
    lacking.sort_unstable();
    lacking.dedup();
    if lacking.is_empty() {
        return Ok(());
    }
    let lacking: Vec<String> = lacking.iter().map(|one| format!("\"{one}\"")).collect();
    let layout = format!("{layout:?}").to_lowercase();
    let message = format!(
        "nothing was typed into VM \"{vm}\": its keyboard layout {layout} has no key for {}",
        lacking.join(", ")
    );
    let hint = "`spec.display.keyboardLayout` says what the guest's keyboard is set to";
    Err(Failure::new(Code::Usage, message).hint(hint))
}

fn key(name: &str) -> Result<u32> {
    let lower = name.to_lowercase();
    if let Some((_, keysym)) = NAMES.iter().find(|(known, _)| *known == lower) {
        return Ok(*keysym);
    }
    let mut characters = name.chars();
    match (characters.next(), characters.next()) {
        (Some(character), None) if !character.is_control() => Ok(keysym(character)),
        _ => {
            let known: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
            let message = format!(
                "no key is called \"{name}\": a key is a character or one of {}",
                known.join(", ")
            );
            Err(Failure::new(Code::Usage, message))
        }
    }
}

/// X11's keysym of a character: Latin 1 as it is, else its Unicode number with a mark.
fn keysym(character: char) -> u32 {
    match u32::from(character) {
        code @ (0x20..=0x7e | 0xa0..=0xff) => code,
        code => code | 0x0100_0000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chords_are_keys_by_name_or_character() {
        assert_eq!(chord("Ctrl+Alt+Delete").unwrap(), [0xffe3, 0xffe9, 0xffff]);
        assert_eq!(chord("a").unwrap(), [0x61]);
        assert_eq!(chord("ctrl+plus").unwrap(), [0xffe3, 0x2b]);
        assert_eq!(chord("altgr+€").unwrap(), [0xfe03, 0x0100_20ac]);
        for wrong in ["", "ctrl+", "nokey", "ctrl++"] {
            assert!(chord(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_text_is_typed_character_by_character() {
        let typed: Vec<Chord> = "aÄ\n".chars().map(|one| of_character(one).unwrap()).collect();
        assert_eq!(typed, [[0x61], [0xc4], [0xff0d]]);
        assert!(of_character('\u{3}').is_err());
    }
}
