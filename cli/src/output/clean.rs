//! Text of a guest made harmless to the terminal that shows it.

use anstream::adapter::StripBytes;

/// Takes control sequences and control characters out of a stream of bytes; tabs and ends of lines stay. A carriage return
/// within a line becomes the end of a line, as it would let a guest overwrite what stands there.
#[derive(Debug, Default)]
pub struct Cleaner {
    strip: StripBytes,
    /// A carriage return has come, and nothing after it.
    returned: bool,
    /// The first byte of U+0080 to U+00BF has come, of which the first half are control characters (C1).
    latin: bool,
}

impl Cleaner {
    /// What of `bytes`, which come after those of earlier calls, may be shown.
    pub fn clean(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut clean = Vec::with_capacity(bytes.len());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match line.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (line, false),
            };
            let parts: Vec<u8> = self.strip.strip_next(text).flatten().copied().collect();
            for byte in parts {
                self.byte(byte, &mut clean);
            }
            if ends {
                clean.push(b'\n');
                // A sequence without an end hides no more than its line.
                *self = Self::default();
            }
        }
        clean
    }

    fn byte(&mut self, byte: u8, clean: &mut Vec<u8>) {
        let latin = std::mem::take(&mut self.latin);
        match byte {
            0x80..=0x9f if latin => {}
            0xa0..=0xbf if latin => self.put(&[0xc2, byte], clean),
            0xc2 => self.latin = true,
            b'\r' => self.returned = true,
            b'\t' | b' '..=b'~' | 0x80.. => self.put(&[byte], clean),
            _ => {}
        }
    }

    fn put(&mut self, bytes: &[u8], clean: &mut Vec<u8>) {
        if std::mem::take(&mut self.returned) {
            clean.push(b'\n');
        }
        clean.extend_from_slice(bytes);
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
    fn sequences_and_control_characters_are_taken_out_and_text_stays() {
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
        fn nothing_that_acts_on_a_terminal_is_left_and_chunks_do_not_matter(
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
