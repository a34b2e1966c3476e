//! System calls that no safe library has: vectored I/O straight into guest memory, open-file-description locks, taps, vhost.
//!
//! The functions here are safe to call with any arguments; everything unsafe of block and net devices is in here.
#![allow(unsafe_code)]

pub mod blockdev;
#[cfg(test)]
pub mod cachestat;
pub mod event;
pub mod file;
mod iovecs;
pub mod lock;
pub mod ring;
pub mod tap;
pub mod vhost;

pub use iovecs::Iovecs;
