//! Recognizes two events on the serial port: the guest's kernel has panicked and does not reset the machine, and the firmware has
//! found nothing to boot.
//!
//! Linux prints the line `---[ end Kernel panic - not syncing: …` at the end of such a panic, and then loops without printing anything.
//! So the panic is seen also before the guest has loaded its driver for pvpanic. A guest can print that line for another
//! reason: the receiver of the notice has to check more before acting.
//!
//! SeaBIOS prints `No bootable device.` and tries again after a minute. OVMF prints `BdsDxe: No bootable option or device was found.`,
//! or starts its shell, which is the last of its boot options in builds that have one. Each of these lines is a message to the user
//! alone: no action follows, since a guest can print it for another reason.

/// The beginning of the line, behind the prefixes of the kernel's log.
const MARK: &[u8] = b"---[ end Kernel panic - not syncing";
/// Parts of lines of a firmware that has found nothing to boot. Control sequences of the terminal precede them.
const NOTHING_TO_BOOT: [&[u8]; 3] = [
    b"No bootable device.",
    b"BdsDxe: No bootable option or device was found.",
    b"UEFI Interactive Shell v2",
];
/// Length of the kept beginning of a line, in bytes: the mark and two prefixes.
const MAX_LINE: usize = 128;

/// Events in some output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The line of a panic has ended, and nothing but the end of the line came after.
    pub panic: bool,
    /// A line of firmware that has found nothing to boot has ended.
    pub nothing_to_boot: bool,
}

/// Output, line by line. Holds the beginning of one line.
#[derive(Debug, Default)]
pub(super) struct OutputLines {
    line: Vec<u8>,
}

impl OutputLines {
    /// Takes more output.
    pub fn feed(&mut self, bytes: &[u8]) -> Seen {
        let mut seen = Seen::default();
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => {
                    seen.panic |= is_end_of_panic(&self.line);
                    seen.nothing_to_boot |= has_nothing_to_boot(&self.line);
                    self.line.clear();
                }
                _ => {
                    seen.panic = false;
                    if self.line.len() < MAX_LINE {
                        self.line.push(*byte);
                    }
                }
            }
        }
        seen
    }
}

fn has_nothing_to_boot(line: &[u8]) -> bool {
    let has = |part: &&[u8]| line.windows(part.len()).any(|window| window == *part);
    NOTHING_TO_BOOT.iter().any(has)
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
        OutputLines::default().feed(text.as_bytes()).panic
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
        let mut line = OutputLines::default();
        let found: Vec<bool> = text.bytes().map(|byte| line.feed(&[byte]).panic).collect();
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

    #[rstest]
    #[case::bios("\r\nNo bootable device.  Retrying in 60 seconds.\r\n", true)]
    #[case::uefi("\x1b[2J\x1b[01;01HBdsDxe: No bootable option or device was found.\r\n", true)]
    #[case::shell("\x1b[40mUEFI Interactive Shell v2.2\r\nEDK II\r\n", true)]
    #[case::next("BdsDxe: failed to load Boot0001 \"UEFI Misc Device\": Not Found\r\n", false)]
    #[case::not_ended("No bootable device.", false)]
    fn firmware_without_a_boot_device_is_found(#[case] text: &str, #[case] expected: bool) {
        let seen = OutputLines::default().feed(text.as_bytes());
        assert_eq!((seen.nothing_to_boot, seen.panic), (expected, false));
    }

    proptest! {
        #[test]
        fn any_output_takes_bounded_memory(pieces in proptest::collection::vec(any::<Vec<u8>>(), 0..50)) {
            let mut line = OutputLines::default();
            for piece in pieces {
                line.feed(&piece);
                prop_assert!(line.line.len() <= MAX_LINE);
            }
        }
    }
}
