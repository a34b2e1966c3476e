//! System calls that no safe library has: vectored I/O straight into guest memory, io_uring, open-file-description locks.
//!
//! The functions here are safe to call with any arguments; everything unsafe of images is in here.
#![allow(unsafe_code)]

pub mod blockdev;
#[cfg(any(test, feature = "testing"))]
pub mod cachestat;
pub mod event;
pub mod file;
mod iovecs;
pub mod lock;
pub mod ring;

pub use iovecs::Iovecs;
