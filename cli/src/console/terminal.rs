//! The terminal's raw mode, which is always undone: on return, on a panic, on signals that end the program.

use std::{
    io::{self, stdin},
    sync::{Mutex, Once, PoisonError},
};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

/// The mode to go back to, while it is another.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
static PANIC_HOOK: Once = Once::new();

/// Standard input in raw mode until it is dropped.
#[derive(Debug)]
pub struct RawTerminal;

impl RawTerminal {
    /// Puts standard input into raw mode when it is a terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        if !isatty(stdin()) {
            return Ok(None);
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
        raw.make_raw();
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        let terminal = Self;
        tcsetattr(stdin(), OptionalActions::Flush, &raw)?;
        Ok(Some(terminal))
    }
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
