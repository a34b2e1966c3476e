//! The terminal that `vmm run` was started on: in raw mode while the guest's console is on it, and always put back.

use std::{
    io::{self, IsTerminal, Write},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use devices::serial::{Terminal, server::reopen};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

/// `^]`, which ends the VM.
const ESCAPE: u8 = 0x1d;

/// The mode to go back to. A process-wide value, so that the panic hook finds it.
static COOKED: OnceLock<Termios> = OnceLock::new();
static RAW: AtomicBool = AtomicBool::new(false);

/// Raw mode; dropping it goes back.
#[derive(Debug)]
pub struct RawMode(());

impl RawMode {
    /// Turns raw mode on, if standard input is a terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let mut mode = tcgetattr(&stdin)?;
        let _ = COOKED.set(mode.clone());
        mode.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &mode)?;
        RAW.store(true, Ordering::SeqCst);
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Goes back to the mode from before, if it was changed.
pub fn restore() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(mode) = COOKED.get()
    {
        // An error means that the terminal is gone, and needs no handling.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, mode);
    }
}

/// Returns standard input and output for the guest's console, and an event that is signalled when
/// the user types the escape.
pub fn console() -> io::Result<(Terminal, EventFd)> {
    let left = EventFd::new(EFD_CLOEXEC)?;
    let escape = if io::stdin().is_terminal() {
        Some((ESCAPE, left.try_clone()?))
    } else {
        None
    };
    let terminal = Terminal {
        input: reopen(io::stdin(), false)?,
        output: reopen(io::stdout(), true)?,
        escape,
    };
    Ok((terminal, left))
}

/// Standard error for log lines: a terminal in raw mode wants a carriage return before each line feed.
#[derive(Debug)]
pub struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut stderr = io::stderr().lock();
        if RAW.load(Ordering::SeqCst) {
            for part in line.split_inclusive(|byte| *byte == b'\n') {
                match part.strip_suffix(b"\n") {
                    Some(text) => {
                        stderr.write_all(text)?;
                        stderr.write_all(b"\r\n")?;
                    }
                    None => stderr.write_all(part)?,
                }
            }
        } else {
            stderr.write_all(line)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
