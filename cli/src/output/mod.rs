//! How answers are printed.

pub mod age;
pub mod clean;
pub mod describe;
pub mod disk;
pub mod event;
pub mod format;
pub mod image;
pub mod network;
pub mod nic;
pub mod node;
pub mod operation;
pub mod resources;
pub mod share;
pub mod snapshot;
pub mod stats;
pub mod table;
pub mod top;
pub mod value;
pub mod vm;

#[cfg(test)]
mod tests;

use std::io::{self, Write};

use crate::failure::{Code, Failure, Result};

/// Prints a text to standard output as it is.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| write_failed(&error))
}

/// Prints a line to standard output.
pub fn line(text: impl Into<String>) -> Result<()> {
    let mut text = text.into();
    text.push('\n');
    print(&text)
}

/// A reader that has seen enough (`| head`) ends the program quietly; anything else is an error.
pub fn write_failed(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    Failure::new(Code::Other, format!("can't write to standard output: {error}"))
}
