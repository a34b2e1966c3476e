//! Text of a guest made harmless to the terminal that shows it.

use anstyle_parse::{Parser, Perform};

/// Takes control sequences and control characters out of a stream of bytes; tabs and ends of lines stay. A carriage return
/// within a line becomes the end of a line, as it would let a guest overwrite what stands there.
#[derive(Debug, Default)]
pub struct Cleaner {
    parser: Parser,
    text: Text,
}

impl Cleaner {
    /// Returns the printable part of `bytes`, which follow the bytes of earlier calls.
    pub fn clean(&mut self, bytes: &[u8]) -> Vec<u8> {
        for byte in bytes {
            if *byte == b'\n' {
                // A sequence without an end hides no more than its line.
                self.parser = Parser::default();
                self.text.returned = false;
                self.text.shown.push('\n');
            } else {
                self.parser.advance(&mut self.text, *byte);
            }
        }
        std::mem::take(&mut self.text.shown).into_bytes()
    }
}

/// Text without escape sequences.
#[derive(Debug, Default)]
struct Text {
    shown: String,
    /// A carriage return has come, and nothing after it.
    returned: bool,
}

impl Perform for Text {
    fn print(&mut self, letter: char) {
        // Control characters of two bytes (C1) come here.
        if letter.is_control() && letter != '\t' {
            return;
        }
        if std::mem::take(&mut self.returned) {
            self.shown.push('\n');
        }
        self.shown.push(letter);
    }

    fn execute(&mut self, byte: u8) {
        match byte {
            b'\t' => self.print('\t'),
            b'\r' => self.returned = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn clean(bytes: &[u8]) -> String {
        String::from_utf8_lossy(&Cleaner::default().clean(bytes)).into_owned()
    }

    #[test]
    fn control_sequences_are_removed_and_text_stays() {
        for (dirty, text) in [
            ("plain\ttext\r\nmore\n", "plain\ttext\nmore\n"),
            ("\x1b[31mred\x1b[0m\n", "red\n"),
            ("\x1b[2J\x1b[Hcleared", "cleared"),
            ("\x1b]0;title\x07shown", "shown"),
            ("\x1b]52;c;aGk=\x1b\\shown", "shown"),
            ("bell\x07 back\x08space", "bell backspace"),
            ("hidden\roverwritten\n", "hidden\noverwritten\n"),
            ("\u{9b}31mred \u{a9} ä 漢\n", "31mred \u{a9} ä 漢\n"),
            // One without an end hides its line alone.
            ("\x1b]0;never\nshown\n", "\nshown\n"),
        ] {
            assert_eq!(clean(dirty.as_bytes()), text, "{dirty:?}");
        }
    }

    proptest! {
        #[test]
        fn cleaned_text_has_no_controls_for_any_chunks(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            at in 0_usize..300,
        ) {
            let whole = Cleaner::default().clean(&bytes);
            prop_assert!(whole.iter().all(|byte| *byte >= 0x20 && *byte != 0x7f || b"\n\t".contains(byte)));
            let text = String::from_utf8_lossy(&whole);
            let controls = text.chars().filter(|letter| letter.is_control() && !"\n\t".contains(*letter));
            prop_assert_eq!(controls.count(), 0);
            let (a, b) = bytes.split_at(at.min(bytes.len()));
            let mut cleaner = Cleaner::default();
            let mut parts = cleaner.clean(a);
            parts.extend(cleaner.clean(b));
            prop_assert_eq!(parts, whole);
        }
    }
}
