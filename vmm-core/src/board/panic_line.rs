//! Recognizes on the serial port that the guest's kernel has panicked and does not reset the machine.
//!
//! Linux prints the line `---[ end Kernel panic - not syncing: …` at the end of such a panic, and then loops without printing anything.
//! So the panic is seen also before the guest has loaded its driver for pvpanic. A guest can print that line for another
//! reason: the receiver of the notice has to check more before acting.

/// The beginning of the line, behind the prefixes of the kernel's log.
const MARK: &[u8] = b"---[ end Kernel panic - not syncing";
/// Length of the kept beginning of a line, in bytes: the mark and two prefixes.
const MAX_LINE: usize = 128;

/// Output, line by line. Holds the beginning of one line.
#[derive(Debug, Default)]
pub(super) struct PanicLine {
    line: Vec<u8>,
}

impl PanicLine {
    /// Takes more output; says whether the line ended in it, and nothing but the end of the line came after.
    pub fn feed(&mut self, bytes: &[u8]) -> bool {
        let mut found = false;
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => {
                    found |= is_end_of_panic(&self.line);
                    self.line.clear();
                }
                _ => {
                    found = false;
                    if self.line.len() < MAX_LINE {
                        self.line.push(*byte);
                    }
                }
            }
        }
        found
    }
}

/// Whether a line is the mark, behind any number of `[   12.345678]` (a time) or `[    T1]` (a thread).
fn is_end_of_panic(line: &[u8]) -> bool {
    let mut rest = line.trim_ascii_start();
    while let Some(inside) = rest.strip_prefix(b"[") {
        let Some(end) = inside.iter().position(|byte| *byte == b']') else {
            return false;
        };
        let (prefix, behind) = inside.split_at(end);
        if !prefix
            .iter()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b' ' | b'T' | b'C'))
        {
            return false;
        }
        rest = behind.get(1..).unwrap_or_default().trim_ascii_start();
    }
    rest.starts_with(MARK)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn found(text: &str) -> bool {
        PanicLine::default().feed(text.as_bytes())
    }

    #[rstest]
    #[case(
        "---[ end Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0) ]---\r\n"
    )]
    #[case("[    1.204816] ---[ end Kernel panic - not syncing: sysrq triggered crash ]---\r\n")]
    #[case("[    1.204816][    T1] ---[ end Kernel panic - not syncing: x ]---\n")]
    #[case("[   12.5] last\r\n[   12.6] ---[ end Kernel panic - not syncing: x ]---\r\n")]
    fn end_of_a_panic_is_found(#[case] text: &str) {
        assert!(found(text));
        let mut line = PanicLine::default();
        let found: Vec<bool> = text.bytes().map(|byte| line.feed(&[byte])).collect();
        assert!(found.contains(&true), "byte by byte");
    }

    #[rstest]
    #[case::begun("[    1.2] Kernel panic - not syncing: sysrq triggered crash\r\n")]
    #[case::not_ended("[    1.2] ---[ end Kernel panic - not syncing: x")]
    #[case::followed("---[ end Kernel panic - not syncing: x ]---\r\nroot@web:~# ")]
    #[case::trace("[    1.2] ---[ end trace 0000000000000000 ]---\r\n")]
    #[case::journal("Nov 28 12:00:00 web kernel: ---[ end Kernel panic - not syncing: x ]---\r\n")]
    #[case::grep("log:12:---[ end Kernel panic - not syncing: x ]---\r\n")]
    #[case::other_prefix("[web] ---[ end Kernel panic - not syncing: x ]---\r\n")]
    #[case::open_prefix("[   1.2 ---[ end Kernel panic - not syncing: x\r\n")]
    #[case::empty("\r\n\r\n")]
    fn other_output_is_not_taken_for_a_panic(#[case] text: &str) {
        assert!(!found(text));
    }

    proptest! {
        #[test]
        fn any_output_takes_bounded_memory(pieces in proptest::collection::vec(any::<Vec<u8>>(), 0..50)) {
            let mut line = PanicLine::default();
            for piece in pieces {
                line.feed(&piece);
                prop_assert!(line.line.len() <= MAX_LINE);
            }
        }
    }
}
