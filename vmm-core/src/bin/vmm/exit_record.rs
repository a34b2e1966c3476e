//! The exit record: how the run ended, written once to the file that the daemon gave.
//!
//! Also written from the panic hook and from handlers of signals ([`fatal`](crate::sys::fatal)), when neither the allocator nor a lock may be relied on: the message is encoded
//! by hand into a buffer on the stack, and one `pwrite` puts it into the file.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    panic::{self, PanicHookInfo},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use vmm_protocol::vmm::{ExitKind, ExitRecord};

/// Longest record in bytes; longer messages are cut.
const MAX_LENGTH: usize = 512;

/// Where the process's record goes, for the panic hook.
static FILE: OnceLock<ExitFile> = OnceLock::new();

/// A file that takes one record.
#[derive(Debug)]
pub struct ExitFile {
    file: File,
    written: AtomicBool,
}

impl ExitFile {
    /// Takes an open, empty file.
    pub fn new(file: File) -> Self {
        Self {
            file,
            written: AtomicBool::new(false),
        }
    }

    /// Writes the record unless one was written before. Never panics, allocates nothing.
    pub fn write(&self, kind: ExitKind, message: &str, time_unix_ms: u64) {
        if !self.written.swap(true, Ordering::SeqCst) {
            let record = Encoded::new(kind, message, time_unix_ms);
            let _ = self.file.write_all_at(record.bytes(), 0);
        }
    }
}

/// Writes `record` to the process's exit file, if it has one and nothing was written before.
pub fn write(record: &ExitRecord) {
    if let Some(file) = FILE.get() {
        file.write(record.kind(), &record.message, record.time_unix_ms);
    }
}

/// From now on `file` takes the process's record.
pub fn set_file(file: File) {
    let _ = FILE.set(ExitFile::new(file));
}

/// Makes a panic of a thread that the machine can't do without end the process, with a record. A device's worker is
/// not one: its framework catches the panic and makes it a fault of the device.
pub fn install_panic_hook() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        crate::run::terminal::restore();
        report(info);
        if is_vital(thread::current().name()) {
            on_vital_panic(info);
        }
    }));
}

/// `main`, `control` and `vcpu-N`.
fn is_vital(thread: Option<&str>) -> bool {
    thread.is_some_and(|name| matches!(name, "main" | "control") || name.starts_with("vcpu-"))
}

/// Writes an error of this process, unless a record exists, and ends the process. For a thread that
/// cannot continue and that no other thread joins.
pub fn fail(message: &str) -> ! {
    end(ExitKind::VmmError, message);
}

/// Writes this end of the run, unless a record exists, and ends the process.
pub fn end(kind: ExitKind, message: &str) -> ! {
    let mut text = Text::default();
    text.push(message);
    write_end(kind, &text);
    std::process::exit(crate::exit_code::of(kind));
}

/// Writes an error of this process to the record, unless a record exists, and to standard error.
/// Calls only async-signal-safe functions.
pub fn write_failure(message: &Text) {
    write_end(ExitKind::VmmError, message);
}

/// The same with the kind of the end.
fn write_end(kind: ExitKind, message: &Text) {
    if let Some(file) = FILE.get() {
        file.write(kind, message.as_str(), now_unix_ms());
    }
    let mut line = Text::default();
    line.push("vmm: ");
    line.push(cut(message.as_str(), MAX_TEXT - 6));
    line.push("\n");
    let _ = rustix::io::write(io::stderr(), line.as_str().as_bytes());
}

fn on_vital_panic(info: &PanicHookInfo<'_>) -> ! {
    if let Some(file) = FILE.get() {
        let mut message = Text::default();
        message.push("panic in the vmm at ");
        message.push(
            info.location()
                .map_or("an unknown place", |location| location.file()),
        );
        message.push(", line ");
        message.push_number(info.location().map_or(0, |location| location.line().into()));
        file.write(ExitKind::VmmError, message.as_str(), now_unix_ms());
    }
    // Ends all threads at once, so that no destructor runs on state that the panic left
    // inconsistent.
    std::process::exit(crate::exit_code::ERROR);
}

fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Longest [`Text`] in bytes.
const MAX_TEXT: usize = 256;

/// Text of limited length without an allocation.
pub struct Text {
    bytes: [u8; MAX_TEXT],
    length: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self {
            bytes: [0; MAX_TEXT],
            length: 0,
        }
    }
}

