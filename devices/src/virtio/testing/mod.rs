//! A machine and a driver for tests and benchmarks: real rings in guest memory, the device driven through its
//! registers, nothing of KVM.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::type_complexity,
    clippy::cast_possible_truncation
)]

#[cfg(test)]
pub mod back_end;
mod bare;
mod driver;
mod machine;
mod rig;
#[cfg(test)]
pub mod saved;
#[cfg(test)]
pub mod suite;

pub use bare::{Bare, Input, Layout};
pub use driver::{Buffer, Driver, Ring, Used, describe};
pub use machine::{MockMsi, MockNotify, MockSink};
pub use rig::{Area, MEMORY_END, Rig};

use std::time::Duration;

/// Maximum time that a test waits for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(20);
