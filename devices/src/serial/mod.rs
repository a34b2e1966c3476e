//! The serial port: a 16550A whose output is kept in memory and served to any number of readers.
//!
//! ```text
//!  vCPU threads                                      thread "serial"
//!  THR write ──▶ Uart ──▶ History (1.25 MiB) ──▶ Server ──▶ log file, terminal, console clients
//!  RBR read  ◀── Uart ◀── input, as the guest makes room ◀──────────┘
//! ```
//!
//! Readers never make the guest wait: a reader that falls behind by more than the history's
//! capacity loses bytes and receives their number. Input is never dropped: it stays in its sender's
//! socket until there is room.

mod component;
pub mod history;
pub mod log;
mod output;
pub mod port;
pub mod server;
mod state;
pub mod uart;

pub use component::SerialPort;
pub use history::History;
pub use port::Port;
pub use server::{Server, Setup, Terminal, Watch};
pub use uart::Uart;

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects
)]
mod tests;