impl Text {
    /// Adds what fits.
    pub fn push(&mut self, text: &str) {
        let text = cut(text, self.bytes.len() - self.length);
        self.bytes[self.length..self.length + text.len()].copy_from_slice(text.as_bytes());
        self.length += text.len();
    }

    /// Adds a decimal number.
    pub fn push_number(&mut self, number: u64) {
        self.push_digits(number, 10);
    }

    /// Adds a hexadecimal number with its prefix.
    pub fn push_hex(&mut self, number: u64) {
        self.push("0x");
        self.push_digits(number, 16);
    }

    fn push_digits(&mut self, mut number: u64, base: u64) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        // The decimal digits of u64::MAX.
        let mut digits = [b'0'; 20];
        let mut first = digits.len();
        loop {
            first -= 1;
            #[allow(clippy::cast_possible_truncation, reason = "below 16")]
            let digit = (number % base) as usize;
            digits[first] = DIGITS[digit];
            number /= base;
            if number == 0 {
                break;
            }
        }
        self.push(str::from_utf8(&digits[first..]).unwrap_or_default());
    }

    /// As it is.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

/// The longest beginning of `text` that has at most `length` bytes.
fn cut(text: &str, length: usize) -> &str {
    let end = (0..=length.min(text.len())).rfind(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

/// An encoded [`ExitRecord`] (Protocol Buffers encoding: tag, then varint or length and bytes).
struct Encoded {
    bytes: [u8; MAX_LENGTH],
    length: usize,
}

impl Encoded {
    fn new(kind: ExitKind, message: &str, time_unix_ms: u64) -> Self {
        // Besides the text: three tags, the kind, a length below 2^14 and the time.
        let message = cut(message, MAX_LENGTH - (3 + 1 + 2 + 10));
        let mut encoded = Self {
            bytes: [0; MAX_LENGTH],
            length: 0,
        };
        encoded.byte(1 << 3);
        encoded.varint(u64::try_from(i32::from(kind)).unwrap_or_default());
        encoded.byte(2 << 3 | 2);
        encoded.varint(message.len() as u64);
        for byte in message.bytes() {
            encoded.byte(byte);
        }
        encoded.byte(3 << 3);
        encoded.varint(time_unix_ms);
        encoded
    }

    fn byte(&mut self, byte: u8) {
        self.bytes[self.length] = byte;
        self.length += 1;
    }

    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.byte((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.byte((value & 0x7f) as u8);
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use prost::Message;

    use super::*;

    fn read(file: &mut File) -> ExitRecord {
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        ExitRecord::decode(bytes.as_slice()).unwrap()
    }

    #[test]
    fn a_record_decodes_to_what_was_written_and_the_first_one_stays() {
        let mut file = tempfile::tempfile().unwrap();
        let exit = ExitFile::new(file.try_clone().unwrap());
        exit.write(ExitKind::GuestPanic, "the guest panicked", 1_700_000_000_123);
        exit.write(ExitKind::PowerOff, "", 5);
        let expected = ExitRecord {
            kind: ExitKind::GuestPanic.into(),
            message: "the guest panicked".into(),
            time_unix_ms: 1_700_000_000_123,
        };
        assert_eq!(read(&mut file), expected);
    }

    #[test]
    fn an_overlong_message_is_cut_at_a_character() {
        let mut file = tempfile::tempfile().unwrap();
        let exit = ExitFile::new(file.try_clone().unwrap());
        exit.write(ExitKind::VmmError, &"ä".repeat(1000), u64::MAX);
        let record = read(&mut file);
        assert!(record.message.chars().all(|letter| letter == 'ä'));
        assert!(record.message.len() > 480, "{}", record.message.len());
        assert_eq!(record.time_unix_ms, u64::MAX);
    }

    #[test]
    fn text_holds_what_fits() {
        let mut text = Text::default();
        text.push("line ");
        text.push_number(0);
        text.push(" ");
        text.push_number(u64::MAX);
        text.push(" ");
        text.push_hex(u64::MAX);
        assert_eq!(text.as_str(), "line 0 18446744073709551615 0xffffffffffffffff");
        text.push(&"x".repeat(1000));
        assert_eq!(text.as_str().len(), 256);
    }

    #[test]
    fn only_threads_that_the_machine_needs_are_vital() {
        for (name, vital) in [
            ("main", true),
            ("control", true),
            ("vcpu-31", true),
            ("blk-root-0", false),
            ("mainly", false),
        ] {
            assert_eq!(is_vital(Some(name)), vital, "{name}");
        }
    }
}
