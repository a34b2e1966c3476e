//! The terminal's raw mode, which is always undone: on return, on a panic, on signals that end the program.

use std::{
    io::{self, stdin},
    sync::{Mutex, Once, PoisonError},
};

use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

/// The mode to go back to, while it is another.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
static PANIC_HOOK: Once = Once::new();

/// Standard input in raw mode until it is dropped.
#[derive(Debug)]
pub struct RawTerminal;

impl RawTerminal {
    /// Puts standard input into raw mode when it is a terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        Ok(change(Termios::make_raw)?.then_some(Self))
    }
}

/// Standard input that is not shown until it is dropped.
#[derive(Debug)]
pub struct HiddenInput;

impl HiddenInput {
    /// Hides standard input when it is a terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        let hide = |mode: &mut Termios| mode.local_modes.remove(LocalModes::ECHO);
        Ok(change(hide)?.then_some(Self))
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        restore();
    }
}

/// Changes the mode of standard input; false when it is no terminal.
fn change(change: impl FnOnce(&mut Termios)) -> io::Result<bool> {
    if !isatty(stdin()) {
        return Ok(false);
    }
    // A panic's message is to be read on a sane terminal, so that is restored before the message.
    PANIC_HOOK.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            report(panic);
        }));
    });
    let before = tcgetattr(stdin())?;
    let mut raw = before.clone();
    change(&mut raw);
    *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    if let Err(errno) = tcsetattr(stdin(), OptionalActions::Flush, &raw) {
        restore();
        return Err(errno.into());
    }
    Ok(true)
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // A terminal that is gone needs nothing restored.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}

/// Columns and rows of the terminal, if standard input is one that knows.
pub fn size() -> Option<(u16, u16)> {
    let size = rustix::termios::tcgetwinsize(io::stdin()).ok()?;
    (size.ws_col != 0 && size.ws_row != 0).then_some((size.ws_col, size.ws_row))
}
